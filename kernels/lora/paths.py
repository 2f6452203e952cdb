"""Other ways to compute what the packed kernels compute: the rungs of the baseline ladder, under one interface.

    path = PATHS["grouped"]
    s_MR = path.shrink(x_MK, a_TK, seg)                   # s = x a^T of each slot's own rows
    path.expand(y_MN, s_MR, b_TN, seg)                    # y += scale s b, in place
    ds_MR = path.grad_s(dy_MN, b_TN, seg)                 # ds = scale dy b^T
    path.grad_b(s_MR, dy_MN, seg, grad_TN);  path.grad_a(ds_MR, x_MK, seg, grad_TK)     # added in float32
    path.grad_x(dx_MK, ds_MR, a_TK, seg)                  # dx += ds a, in place

Legend as in kernels.lora.segments: S slots, M rows, K inputs, N outputs, T rank rows of all slots, R = seg.widest.

    looped         torch products, one slot after another: what packing the base alone gives. On the CPU a slot's bits are those it has alone
    padded         slots padded to one number of rows and one rank, torch.bmm
    grouped        torch.nn.functional.grouped_mm: rows ragged, ranks padded to the widest. bf16 on a GPU; sizes are multiples of 8
    triton         the segmented kernels of this package
    concatenated   all ranks as one adapter, other slots' columns multiplied by 0. It is here to show that it fails: 0 NaN = NaN, so one slot
                   that diverged ends all others. s_MR has T columns instead of R

Row bounds reach `looped`, `padded` and `concatenated` by the host. They are read once a Segments (that read waits for the GPU, so a first call
stands in front of a graph's capture), and a graph that holds these paths serves the rows it was captured with; scales are read on the device.
With dropout every path but `triton` makes the dropped copy of x, which is part of its price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.lora import backward, forward
from kernels.lora.dropout import Dropout
from kernels.lora.dropped import dropped, dropped_rows_ref
from kernels.lora.segments import Segments

__all__ = ["PATHS", "Path", "path_named"]

_GROUPED_MULTIPLE = 8  # of bf16 numbers: 16 bytes (pytorch#150374)


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way to compute; the signatures stand in the module's text. shrink, grad_a and grad_x take `dropout` (kernels.lora.dropout.Dropout)."""

    name: str
    shrink: Callable[..., torch.Tensor]
    expand: Callable[..., None]
    grad_s: Callable[..., torch.Tensor]
    grad_b: Callable[..., None]
    grad_a: Callable[..., None]
    grad_x: Callable[..., None]


# ---- what the host knows of a Segments -------------------------------------------------------------------------------------------


class _Layout:
    """Bounds of rows and rank rows on the host, and index tensors that follow from them, each made when first asked for."""

    def __init__(self, seg: Segments) -> None:
        self.bounds = seg.bounds()
        self.ranks, self.most, self.widest = seg.ranks, seg.most_rows, seg.widest
        self.even_rows = all(m.stop - m.start == seg.most_rows for m, _ in self.bounds)
        self.even_ranks = len(set(seg.ranks)) == 1
        self.device = seg.offsets.device

    @cached_property
    def padded_rows(self) -> torch.Tensor:
        """int64 [M]: where a row stands among S x most_rows."""
        return self._index([range(i * self.most, i * self.most + m.stop - m.start) for i, (m, _) in enumerate(self.bounds)])

    @cached_property
    def padded_ranks(self) -> torch.Tensor:
        """int64 [T]: where a rank row stands among S x R."""
        return self._index([range(i * self.widest, i * self.widest + r) for i, r in enumerate(self.ranks)])

    @cached_property
    def slot_of_row(self) -> torch.Tensor:
        """int64 [M]."""
        return self._index([[i] * (m.stop - m.start) for i, (m, _) in enumerate(self.bounds)])

    @cached_property
    def slot_of_rank(self) -> torch.Tensor:
        """int64 [T]."""
        return self._index([[i] * r for i, r in enumerate(self.ranks)])

    @cached_property
    def own_MT(self) -> torch.Tensor:
        """float32 [M, T]: 1 where a rank row belongs to a row's slot, else 0."""
        own = torch.zeros(self.bounds[-1][0].stop, sum(self.ranks), dtype=torch.float32, device=self.device)
        for rows, ranks in self.bounds:
            own[rows, ranks] = 1.0
        return own

    def _index(self, pieces: list) -> torch.Tensor:
        return torch.tensor([i for piece in pieces for i in piece], dtype=torch.int64, device=self.device)


_LAYOUTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # offsets -> (its version, ranks, layout)


