"""What kernels.lora.bench times: one linear layer's packed adapters, forward and backward, in every way to compute them; and what it cannot be faster than.

    case = Case(way="backward", d=3584, rows=128, slots=32, rank=64)
    case.floor_us()                                       # the larger of bytes and FLOPs
    sets = case.sets("cuda"); case.run("grouped", sets[0])

K = N = d. Bytes count every tensor once: operands in bf16 read, y and dx read and written, s and ds written and read, float32 gradients read and
written. An implementation may read more, none can do with less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.exact.philox import philox_bell
from kernels.lora import backward, forward
from kernels.lora.paths import PATHS
from kernels.lora.segments import Segments

__all__ = ["COPY_TBPS", "OURS", "PATHS_TIMED", "PEAK_TFLOPS", "ROTATE_BYTES", "WAYS", "Case", "Operands", "cases", "db"]

COPY_TBPS = 4.19  # read plus written, measured on an H200 (kernels/exact/NOTES.md)
PEAK_TFLOPS = 989.0  # bf16, dense, datasheet
ROTATE_BYTES = 185_000_000  # three times an H200's L2
WAYS = ("forward", "backward")
OURS, DETERMINISTIC = "triton", "triton, deterministic"
PATHS_TIMED = (OURS, DETERMINISTIC, "looped", "padded", "grouped")
ROUNDED_DB, SUMMED_DB = 50.0, 80.0  # of bf16 results and of float32 gradients against float32 sums; a wrong tile leaves less than 30
SCALE = 0.5


@dataclass(frozen=True, kw_only=True)
class Operands:
    """y_MN: forward's output, or dy."""

    x_MK: torch.Tensor
    y_MN: torch.Tensor
    dx_MK: torch.Tensor
    a_TK: torch.Tensor
    b_TN: torch.Tensor
    s_MR: torch.Tensor
    a_grad_TK: torch.Tensor
    b_grad_TN: torch.Tensor
    seg: Segments


