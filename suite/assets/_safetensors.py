"""Reads and writes the safetensors format with numpy alone, so that a host with only torch and numpy can load a model.

    write_safetensors(path, {"w": bits_u16}, metadata={"note": "x"}, bf16={"w"})
    tensors, metadata = read_safetensors(path)              # bf16 comes back as its uint16 bit patterns

Format: https://github.com/huggingface/safetensors#format: a little-endian header length, a JSON header, then the bytes. Types: F32 and
BF16, those that our models hold. The same tensors always give the same file, byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path

import numpy as np

from suite.assets._sources import AssetError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_TYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str], bf16: Set[str]) -> None:
    """Writes `tensors` in name order; the names in `bf16` are uint16 bit patterns, all others fp32. Raises ValueError for other types."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in sorted(tensors):
        kind = "BF16" if name in bf16 else "F32"
        if tensors[name].dtype != _TYPES[kind]:
            raise ValueError(f"{kind} tensors are stored from {_TYPES[kind]}, got {tensors[name].dtype=} for {name=}; convert it first")
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [end, end + tensors[name].nbytes]}
        end += tensors[name].nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with path.open("xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            out.write(np.ascontiguousarray(tensors[name]).data)


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns (tensors, metadata). Tensors are read-only views of a memory map. Raises AssetError for a malformed file."""
    path = Path(path)
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        header_bytes = int.from_bytes(raw[:8].tobytes(), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, raw.size - 8):
            raise ValueError(f"its header cannot have {header_bytes} bytes")
        header = json.loads(raw[8 : 8 + header_bytes].tobytes())
        metadata = header.pop("__metadata__", {})
        data = raw[8 + header_bytes :]
        return {name: _view(data, name, entry) for name, entry in header.items()}, metadata
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AssetError(f"safetensors {path.name}: not readable ({error}); remove the file and run again") from error


def _view(data: np.ndarray, name: str, entry: dict) -> np.ndarray:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= data.size:
        raise ValueError(f"tensor {name!r} lies outside the file")
    return data[start:stop].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
