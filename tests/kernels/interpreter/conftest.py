"""What the Triton interpreter gets wrong about FP8, put right: its casts drop the carry of a rounding and make NaN finite."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels.fp8 import formats

FORMATS = {tl.float8e4nv: formats.E4M3, tl.float8e5: formats.E5M2}


@pytest.fixture
def fp8_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 -> FP8 by formats.cast, which rounds as the hardware does, and FP8 -> float32 by torch."""
    original = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target in FORMATS:
            bits = formats.cast(torch.from_numpy(src.data.copy()), FORMATS[target]).view(torch.uint8).numpy()
            return interpreter.TensorHandle(bits, target)
        if source in FORMATS and target == tl.float32:
            return interpreter.TensorHandle(torch.from_numpy(src.data.copy()).view(FORMATS[source].dtype).float().numpy(), target)
        return original(self, src, dst_type, rounding_mode)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