@dataclass(frozen=True, kw_only=True)
class Case:
    way: str
    d: int
    rows: int
    slots: int
    rank: int

    @property
    def name(self) -> str:
        return f"{self.way} d={self.d} T={self.rows} n={self.slots} r={self.rank}"

    @property
    def moved_bytes(self) -> int:
        m, both = self.rows * self.slots, 2 * self.slots * self.rank * self.d  # A and B
        if self.way == "forward":
            return 2 * (m * self.d + 2 * m * self.d + both + 2 * m * self.rank)
        return 2 * (2 * m * self.d + 2 * m * self.d + both + 3 * m * self.rank) + 8 * both

    @property
    def flops(self) -> int:
        return (4 if self.way == "forward" else 8) * self.rows * self.slots * self.rank * self.d

    def floor_us(self, tbps: float = COPY_TBPS) -> float:
        return max(self.moved_bytes / tbps, self.flops / PEAK_TFLOPS) / 1e6

    @property
    def least_bytes(self) -> int:
        """Of one product alone: rows of one width, and one adapter matrix."""
        return 2 * self.d * self.slots * (self.rows + self.rank)

    def sets(self, device: str, each_bytes: int | None = None) -> list[Operands]:
        """Rotated operands, more than ROTATE_BYTES together where a call moves `each_bytes` (the case's, unless given); at most 16."""
        return [self.operands(device, i) for i in range(max(2, min(16, ROTATE_BYTES // (each_bytes or self.moved_bytes) + 1)))]

    def operands(self, device: str, i: int) -> Operands:
        m, t, kind = self.rows * self.slots, self.rank * self.slots, torch.bfloat16 if device.startswith("cuda") else torch.float32
        seg = Segments.of(rows=(self.rows,) * self.slots, ranks=(self.rank,) * self.slots, scales=(SCALE,) * self.slots, device=device)
        x, y, dx = (_numbers(device, (m, self.d), 3 * i + j, kind) for j in range(3))
        a, b = (_numbers(device, (t, self.d), 50 + 2 * i + j, kind) * 2.0**-5 for j in range(2))
        grads = [torch.zeros((t, self.d), dtype=torch.float32, device=device) for _ in range(2)]
        return Operands(x_MK=x, y_MN=y, dx_MK=dx, a_TK=a, b_TN=b, s_MR=_numbers(device, (m, self.rank), 99 + i, kind), a_grad_TK=grads[0], b_grad_TN=grads[1], seg=seg)

    def run(self, path: str, o: Operands) -> torch.Tensor:
        """Once; -> s or ds, which it made."""
        if path in (OURS, DETERMINISTIC):
            return (_forward if self.way == "forward" else _backward)(o, path == DETERMINISTIC)
        p = PATHS[path]
        if self.way == "forward":
            s = p.shrink(o.x_MK, o.a_TK, o.seg)
            p.expand(o.y_MN, s, o.b_TN, o.seg)
            return s
        ds = p.grad_s(o.y_MN, o.b_TN, o.seg)
        p.grad_b(o.s_MR, o.y_MN, o.seg, o.b_grad_TN)
        p.grad_a(ds, o.x_MK, o.seg, o.a_grad_TK)
        p.grad_x(o.dx_MK, ds, o.a_TK, o.seg)
        return ds

    def problem(self, path: str, device: str) -> str:
        """What `path` computes wrongly, or "": against the references in float32 on the same device."""
        o = self.operands(device, 0)
        x, y, dx, a, b = (t.float() for t in (o.x_MK, o.y_MN, o.dx_MK, o.a_TK, o.b_TN))
        if self.way == "forward":
            s = forward.shrink_ref(x, a, o.seg)
            forward.expand_ref(y, s.to(o.s_MR.dtype).float(), b, o.seg)
            self.run(path, o)
            found = [("y", db(o.y_MN, y), ROUNDED_DB)]
        else:
            ga, gb = torch.zeros_like(o.a_grad_TK), torch.zeros_like(o.b_grad_TN)
            ds = backward.grad_s_ref(y, b, o.seg)
            backward.grad_b_ref(o.s_MR.float(), y, o.seg, gb)
            got = self.run(path, o)
            backward.grad_a_ref(got[:, : self.rank].float(), x, o.seg, ga)
            backward.grad_x_ref(dx, got[:, : self.rank].float(), a, o.seg)
            floor = SUMMED_DB if path in (OURS, DETERMINISTIC) else ROUNDED_DB - 5  # other paths round gradients to bf16, or more
            found = [("ds", db(got[:, : self.rank], ds), ROUNDED_DB - 5), ("dB", db(o.b_grad_TN, gb), floor), ("dA", db(o.a_grad_TK, ga), floor), ("dx", db(o.dx_MK, dx), ROUNDED_DB - 5)]
        return "; ".join(f"{what} has {has:.1f} dB, at least {least} is asked for" for what, has, least in found if not has >= least)


def _forward(o: Operands, deterministic: bool) -> torch.Tensor:
    s = forward.shrink(o.x_MK, o.a_TK, o.seg, deterministic=deterministic)
    forward.expand(o.y_MN, s, o.b_TN, o.seg, deterministic=deterministic)
    return s


def _backward(o: Operands, deterministic: bool) -> torch.Tensor:
    ds = backward.grad_sb(o.y_MN, o.s_MR, o.b_TN, o.seg, o.b_grad_TN, deterministic=deterministic)
    backward.grad_ax(o.dx_MK, ds, o.x_MK, o.a_TK, o.seg, o.a_grad_TK, deterministic=deterministic)
    return ds


_BASE: dict[tuple[str, torch.dtype], torch.Tensor] = {}


def _numbers(device: str, shape: tuple[int, int], i: int, dtype: torch.dtype) -> torch.Tensor:
    """Philox's bell, rolled by i and repeated: timing needs values of the right sizes, not new ones."""
    n = math.prod(shape)
    if (device, dtype) not in _BASE:
        _BASE[device, dtype] = philox_bell((1 << 20,), 7, torch.float32).to(device, dtype)
    return _BASE[device, dtype].roll(1 + 7919 * i).repeat(-(-n // (1 << 20)))[:n].view(shape)


def db(found: torch.Tensor, want: torch.Tensor) -> float:
    noise = float((found.float() - want.float()).square().sum(dtype=torch.float64))
    return 10 * math.log10(float(want.square().sum(dtype=torch.float64)) / noise) if noise else math.inf


def cases(ds: tuple[int, ...], tokens: tuple[int, ...], ranks: tuple[int, ...], slots: int) -> Iterator[Case]:
    """Every d and number of tokens at rank 64, every rank at the middle d and number of tokens."""
    middle = ds[len(ds) // 2], tokens[min(1, len(tokens) - 1)]
    for way in WAYS:
        yield from (Case(way=way, d=d, rows=t, slots=slots, rank=64) for d in ds for t in tokens)
        yield from (Case(way=way, d=middle[0], rows=middle[1], slots=slots, rank=r) for r in ranks if r != 64)