def _layout(seg: Segments) -> _Layout:
    """Read again where the offsets were written since."""
    version = (0 if seg.offsets.is_inference() else seg.offsets._version, seg.ranks, seg.most_rows)
    known = _LAYOUTS.get(seg.offsets)
    if known is None or known[0] != version:
        known = _LAYOUTS[seg.offsets] = (version, _Layout(seg))
    return known[1]


def _wide_product(a: torch.Tensor, b: torch.Tensor, product: Callable = torch.mm) -> torch.Tensor:
    """a b for a gradient: 16-bit operands give float32."""
    if a.dtype in (torch.float32, torch.float64):
        return product(a, b)
    return product(a, b, out_dtype=torch.float32) if a.is_cuda else product(a.float(), b.float())


def _dropped(x_MK: torch.Tensor, seg: Segments, dropout: Dropout | None) -> torch.Tensor:
    if dropout is None:
        return x_MK
    return (dropped if x_MK.is_cuda else dropped_rows_ref)(x_MK, seg, dropout)


def _add_to_x(dx_MK: torch.Tensor, added_MK: torch.Tensor, seg: Segments, dropout: Dropout | None) -> None:
    dx_MK.add_(_dropped(added_MK, seg, dropout))


# ---- looped --------------------------------------------------------------------------------------------------------------------


def _slots(seg: Segments) -> list[tuple[int, slice, slice, int]]:
    """(slot, rows, rank rows, rank) of slots that have rows."""
    return [(i, m, t, t.stop - t.start) for i, (m, t) in enumerate(_layout(seg).bounds) if m.stop > m.start]


def _looped_shrink(x_MK, a_TK, seg, *, dropout=None):
    x_MK = _dropped(x_MK, seg, dropout)
    s_MR = x_MK.new_empty(x_MK.shape[0], seg.widest)  # columns above a slot's rank are never read
    for _, rows, ranks, rank in _slots(seg):
        torch.mm(x_MK[rows], a_TK[ranks].T, out=s_MR[rows, :rank])
    return s_MR


def _row_scales(seg: Segments) -> torch.Tensor:
    """float32 [M, 1]: all slots are scaled by one launch, where a slot's own would make the loop slower than a user's."""
    return seg.scales.index_select(0, _layout(seg).slot_of_row)[:, None]


def _looped_expand(y_MN, s_MR, b_TN, seg):
    s_MR = torch.mul(s_MR, _row_scales(seg), out=torch.empty_like(s_MR))  # rounded once
    for _, rows, ranks, rank in _slots(seg):
        y_MN[rows].addmm_(s_MR[rows, :rank], b_TN[ranks])


def _looped_grad_s(dy_MN, b_TN, seg):
    ds_MR = dy_MN.new_empty(dy_MN.shape[0], seg.widest)
    for _, rows, ranks, rank in _slots(seg):
        torch.mm(dy_MN[rows], b_TN[ranks].T, out=ds_MR[rows, :rank])
    return ds_MR.mul_(_row_scales(seg))


def _looped_grad_b(s_MR, dy_MN, seg, out_TN):
    for i, rows, ranks, rank in _slots(seg):
        out_TN[ranks].addcmul_(_wide_product(s_MR[rows, :rank].T, dy_MN[rows]), seg.scales[i])


def _looped_grad_a(ds_MR, x_MK, seg, out_TK, *, dropout=None):
    x_MK = _dropped(x_MK, seg, dropout)
    for _, rows, ranks, rank in _slots(seg):
        out_TK[ranks].add_(_wide_product(ds_MR[rows, :rank].T, x_MK[rows]))


def _looped_grad_x(dx_MK, ds_MR, a_TK, seg, *, dropout=None):
    if dropout is None:
        for _, rows, ranks, rank in _slots(seg):
            dx_MK[rows].addmm_(ds_MR[rows, :rank], a_TK[ranks])
        return
    added_MK = torch.zeros_like(dx_MK)
    for _, rows, ranks, rank in _slots(seg):
        torch.mm(ds_MR[rows, :rank], a_TK[ranks], out=added_MK[rows])
    _add_to_x(dx_MK, added_MK, seg, dropout)


# ---- padded --------------------------------------------------------------------------------------------------------------------
# Places that padding adds are zeros, never a slot's numbers times 0.


def _pad_rows(x_MC: torch.Tensor, seg: Segments) -> torch.Tensor:
    """[S, most_rows, C]: a view where every slot has so many rows."""
    layout, shape = _layout(seg), (seg.slots, seg.most_rows, x_MC.shape[1])
    if layout.even_rows:
        return x_MC.view(shape)
    return x_MC.new_zeros(seg.slots * seg.most_rows, x_MC.shape[1]).index_copy_(0, layout.padded_rows, x_MC).view(shape)


