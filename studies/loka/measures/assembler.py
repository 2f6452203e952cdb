"""One assembler for all Triton kernels of a cell: ours and those that torch.compile makes.

    @one_assembler()
    def crossover(ctx, ...): ...

torch's wheels for CUDA carry a ptxas. torch.compile makes it the process's (TRITON_PTXAS_PATH) when it first compiles a kernel in the process itself,
and not where a helper process was quicker: our kernels would come from one assembler or the other by chance, and those compiled ahead would not be
found. A variable that is set stays, so Triton's own is named until the function returns. Without Triton's NVIDIA backend it does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import triton
from triton import knobs

__all__ = ["VARIABLE", "one_assembler"]

VARIABLE = "TRITON_PTXAS_PATH"


@contextmanager
def one_assembler() -> Iterator[None]:
    """Inside, TRITON_PTXAS_PATH is the assembler that Triton would take now; afterwards it is what it was."""
    before = os.environ.get(VARIABLE)
    if before is None and "nvidia" in triton.backends.backends:
        os.environ[VARIABLE] = knobs.nvidia.ptxas.path
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
