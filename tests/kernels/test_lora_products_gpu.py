"""Claims on a GPU: every packed product follows float64 under every schedule; deterministic bits are a slot's own; NaN stays; graphs follow the device.

Run on a GPU host: python -m pytest tests/kernels/test_lora_products_gpu.py.

    ROUNDED_DB   one rounding to bf16 of a float32 sum: relative 2^-9 at most, uniform, 10 log10(3 2^16) = 52.9 in the worst case; sums of 4096 in float32 are far below
    ADDED_DB     y = y + scale s w rounds once, its terms are as large as the sum: the same
    SUMMED_DB    float32 gradients of bf16 operands: products are exact, sums of 1024 rows round by 2^-24 each, sqrt(1024) of them: above 100 dB; tensor cores keep fewer bits of a
                 partial sum (truncation to 2^-22 or so), which leaves 90
"""

import math

import pytest
import torch

from kernels.exact.philox import philox_bell
from kernels.lora import backward, forward
from kernels.lora.autograd import Factor, lora_linear
from kernels.lora.dropout import Dropout
from kernels.lora.schedules import DETERMINISTIC, Schedule, candidates
from kernels.lora.segments import Segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROUNDED_DB, ADDED_DB, SUMMED_DB = 52.0, 51.0, 90.0
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# ragged with an empty slot and exact ranks; one token a slot; buckets mixed to 128; even; more rows than any tile
PACKS = {
    "ragged": ((300, 0, 129, 1), (16, 64, 100, 8)),
    "single tokens": ((1, 1, 1), (8, 1, 16)),
    "mixed": ((128, 128, 64), (16, 128, 64)),
    "even": ((32,) * 8, (64,) * 8),
    "long": ((1500, 700), (64, 64)),
}
# 128 does not divide 576, 16 numbers do not divide 1000; each pack meets a width that tries it, as every kernel must be compiled
CASES = [("ragged", 576), ("ragged", 1000), ("single tokens", 1000), ("mixed", 2048), ("even", 2048), ("long", 576)]