def _own_rows(x_SPC: torch.Tensor, seg: Segments) -> torch.Tensor:
    """[M, C] out of the padded ones."""
    layout, flat = _layout(seg), x_SPC.reshape(-1, x_SPC.shape[2])
    return flat if layout.even_rows else flat.index_select(0, layout.padded_rows)


def _pad_ranks(w_TC: torch.Tensor, seg: Segments) -> torch.Tensor:
    """[S, R, C]: a view where all capacities are equal."""
    layout, shape = _layout(seg), (seg.slots, seg.widest, w_TC.shape[1])
    if layout.even_ranks:
        return w_TC.view(shape)
    return w_TC.new_zeros(seg.slots * seg.widest, w_TC.shape[1]).index_copy_(0, layout.padded_ranks, w_TC).view(shape)


def _own_ranks(g_SRC: torch.Tensor, seg: Segments) -> torch.Tensor:
    layout, flat = _layout(seg), g_SRC.reshape(-1, g_SRC.shape[2])
    return flat if layout.even_ranks else flat.index_select(0, layout.padded_ranks)


def _scales(seg: Segments, like: torch.Tensor) -> torch.Tensor:
    """[S, 1, 1]."""
    return seg.scales.to(like.dtype)[:, None, None]


def _padded_shrink(x_MK, a_TK, seg, *, dropout=None):
    x_SPK = _pad_rows(_dropped(x_MK, seg, dropout), seg)
    return _own_rows(torch.bmm(x_SPK, _pad_ranks(a_TK, seg).transpose(1, 2)), seg)


def _padded_expand(y_MN, s_MR, b_TN, seg):
    s_SPR, b_SRN = _pad_rows(s_MR, seg), _pad_ranks(b_TN, seg)
    s_SPR = s_SPR * _scales(seg, s_SPR)
    if _layout(seg).even_rows:
        y_MN.view(*s_SPR.shape[:2], -1).baddbmm_(s_SPR, b_SRN)
    else:
        y_MN.add_(_own_rows(torch.bmm(s_SPR, b_SRN), seg))


def _padded_grad_s(dy_MN, b_TN, seg):
    ds_SPR = torch.bmm(_pad_rows(dy_MN, seg), _pad_ranks(b_TN, seg).transpose(1, 2))
    return _own_rows(ds_SPR * _scales(seg, ds_SPR), seg)


def _padded_grad_b(s_MR, dy_MN, seg, out_TN):
    g_SRN = _wide_product(_pad_rows(s_MR, seg).transpose(1, 2), _pad_rows(dy_MN, seg), torch.bmm)
    out_TN.add_(_own_ranks(g_SRN * _scales(seg, g_SRN), seg))


def _padded_grad_a(ds_MR, x_MK, seg, out_TK, *, dropout=None):
    x_SPK = _pad_rows(_dropped(x_MK, seg, dropout), seg)
    out_TK.add_(_own_ranks(_wide_product(_pad_rows(ds_MR, seg).transpose(1, 2), x_SPK, torch.bmm), seg))


def _padded_grad_x(dx_MK, ds_MR, a_TK, seg, *, dropout=None):
    _add_to_x(dx_MK, _own_rows(torch.bmm(_pad_rows(ds_MR, seg), _pad_ranks(a_TK, seg)), seg), seg, dropout)


# ---- grouped -------------------------------------------------------------------------------------------------------------------


def _grouped(a: torch.Tensor, b: torch.Tensor, seg: Segments) -> torch.Tensor:
    """[M, C] by [S, C, D] -> [M, D] (rows of a slot by its matrix), or [C, M] by [M, D] -> [S, C, D] (sums over a slot's rows)."""
    sizes = (a.shape[1], *b.shape[1:]) if b.ndim == 3 else (a.shape[0], b.shape[1])
    if any(size % _GROUPED_MULTIPLE for size in sizes):
        raise ValueError(f"grouped_mm takes sizes and ranks that are multiples of {_GROUPED_MULTIPLE}, got {tuple(a.shape)} by {tuple(b.shape)}; take path 'padded'")
    if a.is_cuda and a.dtype != torch.bfloat16:
        raise ValueError(f"grouped_mm takes bf16 on a GPU, got {a.dtype}; take path 'padded'")
    return torch.nn.functional.grouped_mm(a, b, offs=seg.offsets[1:])


def _grouped_sums(a_MC: torch.Tensor, b_MD: torch.Tensor, seg: Segments) -> torch.Tensor:
    g_SCD = _grouped(a_MC.T, b_MD, seg).float()
    if a_MC.shape[0] < seg.slots * seg.most_rows:  # a slot may be empty, and nothing is said of a sum without terms
        g_SCD.masked_fill_((seg.offsets[1:] == seg.offsets[:-1])[:, None, None], 0.0)
    return g_SCD


