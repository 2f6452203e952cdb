"""What the timing contests share: their numbers, their outputs and how these are checked, and norms as torch compiles them.

    sink = Sink(8, lambda i: x[i] @ w[i].T)          # 8 calls whose outputs are kept, poisoned and looked at
    [y for y in sink.written()]                      # the first set's, after all sets were found whole
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kernels.exact.philox import philox_bell
from kernels.fp8.epilogue import FEATURES
from kernels.fp8.quantise import Quantised, quantise_ref
from kernels.fp8.recipes import OperandRecipe

__all__ = ["Output", "Sink", "bell_rows", "compiled_norm", "normed", "parts", "snr_db"]

Output = torch.Tensor | Quantised | list[torch.Tensor]
BLOCK_ROWS = 128  # made of Philox numbers; the others are these, rolled along the row
ROLL = 7
SAME_NORM = 0.01  # sets are one set with its rows in another order: equal norms, up to roundings of partial sums
NAN_E4M3 = 0x7F  # in e5m2 too


def bell_rows(rows: int, columns: int, seed: int, device: str) -> torch.Tensor:
    """bf16 [rows, columns], bell-shaped with variance 1/3, equal on every machine."""
    block = philox_bell((min(rows, BLOCK_ROWS), columns), seed, torch.bfloat16).to(device)
    return torch.cat([block.roll(ROLL * i, dims=1) for i in range(-(-rows // len(block)))])[:rows]


def snr_db(y: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to noise of y against `want`, a float64 tensor."""
    noise = (y.double() - want).square().sum()
    return float(10 * torch.log10(want.square().sum() / noise.clamp(min=1e-300)))


class Sink:
    """Calls of a program, one a set, whose outputs stay where a replayed graph writes them.

    A program allocates its outputs; each capture of a graph gives it others. All are kept, so that none is used again for something else, and a
    check looks at those that the last run overwrote.
    """

    def __init__(self, count: int, program: Callable[[int], Output]) -> None:
        self._eager: list[object] = [None] * count
        self._captured: list[list] = [[] for _ in range(count)]
        self.calls = tuple(partial(_keep, program, self._eager, self._captured, i) for i in range(count))  # not of self: a cycle would keep gigabytes for later

    def poison(self) -> None:
        """Every output becomes NaN."""
        for i in range(len(self._eager)):
            for y in self._outputs(i):
                for part in parts(y):
                    if part.element_size() == 1:
                        part.view(torch.uint8).fill_(NAN_E4M3)
                    else:
                        part.fill_(float("nan"))

    def written(self) -> list[Output]:
        """The first set's outputs that are no poison. Raises AssertionError where a set has none, where one has holes, or another norm than the first."""
        outputs = [self._outputs(i) for i in range(len(self._eager))]
        marks, found = iter(_marks([y for of_set in outputs for y in of_set])), []
        for i, of_set in enumerate(outputs):
            marked = [(y, *next(marks)) for y in of_set]
            whole, holes = [y for y, some, _ in marked if not some], sum(some and not only for _, some, only in marked)
            assert whole and not holes, f"set {i} has {len(whole)} outputs without NaN and {holes} with some"
            found.append(whole)
        if len(found) > 1:
            norms = torch.stack([_norm(y) for whole in found for y in whole]).tolist()
            assert max(norms) <= (1 + SAME_NORM) * min(norms), f"norms of the sets' outputs are {min(norms):.4g} to {max(norms):.4g}, where rolled rows leave them equal"
        return found[0]

    def _outputs(self, i: int) -> list:
        return self._captured[i] + ([] if self._eager[i] is None else [self._eager[i]])


def _keep(program: Callable[[int], Output], eager: list, captured: list[list], i: int) -> None:
    y = program(i)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        captured[i].append(y)
    else:
        eager[i] = y


def parts(y: Output) -> list[torch.Tensor]:
    """The tensors that an output is written in; of a Quantised its numbers."""
    return y if isinstance(y, list) else [y.data_RC if isinstance(y, Quantised) else y]


def _marks(outputs: list[Output]) -> list[list[bool]]:
    """[some of it is NaN, all of it is] for each output; one wait for the device, since small shapes have hundreds."""
    return torch.stack([_mark(y) for y in outputs]).tolist() if outputs else []


def _mark(y: Output) -> torch.Tensor:
    nan = [_nan(part) for part in parts(y)]
    return torch.stack([torch.stack([n.any() for n in nan]).any(), torch.stack([n.all() for n in nan]).all()])


def _norm(y: Output) -> torch.Tensor:
    return torch.linalg.vector_norm(y.dequantise() if isinstance(y, Quantised) else y, dtype=torch.float32)


def _nan(part: torch.Tensor) -> torch.Tensor:
    return (part.view(torch.uint8) & NAN_E4M3) == NAN_E4M3 if part.element_size() == 1 else part.isnan()


def normed(x_MK: torch.Tensor, norm: str, activation: str) -> torch.Tensor:
    """activation(norm(x)) by torch's functions: in float32, rounded to x's dtype once. Norms have no parameters."""
    x, k = x_MK.float(), x_MK.shape[-1]
    if norm == "layernorm":
        x = F.layer_norm(x, (k,))
    elif norm in ("rmsnorm", "blocknorm"):
        width = k if norm == "rmsnorm" else FEATURES
        if k % width:
            raise ValueError(f"blocks of {width} features divide the row here, got {k=}; choose another shape or norm")
        x = F.rms_norm(x.unflatten(-1, (-1, width)), (width,), eps=1e-5).flatten(-2)
    return {"identity": lambda v: v, "silu": F.silu, "hardswish": F.hardswish}[activation](x).to(x_MK.dtype)


def compiled_norm(norm: str, activation: str, operand: OperandRecipe | None = None) -> Callable[[torch.Tensor], Output]:
    """`normed`, and with an operand's recipe quantised in the same function, as torch.compile makes it for the shape that it meets.

    torch compiles one function for eight shapes and then runs it uncompiled: a cell calls torch.compiler.reset first.
    """
    if operand is None:
        return torch.compile(lambda x: normed(x, norm, activation), dynamic=False, fullgraph=True)

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = quantise_ref(normed(x, norm, activation), operand)
        return q.data_RC, q.scale

    run = torch.compile(parts, dynamic=False, fullgraph=True)
    return lambda x: Quantised(*run(x), operand)