def db(found: torch.Tensor, want: torch.Tensor) -> float:
    noise = float((found.double() - want.double()).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(float(want.double().square().sum()) / noise)


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return philox_bell(shape, seed, FP32).to(dtype).cuda()


def pack(name: str) -> Segments:
    rows, ranks = PACKS[name]
    return Segments.of(rows=rows, ranks=ranks, scales=[2.0, 0.25, 0.75, 1.5, 1.0, 0.5, 3.0, 0.1][: len(rows)], device="cuda")


def drops(seg: Segments) -> Dropout:
    n = torch.arange(seg.slots, device="cuda")
    return Dropout(p_S=(n % 4).float() / 10, seed_S=n + 2**40, step_S=n, site=5)


def own(t_MR: torch.Tensor, seg: Segments) -> torch.Tensor:
    """s without the columns that are never read."""
    return torch.cat([t_MR[m, : seg.ranks[i]].flatten() for i, (m, _) in enumerate(seg.bounds())])


def follow(seg: Segments, d: int, dtype: torch.dtype, one: dict, two: dict, dropout: Dropout | None) -> None:
    """All six, and both passes, against the references in float64. one, two: keyword arguments of single products and of passes."""
    m, t = int(seg.offsets[-1]), seg.rank_rows
    x, w, y, g = numbers((m, d), 1, dtype), numbers((t, d), 2, dtype), numbers((m, d), 3, dtype), numbers((t, d), 4, FP32)
    s = numbers((m, seg.widest), 5, dtype)
    wide = {k: v.double() for k, v in dict(x=x, w=w, s=s).items()}
    small = forward.shrink_ref(wide["x"], wide["w"], seg, dropout=dropout), backward.grad_s_ref(wide["x"], wide["w"], seg)
    assert db(own(forward.shrink(x, w, seg, dropout=dropout, **one.get("narrow", one)), seg), own(small[0], seg)) > ROUNDED_DB
    assert db(own(backward.grad_s(x, w, seg, **one.get("narrow", one)), seg), own(small[1], seg)) > ROUNDED_DB

    y_ref, dx_ref, gb_ref, ga_ref = y.double(), y.double(), g.double(), g.double()
    forward.expand_ref(y_ref, wide["s"], wide["w"], seg)
    backward.grad_x_ref(dx_ref, wide["s"], wide["w"], seg, dropout=dropout)
    backward.grad_b_ref(wide["s"], wide["x"], seg, gb_ref)
    backward.grad_a_ref(wide["s"], wide["x"], seg, ga_ref, dropout=dropout)
    found = y.clone()
    forward.expand(found, s, w, seg, **one.get("wide", one))
    assert db(found, y_ref) > ADDED_DB
    found = y.clone()
    backward.grad_x(found, s, w, seg, dropout=dropout, **one.get("wide", one))
    assert db(found, dx_ref) > ADDED_DB
    for fused in (False, True):
        gb, ga, dx = g.clone(), g.clone(), y.clone()
        if fused:
            ds = backward.grad_sb(x, s, w, seg, gb, **two.get("dy", two))
            backward.grad_ax(dx, s, x, w, seg, ga, dropout=dropout, **two.get("x", two))
            assert db(own(ds, seg), own(small[1], seg)) > ROUNDED_DB and db(dx, dx_ref) > ADDED_DB
        else:
            backward.grad_b(s, x, seg, gb, **one.get("outer", one))
            backward.grad_a(s, x, seg, ga, dropout=dropout, **one.get("outer", one))
        assert db(gb, gb_ref) > SUMMED_DB and db(ga, ga_ref) > SUMMED_DB
        for i, (rows, ranks) in enumerate(seg.bounds()):  # one adapter that is wrong hides among larger ones
            if rows.stop > rows.start:
                assert db(gb[ranks], gb_ref[ranks]) > SUMMED_DB and db(ga[ranks], ga_ref[ranks]) > SUMMED_DB, i
            else:
                assert torch.equal(gb[ranks], g[ranks]) and torch.equal(ga[ranks], g[ranks])


@pytest.mark.parametrize("name, d", CASES)
def test_every_product_follows_float64_by_the_rules_and_in_deterministic_mode(name: str, d: int) -> None:
    seg = pack(name)
    for how, dropout in ((dict(deterministic=False), None), (dict(deterministic=True), drops(seg))):
        follow(seg, d, BF16, how, how, dropout)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_other_types_follow_float64(dtype: torch.dtype) -> None:
    follow(pack("ragged"), 576, dtype, {}, {}, drops(pack("ragged")))


@pytest.mark.parametrize("rank, rows, slots", [(16, 20, 5), (64, 100, 3), (128, 200, 2)])
def test_every_schedule_that_tuning_may_choose_follows_float64(rank: int, rows: int, slots: int) -> None:
    seg, d = Segments.of(rows=(rows, rows // 2, *[rows] * (slots - 2)), ranks=(rank,) * slots, scales=(0.5,) * slots, device="cuda"), 1088
    m, t = int(seg.offsets[-1]), seg.rank_rows
    x, w, s, g = numbers((m, d), 1), numbers((t, d), 2), numbers((m, rank), 3), numbers((t, d), 4, FP32)
    narrow, wide_y, outer = backward.grad_s_ref(x.double(), w.double(), seg), x.double(), g.double()
    forward.expand_ref(wide_y, s.double(), w.double(), seg)
    backward.grad_b_ref(s.double(), x.double(), seg, outer)
    for schedule in candidates("narrow", d=d, rank=rank, rows=rows, slots=slots)[::9]:
        assert db(own(backward.grad_s(x, w, seg, schedule=schedule), seg), own(narrow, seg)) > ROUNDED_DB, schedule
    for schedule in candidates("wide", d=d, rank=rank, rows=rows, slots=slots)[::4]:
        found = x.clone()
        forward.expand(found, s, w, seg, schedule=schedule)
        assert db(found, wide_y) > ADDED_DB, schedule
    for schedule in candidates("outer", d=d, rank=rank, rows=rows, slots=slots)[::4]:
        found = g.clone()
        backward.grad_b(s, x, seg, found, schedule=schedule)
        assert db(found, outer) > SUMMED_DB, schedule


def layer(rows, ranks, parts, deterministic: bool = True, dropout: Dropout | None = None) -> list[tuple[torch.Tensor, ...]]:
    """Per slot (y - base, dx - base, gradients of A and B) of one packed layer whose frozen weight is zero, so that the base product has no say."""
    seg = Segments.of(rows=rows, ranks=ranks, scales=[0.5] * len(rows), device="cuda")
    x, dy, a, b = (torch.cat(p) for p in zip(*parts, strict=True))
    fa, fb = (Factor(compute=v, grad=torch.zeros_like(v, dtype=FP32)) for v in (a, b))
    x.requires_grad_()
    zero = (lambda x, w, bias: x.new_zeros(len(x), w.shape[0]), lambda dy, w: dy.new_zeros(len(dy), w.shape[1]))
    y = lora_linear(x, torch.zeros(dy.shape[1], x.shape[1], dtype=BF16, device="cuda"), None, fa, fb, seg, dropout=dropout, base=zero, deterministic=deterministic)
    y.backward(dy)
    return [(y.detach()[m], x.grad[m], fa.grad[t], fb.grad[t]) for m, t in seg.bounds()]


def test_a_slot_s_bits_are_those_it_has_alone_in_any_order_and_beside_nan() -> None:
    rows, ranks, k, n = (300, 128, 1, 777), (64, 16, 128, 64), 576, 1536
    parts = [(numbers((r, k), i), numbers((r, n), i + 10), numbers((c, k), i + 20), numbers((c, n), i + 30)) for i, (r, c) in enumerate(zip(rows, ranks, strict=True))]
    noise = dict(p_S=torch.tensor([0.1, 0.0, 0.3, 0.5], device="cuda"), seed_S=torch.arange(4, device="cuda"), step_S=torch.arange(4, device="cuda") + 7)

    def run(order: list[int], ill: int | None = None) -> dict[int, tuple]:
        chosen = [tuple(v * math.nan for v in parts[i]) if i == ill else parts[i] for i in order]
        dropout = Dropout(**{name: v[order] for name, v in noise.items()}, site=3)
        return dict(zip(order, layer([rows[i] for i in order], [ranks[i] for i in order], chosen, dropout=dropout), strict=True))

    base = run([0, 1, 2, 3])
    for order, ill in (([0], None), ([1], None), ([2], None), ([3], None), ([3, 1, 0, 2], None), ([2, 0, 1, 3], 0), ([1, 3, 2, 0], 3)):
        for i, found in run(order, ill).items():
            for what, f, w in zip(("y", "dx", "A", "B"), found, base[i], strict=True):
                assert bool(f.isnan().any()) if i == ill else torch.equal(f, w), (order, i, what)


def test_without_deterministic_mode_nan_stays_in_its_slot_and_runs_repeat() -> None:
    rows, ranks = (40, 32, 64), (64, 64, 128)
    parts = [(numbers((r, 2048), i), numbers((r, 2048), i + 10), numbers((c, 2048), i + 20), numbers((c, 2048), i + 30)) for i, (r, c) in enumerate(zip(rows, ranks, strict=True))]
    base = layer(rows, ranks, parts, deterministic=False)
    ill = layer(rows, ranks, [tuple(v * math.nan for v in parts[0]), *parts[1:]], deterministic=False)
    for again in (ill, layer(rows, ranks, parts, deterministic=False)):
        assert all(torch.equal(f, w) for found, want in zip(again[1:], base[1:], strict=True) for f, w in zip(found, want, strict=True))


def test_a_captured_layer_follows_offsets_scales_and_dropout_that_change_on_the_device() -> None:
    seg = Segments.of(rows=(64, 64), ranks=(16, 64), scales=(1.0, 1.0), device="cuda", most_rows=128)
    x, w, g = numbers((128, 576), 1), numbers((80, 576), 2), torch.zeros(80, 576, device="cuda")
    dropout = Dropout(p_S=torch.zeros(2, device="cuda"), seed_S=torch.tensor([1, 2], device="cuda"), step_S=torch.tensor([0, 0], device="cuda"), site=1)
    y, s = x.clone(), torch.empty(128, 64, dtype=BF16, device="cuda")

    def call() -> None:
        s.copy_(forward.shrink(x, w, seg, dropout=dropout))
        forward.expand(y, s, w, seg)
        backward.grad_a(s, x, seg, g, dropout=dropout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for offsets, scales, p in (([0, 64, 128], [1.0, 2.0], [0.5, 0.0]), ([0, 128, 128], [0.5, 1.0], [0.1, 0.9]), ([0, 0, 100], [3.0, 0.5], [0.0, 0.25])):
        seg.offsets.copy_(torch.tensor(offsets)), seg.scales.copy_(torch.tensor(scales)), dropout.p_S.copy_(torch.tensor(p)), dropout.step_S.add_(1)
        y.copy_(x), g.zero_(), s.fill_(math.nan)
        graph.replay()
        s_ref = forward.shrink_ref(x.double(), w.double(), seg, dropout=dropout)
        y_ref, g_ref = x.double(), g.double() * 0
        assert db(own(s, seg), own(s_ref, seg)) > ROUNDED_DB
        known = torch.where(s_ref == 0, 0.0, s.double())  # columns that are never read hold anything
        forward.expand_ref(y_ref, known, w.double(), seg)
        backward.grad_a_ref(known, x.double(), seg, g_ref, dropout=dropout)
        assert db(y, y_ref) > ADDED_DB and db(g, g_ref) > SUMMED_DB


def test_rows_outside_of_every_segment_and_gradients_of_ranks_outside_of_every_tile_are_untouched() -> None:
    seg = Segments.of(rows=(33, 20), ranks=(8, 24), scales=(1.0, 1.0), device="cuda", most_rows=64)
    x, w = numbers((64, 576), 1), numbers((32, 576), 2)
    for how in (Schedule(64, 128, 32), DETERMINISTIC["wide"], Schedule(16, 64, 16)):
        y = x.clone()
        forward.expand(y, numbers((64, 24), 3), w, seg, schedule=how)
        assert torch.equal(y[53:], x[53:]) and not torch.equal(y[:53], x[:53])
