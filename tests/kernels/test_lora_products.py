"""Claims: every product of packed LoRA is that adapter's own product and nothing else; backward is the derivative of forward; kernels fit sm_90.

References in float64 are compared with dense algebra and with torch's autograd: sums of at most 64 products of numbers below 8 in float64, each rounding 2^-53
relative, so 64 * 64 * 2^-53 < 1e-12 (`EXACT`). Isolation and order of slots are compared bit for bit.
"""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch

from kernels.exact.audit.specimen import captured, compile_specimen
from kernels.exact.philox import philox_bell, philox_ref
from kernels.fp8.bench import usage_of
from kernels.lora import autograd, backward, forward, schedules
from kernels.lora.autograd import Factor, lora_linear
from kernels.lora.dropout import Dropout, keep_ref
from kernels.lora.schedules import PASSES, PRODUCTS, Schedule, candidates, schedule
from kernels.lora.segments import Segments

EXACT = 1e-12
SINGLE = 64 * 64 * 8 * 2.0**-24  # float32 in another order: the same with 2^-24, and one product of products
F64 = torch.float64
K, N = 24, 20
ROWS, RANKS, SCALES = (5, 0, 9, 1), (8, 16, 3, 40), (2.0, 1.0, 0.5, 1.5)  # ragged, an empty slot, ranks that no tile divides


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return philox_bell(shape, seed, torch.float32).to(dtype)


def segments(rows=ROWS, ranks=RANKS, scales=SCALES, **kwargs) -> Segments:
    return Segments.of(rows=rows, ranks=ranks, scales=scales, device="cpu", **kwargs)


def drops(p=(0.5, 0.1, 0.0, 0.25), steps=(0, 1, 2, 3), site=7) -> Dropout:
    return Dropout(p_S=torch.tensor(p), seed_S=torch.tensor([1, 2, 2**40 + 5, -3][: len(p)]), step_S=torch.tensor(steps), site=site)


def dense(seg: Segments, w_TD: torch.Tensor) -> list[torch.Tensor]:
    return [w_TD[t] for _, t in seg.bounds()]


@pytest.mark.parametrize("dropout", [None, drops()], ids=["plain", "dropout"])
def test_a_layer_and_its_gradients_are_those_of_torch_s_autograd_one_adapter_at_a_time(dropout) -> None:
    seg, m, t = segments(), sum(ROWS), sum(RANKS)
    x, w, bias, dy = (numbers(s, i).requires_grad_(i == 0) for i, s in enumerate([(m, K), (N, K), (N,), (m, N)]))
    a, b = (Factor(compute=v, grad=torch.ones_like(v)) for v in (numbers((t, K), 4), numbers((t, N), 5)))
    y = lora_linear(x, w, bias, a, b, seg, dropout=dropout)
    y.backward(dy)

    x2, a2, b2 = x.detach().clone().requires_grad_(), a.compute.clone().requires_grad_(), b.compute.clone().requires_grad_()
    outs = []
    for i, (rows, ranks) in enumerate(seg.bounds()):
        mask = keep_ref(dropout, i, ROWS[i], K).double() / float(1 - dropout.p_S[i]) if dropout else torch.ones(())
        outs.append(x2[rows] @ w.mT + bias + SCALES[i] * ((x2[rows] * mask) @ a2[ranks].mT) @ b2[ranks])
    torch.cat(outs).backward(dy)
    for found, want in ((y, torch.cat(outs)), (x.grad, x2.grad), (a.grad, 1 + a2.grad), (b.grad, 1 + b2.grad)):
        torch.testing.assert_close(found, want, rtol=0, atol=EXACT)
    assert a2.grad[seg.bounds()[0][1]].abs().max() > 0.1


def test_a_second_backward_adds_and_a_layer_whose_x_needs_no_gradient_still_trains() -> None:
    seg, m, t = segments(), sum(ROWS), sum(RANKS)
    x, w, dy = (numbers(s, i) for i, s in enumerate([(m, K), (N, K), (m, N)]))
    a, b = (Factor(compute=v, grad=torch.zeros_like(v)) for v in (numbers((t, K), 4), numbers((t, N), 5)))
    lora_linear(x, w, None, a, b, seg).backward(dy)
    once = a.grad.clone(), b.grad.clone()
    lora_linear(x, w, None, a, b, seg).backward(dy)
    assert torch.equal(a.grad, 2 * once[0]) and torch.equal(b.grad, 2 * once[1]) and once[0].abs().max() > 0.1
    with torch.no_grad():
        assert not lora_linear(x, w, None, a, b, seg).requires_grad


