"""Reads a GGUF file: metadata, and tensors dequantised to fp32 bit for bit as the `gguf` package does.

    from suite.assets.gguf import read_gguf
    model = read_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
    model.metadata["llama.block_count"], model.tensor("blk.0.attn_q.weight").shape      # 30, (576, 576)

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). Block types: F32, Q8_0 and Q4_1,
those that our pinned file holds; another type is an AssetError that names it. Every length in the file is checked against the bytes
that are there before it is used, so a damaged file is one clear line and never a crash. It does not write GGUF.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from suite.assets._sources import AssetError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_BLOCK = 32  # values in a Q8_0 or Q4_1 block
# type number -> (name, values a block, bytes a block)
_TYPES = {0: ("F32", 1, 4), 3: ("Q4_1", _BLOCK, 20), 8: ("Q8_0", _BLOCK, 34)}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major, outermost first (GGUF stores it innermost first)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """An open GGUF file: `metadata` as Python values, `tensors` by name; the tensor bytes stay on disk until asked for."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as fp32, row-major. Raises AssetError for a name that the file lacks."""
        if name not in self.tensors:
            raise AssetError(f"gguf {self.path.name}: no tensor {name!r}; it has {len(self.tensors)}, see `.tensors`")
        info = self.tensors[name]
        raw = np.fromfile(self.path, dtype=np.uint8, count=info.size_bytes, offset=info.start)
        return _DEQUANTISE[info.type_name](raw).reshape(info.shape)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Parses the header of `path`. Raises AssetError where the file is not a well-formed GGUF of a kind we read."""
    path = Path(path)
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data))
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise AssetError(f"gguf {path.name}: not a readable GGUF file ({error}); fetch it again") from error


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not start with the letters GGUF")
    version, tensor_count, pair_count = cursor.unpack("I"), cursor.unpack("Q"), cursor.unpack("Q")
    if version not in (2, 3):
        raise ValueError(f"GGUF version must be 2 or 3, got {version=}")
    cursor.expect(pair_count, 12)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("I"))
    cursor.expect(tensor_count, 24)
    raw = [_tensor_header(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"general.alignment must be a positive number of bytes, got {alignment=}")
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: _place(name, dims, type_number, base + offset, cursor.size) for name, dims, type_number, offset in raw}
    if len(tensors) != len(raw):
        raise ValueError("two tensors have one name")
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = cursor.string(), cursor.unpack("I")
    if not 1 <= rank <= _MAX_DIMS:
        raise ValueError(f"a tensor has 1 to {_MAX_DIMS} dimensions, got {rank=} for {name!r}")
    dims = tuple(cursor.unpack("Q") for _ in range(rank))
    return name, dims, cursor.unpack("I"), cursor.unpack("Q")


def _place(name: str, dims: tuple[int, ...], type_number: int, start: int, file_bytes: int) -> TensorInfo:
    if type_number not in _TYPES:
        raise ValueError(f"tensor {name!r} has block type {type_number}; we read {sorted(t[0] for t in _TYPES.values())}")
    type_name, block_values, block_bytes = _TYPES[type_number]
    values = 1
    for dim in dims:
        values *= dim
    if dims[0] % block_values:
        raise ValueError(f"rows of {type_name} are whole blocks of {block_values}, got {dims=} for {name!r}")
    size_bytes = values // block_values * block_bytes
    if start + size_bytes > file_bytes:
        raise ValueError(f"tensor {name!r} ends at byte {start + size_bytes}, the file at {file_bytes}")
    return TensorInfo(name=name, shape=dims[::-1], type_name=type_name, start=start, size_bytes=size_bytes)


class _Cursor:
    """A read position that refuses to pass the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.size, self.at = data, len(data), 0

    def expect(self, count: int, least_bytes: int) -> None:
        """Refuses a count that could not fit in what is left, before anything is allocated for it."""
        if count * least_bytes > self.size - self.at:
            raise ValueError(f"cut short at byte {self.at}: {count} entries announced")

    def take(self, size_bytes: int) -> bytes:
        self.expect(size_bytes, 1)
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at]

    def unpack(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.unpack("Q")).decode("utf-8")

    def value(self, type_number: int) -> Any:
        if type_number in _SCALARS:
            return self.unpack(_SCALARS[type_number])
        if type_number == _STRING:
            return self.string()
        if type_number != _ARRAY:
            raise ValueError(f"unknown metadata type {type_number}")
        item_type, count = self.unpack("I"), self.unpack("Q")
        if item_type == _STRING:
            self.expect(count, 8)
            return [self.string() for _ in range(count)]
        if item_type not in _SCALARS:
            raise ValueError(f"arrays hold numbers or strings, got {item_type=}")
        code = _SCALARS[item_type]
        self.expect(count, struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))


def _half(column: np.ndarray) -> np.ndarray:
    """The two bytes at the head of each block, fp16 to fp32 (exact)."""
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _f32(raw: np.ndarray) -> np.ndarray:
    return raw.view("<f4").astype(np.float32)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """A block is d (fp16) and 32 int8: x = q * d. The product (11 + 7 bits) is exact in fp32."""
    blocks = raw.reshape(-1, 34)
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * _half(blocks[:, :2])


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """A block is d, m (fp16) and 32 nibbles, low nibbles first: x = d * q + m. The product is exact, so fused or not is the same."""
    blocks = raw.reshape(-1, 20)
    nibbles = np.concatenate([blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return nibbles * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


_DEQUANTISE = {"F32": _f32, "Q8_0": _q8_0, "Q4_1": _q4_1}