def _grouped_shrink(x_MK, a_TK, seg, *, dropout=None):
    return _grouped(_dropped(x_MK, seg, dropout), _pad_ranks(a_TK, seg).transpose(1, 2), seg)


def _grouped_expand(y_MN, s_MR, b_TN, seg):
    b_SRN = _pad_ranks(b_TN, seg)
    y_MN.add_(_grouped(s_MR, b_SRN * _scales(seg, b_SRN), seg))


def _grouped_grad_s(dy_MN, b_TN, seg):
    b_SRN = _pad_ranks(b_TN, seg)
    return _grouped(dy_MN, (b_SRN * _scales(seg, b_SRN)).transpose(1, 2), seg)


def _grouped_grad_b(s_MR, dy_MN, seg, out_TN):
    g_SRN = _grouped_sums(s_MR, dy_MN, seg)
    out_TN.add_(_own_ranks(g_SRN * _scales(seg, g_SRN), seg))


def _grouped_grad_a(ds_MR, x_MK, seg, out_TK, *, dropout=None):
    out_TK.add_(_own_ranks(_grouped_sums(ds_MR, _dropped(x_MK, seg, dropout), seg), seg))


def _grouped_grad_x(dx_MK, ds_MR, a_TK, seg, *, dropout=None):
    _add_to_x(dx_MK, _grouped(ds_MR, _pad_ranks(a_TK, seg), seg), seg, dropout)


# ---- concatenated --------------------------------------------------------------------------------------------------------------


def _rank_scales(seg: Segments, like: torch.Tensor) -> torch.Tensor:
    """[T]."""
    return seg.scales.index_select(0, _layout(seg).slot_of_rank).to(like.dtype)


def _masked(s_MT: torch.Tensor, seg: Segments) -> torch.Tensor:
    return s_MT * _layout(seg).own_MT.to(s_MT.dtype)


def _concatenated_shrink(x_MK, a_TK, seg, *, dropout=None):
    return _masked(_dropped(x_MK, seg, dropout) @ a_TK.T, seg)


def _concatenated_expand(y_MN, s_MT, b_TN, seg):
    y_MN.addmm_(s_MT * _rank_scales(seg, s_MT), b_TN)


def _concatenated_grad_s(dy_MN, b_TN, seg):
    ds_MT = dy_MN @ b_TN.T
    return _masked(ds_MT * _rank_scales(seg, ds_MT), seg)


def _concatenated_grad_b(s_MT, dy_MN, seg, out_TN):
    out_TN.addcmul_(_wide_product(s_MT.T, dy_MN), _rank_scales(seg, out_TN)[:, None])


def _concatenated_grad_a(ds_MT, x_MK, seg, out_TK, *, dropout=None):
    out_TK.add_(_wide_product(ds_MT.T, _dropped(x_MK, seg, dropout)))


def _concatenated_grad_x(dx_MK, ds_MT, a_TK, seg, *, dropout=None):
    if dropout is None:
        dx_MK.addmm_(ds_MT, a_TK)
    else:
        _add_to_x(dx_MK, ds_MT @ a_TK, seg, dropout)


# ---- the ladder ----------------------------------------------------------------------------------------------------------------

PATHS = {
    "looped": Path(
        name="looped", shrink=_looped_shrink, expand=_looped_expand, grad_s=_looped_grad_s,
        grad_b=_looped_grad_b, grad_a=_looped_grad_a, grad_x=_looped_grad_x,
    ),
    "padded": Path(
        name="padded", shrink=_padded_shrink, expand=_padded_expand, grad_s=_padded_grad_s,
        grad_b=_padded_grad_b, grad_a=_padded_grad_a, grad_x=_padded_grad_x,
    ),
    "grouped": Path(
        name="grouped", shrink=_grouped_shrink, expand=_grouped_expand, grad_s=_grouped_grad_s,
        grad_b=_grouped_grad_b, grad_a=_grouped_grad_a, grad_x=_grouped_grad_x,
    ),
    "triton": Path(
        name="triton", shrink=forward.shrink, expand=forward.expand, grad_s=backward.grad_s,
        grad_b=backward.grad_b, grad_a=backward.grad_a, grad_x=backward.grad_x,
    ),
    "concatenated": Path(
        name="concatenated", shrink=_concatenated_shrink, expand=_concatenated_expand, grad_s=_concatenated_grad_s,
        grad_b=_concatenated_grad_b, grad_a=_concatenated_grad_a, grad_x=_concatenated_grad_x,
    ),
}  # fmt: skip


def path_named(name: str) -> Path:
    """Raises ValueError for a name that PATHS does not have."""
    if name not in PATHS:
        raise ValueError(f"a path is one of {sorted(PATHS)}, got {name!r}; choose one")
    return PATHS[name]
