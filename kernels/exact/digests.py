"""One sha256 for a tensor's bits, equal across machines.

    >>> import torch
    >>> from kernels.exact.digests import digest
    >>> digest(torch.zeros(2)) != digest(-torch.zeros(2))          # -0 is kept
    True

Hashed: a header (order version, dtype, shape), then the elements in row-major order, little-endian, every NaN replaced by one quiet
NaN because payloads differ between a CPU and a GPU. It does not compare to a tolerance.
"""

import hashlib
import json
import sys

import numpy as np
import torch

from kernels.exact.order import ORDER_VERSION

__all__ = ["canonical_bytes", "digest"]

_FLOATS = {torch.float64: (np.int64, 0x7FF8 << 48), torch.float32: (np.int32, 0x7FC00000), torch.float16: (np.int16, 0x7E00), torch.bfloat16: (np.int16, 0x7FC0)}
_VIEW = {np.int64: torch.int64, np.int32: torch.int32, np.int16: torch.int16}
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def canonical_bytes(x: torch.Tensor) -> bytes:
    """The elements as hashed: row-major, little-endian, NaN canonical, -0 kept."""
    x = x.detach().cpu().contiguous()
    if x.dtype in _FLOATS:
        kind, nan_bits = _FLOATS[x.dtype]
        bits = x.view(_VIEW[kind]).numpy().copy()
        bits[torch.isnan(x).numpy()] = nan_bits
    elif x.dtype in _INTEGERS:
        bits = x.numpy()
    else:
        raise ValueError(f"a digest is defined for floats of 16 to 64 bits, integers and bool; got {x.dtype=}; convert the tensor first")
    if sys.byteorder != "little":
        bits = bits.byteswap()
    return bits.tobytes()


def digest(x: torch.Tensor) -> str:
    """sha256 (hex) over dtype, shape, order version and canonical bytes of `x` (any device)."""
    header = json.dumps({"order": ORDER_VERSION, "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}, sort_keys=True)
    return hashlib.sha256(header.encode() + b"\n" + canonical_bytes(x)).hexdigest()