@pytest.mark.parametrize("path", ["looped", "padded", autograd._REFERENCE], ids=["looped", "padded", "an object"])
def test_a_layer_takes_any_path_and_gives_the_reference_s_numbers(path) -> None:
    seg, m, t = segments(), sum(ROWS), sum(RANKS)

    def run(path) -> list[torch.Tensor]:
        x = numbers((m, K), 0, torch.float32).requires_grad_()
        a, b = (Factor(compute=v, grad=torch.zeros_like(v)) for v in (numbers((t, K), 4, torch.float32), numbers((t, N), 5, torch.float32)))
        y = lora_linear(x, numbers((N, K), 1, torch.float32), None, a, b, seg, path=path)
        y.backward(numbers((m, N), 2, torch.float32))
        return [y.detach(), x.grad, a.grad, b.grad]

    for found, want in zip(run(path), run("reference"), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=SINGLE)


def test_only_x_and_s_are_kept_for_backward() -> None:
    seg, m, t = segments(), sum(ROWS), sum(RANKS)
    a, b = (Factor(compute=v, grad=torch.zeros_like(v)) for v in (numbers((t, K), 4), numbers((t, N), 5)))
    y = lora_linear(numbers((m, K), 0).requires_grad_(), numbers((N, K), 1), None, a, b, seg)
    assert [tuple(v.shape) for v in y.grad_fn.saved_tensors] == [(m, K), (m, max(RANKS))]


def everything(rows, ranks, scales, x, dy, a, b, dropout) -> list[torch.Tensor]:
    """Per slot, in float32: y, dx, gradients of A and B, from packed references. The base is zero: what a library does with all rows at once is not theirs."""
    seg = segments(rows, ranks, scales)
    fa, fb = (Factor(compute=torch.cat(v), grad=torch.zeros(sum(ranks), v[0].shape[1])) for v in (a, b))
    x = torch.cat(x).requires_grad_()
    y = lora_linear(x, torch.zeros(N, K), None, fa, fb, seg, dropout=dropout)
    y.backward(torch.cat(dy))
    return [(y[m].detach(), x.grad[m], fa.grad[t], fb.grad[t]) for m, t in seg.bounds()]


def test_slots_in_another_order_alone_or_beside_nan_give_the_same_bits() -> None:
    parts = [tuple(numbers((n, d), 10 * i + j, torch.float32) for j, (n, d) in enumerate(((ROWS[i], K), (ROWS[i], N), (RANKS[i], K), (RANKS[i], N)))) for i in range(4)]
    noise = drops(steps=(4, 1, 2, 3))

    def run(order: list[int], ill: int | None = None) -> dict[int, tuple]:
        x, dy, a, b = ([parts[i][j] * (float("nan") if i == ill else 1.0) for i in order] for j in range(4))
        dropout = dataclasses.replace(noise, p_S=noise.p_S[order], seed_S=noise.seed_S[order], step_S=noise.step_S[order])
        made = everything(*(tuple(v[i] for i in order) for v in (ROWS, RANKS, SCALES)), x, dy, a, b, dropout)
        return dict(zip(order, made, strict=True))

    base = run([0, 1, 2, 3])
    for order, ill in (([3, 1, 0, 2], None), ([2], None), ([1, 2, 0], 0), ([3, 2, 1, 0], 3)):
        for i, found in run(order, ill).items():
            if i == ill:
                assert found[0].isnan().any()
            else:
                assert all(torch.equal(f, w) for f, w in zip(found, base[i], strict=True)), (order, i)


# ---- dropout -------------------------------------------------------------------------------------------------------------------------


def test_masks_are_philox_words_against_p_and_depend_on_seed_step_site_and_place_alone() -> None:
    d = drops()
    keep = keep_ref(d, 0, 3, 10)
    words = [[philox_ref(np.array([c // 4, r, 0, 7], dtype=np.uint32), (1, 0))[c % 4] for c in range(10)] for r in range(3)]
    assert torch.equal(keep, torch.tensor(np.array(words) >= 2**31))
    long = keep_ref(d, 0, 400, 100)
    assert torch.equal(long[:3, :10], keep) and abs(long.float().mean() - 0.5) < 4 * 0.5 / 200  # four standard errors of 40,000 draws
    others = [keep_ref(o, 0, 400, 100) for o in (drops(steps=(9, 1, 2, 3)), drops(site=8), dataclasses.replace(d, seed_S=d.seed_S + 1))]
    assert all(abs((o == long).float().mean() - 0.5) < 4 * 0.5 / 200 for o in others)
    assert keep_ref(d, 2, 50, 50).all()


# ---- schedules -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank, rows, slots", list(itertools.product((8, 64, 128), (1, 32, 1024), (1, 32))))
def test_every_choice_fits_an_sm_and_a_deterministic_one_never_changes(rank: int, rows: int, slots: int) -> None:
    for product, d in itertools.product(PRODUCTS, (576, 11008)):
        found = candidates(product, d=d, rank=rank, rows=rows, slots=slots)
        assert schedules.rule(product, d=d, rank=rank, rows=rows, slots=slots) == found[0] and len(set(found)) == len(found)
        fixed = schedule(product, d=d, rank=rank, rows=rows, slots=slots, deterministic=True)
        assert fixed == schedules.DETERMINISTIC[product] and fixed.split == 1
        assert all(d // s.split >= 512 for s in found if s.split > 1)
    assert {schedules.DETERMINISTIC[p].warps for p in PRODUCTS} == {4}  # both products of a pass


def test_the_measured_table_is_read_by_rounded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "TUNED", {("narrow", 2048, 64, 128, 32): (16, 32, 16, 2, 2, 4), ("dy", 2048, 64, 128, 32): ()})
    schedule.cache_clear(), schedules.pass_schedule.cache_clear()
    assert schedule("narrow", d=2048, rank=48, rows=100, slots=30) == Schedule(16, 32, 16, 2, 2, 4)
    assert schedules.pass_schedule("dy", d=2048, rank=64, rows=128, slots=32) is None
    assert schedule("narrow", d=2048, rank=48, rows=129, slots=30) == schedules.rule("narrow", d=2048, rank=48, rows=129, slots=30)
    schedule.cache_clear(), schedules.pass_schedule.cache_clear()


# ---- what the compiler makes of the kernels ----------------------------------------------------------------------------------------------


def launches(rows: int, slots: int, d: int, ranks: tuple[int, ...], dropout: bool, deterministic: bool, dtype: torch.dtype = torch.bfloat16) -> list:
    seg = segments((rows,) * slots, ranks * slots, (1.0,) * slots) if len(ranks) == 1 else segments((rows,) * slots, ranks, (1.0,) * slots)
    m, t, r = rows * slots, seg.rank_rows, seg.widest
    x, w, s, g = (torch.empty(v, dtype=k) for v, k in (((m, d), dtype), ((t, d), dtype), ((m, r), dtype), ((t, d), torch.float32)))
    drop = Dropout(p_S=torch.zeros(slots), seed_S=torch.zeros(slots, dtype=torch.int64), step_S=torch.zeros(slots, dtype=torch.int64), site=1) if dropout else None
    how = dict(deterministic=deterministic)
    calls = [lambda: forward.shrink(x, w, seg, dropout=drop, **how), lambda: forward.expand(x, s, w, seg, **how), lambda: backward.grad_sb(x, s, w, seg, g, **how),
             lambda: backward.grad_ax(x, s, x, w, seg, g, dropout=drop, **how)]  # fmt: skip
    return [specimen for call in calls for specimen in captured("lora", call, family="elementwise")]


@pytest.mark.parametrize(
    "rows, slots, d, ranks, dropout, deterministic",
    [(32, 32, 3584, (64,), False, False), (1024, 32, 2048, (64,), False, False), (128, 2, 576, (16, 128), False, False), (128, 32, 2048, (64,), True, True)],
    ids=["short", "long", "mixed ranks up to 128, 64 not dividing", "dropout, deterministic"],
)
def test_kernels_of_the_default_schedules_spill_nothing_and_move_16_bytes_at_once(rows, slots, d, ranks, dropout, deterministic) -> None:
    for specimen in launches(rows, slots, d, ranks, dropout, deterministic):
        compiled = compile_specimen(specimen, "sm_90")
        used = usage_of(compiled)
        assert used["stack"] == used["spills"] == 0 and used["shared"] <= 227 * 1024, (specimen.name, used)
        assert used["wide"] or "cp.async.cg.shared.global" in compiled.asm["ptx"], (specimen.name, used)
        assert not re.search(r"^\s*(atom|red)\.", compiled.asm["ptx"], re.MULTILINE), specimen.name


# as above, and columns that no tile divides; the tiles of tensor cores spill kilobytes a thread here
@pytest.mark.parametrize("rows, slots, d, ranks, dropout, deterministic", [(128, 2, 576, (16, 128), False, False), (1024, 32, 2048, (128,), True, False), (128, 2, 1000, (64,), True, True)])
def test_kernels_of_float32_spill_nothing_and_round_to_no_narrower_type(rows, slots, d, ranks, dropout, deterministic) -> None:
    for specimen in launches(rows, slots, d, ranks, dropout, deterministic, torch.float32):
        compiled = compile_specimen(specimen, "sm_90")
        used = usage_of(compiled)
        assert used["stack"] == used["spills"] == 0 and used["shared"] <= 227 * 1024, (specimen.name, used)
        assert not re.search("tf32|wgmma", compiled.asm["ptx"]), specimen.name


def test_overlapped_launches_wait_before_they_read_and_let_the_next_start_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "PDL", True)
    for specimen in launches(32, 32, 2048, (64,), False, False):
        assert specimen.kwargs["launch_pdl"] is True
        ptx = compile_specimen(specimen, "sm_90").asm["ptx"]
        wait, trigger = (ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
        reads = re.search(r"(ld\.global|cp\.async\.cg)", ptx)
        assert wait < trigger < reads.start(), specimen.name


# ---- what is refused -------------------------------------------------------------------------------------------------------------------


def test_bad_inputs_are_refused() -> None:
    seg, m, t = segments(), sum(ROWS), sum(RANKS)
    a, b = (Factor(compute=v, grad=torch.zeros_like(v)) for v in (numbers((t, K), 4), numbers((t, N), 5)))
    x, w = numbers((m, K), 0), numbers((N, K), 1)
    with pytest.raises(ValueError, match=r"runs on a GPU; got cpu; call shrink_ref"):
        forward.shrink(x, a.compute, seg)
    with pytest.raises(ValueError, match=r"a layer has x \[M, K\]"):
        lora_linear(x, w.mT, None, a, b, seg)
    with pytest.raises(ValueError, match="adapters are A"):
        lora_linear(x, w, None, b, a, seg)
    with pytest.raises(ValueError, match="'cuda-magic'"):
        lora_linear(x, w, None, a, b, seg, path="cuda-magic")
    with pytest.raises(ValueError, match="have a deterministic mode"):
        lora_linear(x, w, None, a, b, seg, path="looped", deterministic=True)
    with pytest.raises(ValueError, match="a factor has a gradient of its shape"):
        Factor(compute=a.compute.float(), grad=a.grad)
    with pytest.raises(ValueError, match="one entry a slot"):
        lora_linear(x, w, None, a, b, seg, dropout=drops(p=(0.1, 0.2), steps=(0, 0)))
    with pytest.raises(ValueError, match="a site is from 0"):
        drops(site=-1)
    with pytest.raises(ValueError, match="blocks are powers of two from 16"):
        Schedule(8, 64, 64)
    with pytest.raises(ValueError, match="a product is one of"):
        schedule("tall", d=64, rank=8, rows=1, slots=1)
    for wrong in (dict(rows=x[:, :5], ranks=a.compute), dict(rows=x, ranks=a.compute, small=x), dict(rows=x, ranks=a.compute), dict(rows=numbers((K, m), 0, torch.float32).mT, ranks=a.compute.float())):
        with pytest.raises(ValueError, match="check takes"):
            forward.check("check", seg, **wrong)
    pair = Schedule(16, 64, 16, 4), Schedule(16, 64, 16, 8)
    with pytest.raises(ValueError, match="as many warps"):
        backward._same_warps(pair)
    assert set(PASSES) == {"dy", "x"}
