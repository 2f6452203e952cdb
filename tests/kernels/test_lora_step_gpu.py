"""Claims on a GPU: a row, a sequence and a slot have the bits that they have alone; numbers follow float64; graphs replay them.

Run on a GPU host: python -m pytest tests/kernels/test_lora_step_gpu.py.

    U          2^-24;  gamma(n) = (n + 4) U, a float32 sum of n products relative to the sum of magnitudes (Higham 2002, 3.1)
    ROUNDED    dB of one rounding to bf16, in the worst case (every mantissa just above 1): 10 log10(3 2^16) = 52.9; float32 sums are far below
    PATH_DB    at most four roundings (s, scale s, the product, the result; scales here are powers of two or 1.5 of one): 52.9 - 6.0 = 46.9
    O_DB       p is rounded, and o: 52.9 - 3.0 = 49.9
    GRADIENT_DB   p, ds and the result are rounded, and so was o, whose error enters ds as a whole: delta = do o is off by 2^-9 |do| |o| / sqrt(3), and dp - delta
               can be as small as |do| |v - o|, which these operands keep at |do| |o| or more. Five roundings, two of them through a product: 52.9 - 10 log10(7) = 44.4
"""

import itertools
import math

import pytest
import torch

from kernels.exact.philox import philox_bell
from kernels.lora import optimizer as step_module
from kernels.lora.attention import attention_backward, attention_forward, causal_attention, causal_attention_ref
from kernels.lora.dropout import Dropout
from kernels.lora.dropped import dropped, dropped_rows_ref
from kernels.lora.fixed_gemm import fixed_dgrad, fixed_dgrad_ref, fixed_linear, fixed_linear_ref
from kernels.lora.optimizer import AdamState, SlotStep, adamw_step
from kernels.lora.paths import PATHS, Path
from kernels.lora.segments import Segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

U = 2.0**-24
ROUNDED, PATH_DB, O_DB, GRADIENT_DB = 52.0, 46.0, 49.0, 44.0
NAN = math.nan
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def db(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to noise of `got` against float64."""
    want = want.double()
    noise = float((got.double() - want).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(float(want.square().sum()) / noise)


def captured(call, *outputs: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of `call`, warm before; outputs are poisoned, so that what is read later was written by a replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for x in outputs:
        x.fill_(NAN)
    return graph


# ---- paths -----------------------------------------------------------------------------------------------------------------------

# ragged, with an empty slot, all buckets and an exact rank; fixed slots of one rank; fixed slots of mixed rank
PACKS = {"ragged": ((300, 0, 129, 64), (16, 64, 128, 8)), "even": ((128, 128, 128), (64, 64, 64)), "mixed": ((128, 128), (16, 128))}
K, N = 576, 1536


def pack(name: str) -> tuple[Segments, dict[str, torch.Tensor]]:
    rows, ranks = PACKS[name]
    seg = Segments.of(rows=rows, ranks=ranks, scales=[2.0, 0.25, 0.75, 1.5][: len(rows)], device="cuda")
    m, t = sum(rows), sum(ranks)
    shapes = dict(x=((m, K), 0), dy=((m, N), 0), a=((t, K), -5), b=((t, N), -3), y=((m, N), 0), dx=((m, K), 0))
    return seg, {n: philox_bell(shape, i, BF16, scale_log2=e).cuda() for i, (n, (shape, e)) in enumerate(shapes.items())}


def run(path: Path, seg: Segments, t: dict[str, torch.Tensor], dropout: Dropout | None = None, out: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """y and dx begin with what t has, gradients with ones."""
    fresh = dict(y=t["y"].clone(), dx=t["dx"].clone(), a=torch.ones_like(t["a"], dtype=FP32), b=torch.ones_like(t["b"], dtype=FP32))
    if out is not None:
        for name, value in fresh.items():
            out[name].copy_(value)
    out = out or fresh
    s = path.shrink(t["x"], t["a"], seg, dropout=dropout)
    path.expand(out["y"], s, t["b"], seg)
    ds = path.grad_s(t["dy"], t["b"], seg)
    path.grad_b(s, t["dy"], seg, out["b"])
    path.grad_a(ds, t["x"], seg, out["a"], dropout=dropout)
    path.grad_x(out["dx"], ds, t["a"], seg, dropout=dropout)
    return out


def assert_follows(got: dict[str, torch.Tensor], seg: Segments, t: dict[str, torch.Tensor], x: torch.Tensor | None = None, keep: torch.Tensor | None = None) -> None:
    """Slot by slot, what was added, against float64; a slot without rows keeps what it had."""
    t = {name: value.double() for name, value in t.items()}
    x = t["x"] if x is None else x.double()
    for i, (m, r) in enumerate(seg.bounds()):
        if m.start == m.stop:
            assert (got["a"][r] == 1).all() and (got["b"][r] == 1).all()
            continue
        scale = seg.scales[i].double()
        s, ds = x[m] @ t["a"][r].T, scale * t["dy"][m] @ t["b"][r].T
        flow = ds @ t["a"][r] * (1.0 if keep is None else keep[m].double())
        assert db(got["y"][m], t["y"][m] + scale * s @ t["b"][r]) >= PATH_DB
        assert db(got["dx"][m], t["dx"][m] + flow) >= PATH_DB
        assert db(got["b"][r] - 1, scale * s.T @ t["dy"][m]) >= PATH_DB - 3  # ones were added and taken off again in float32
        assert db(got["a"][r] - 1, ds.T @ x[m]) >= PATH_DB - 3


@pytest.mark.parametrize("which", PACKS)
@pytest.mark.parametrize("name", PATHS)
def test_every_path_follows_float64(name: str, which: str) -> None:
    seg, t = pack(which)
    assert_follows(run(PATHS[name], seg, t), seg, t)


@pytest.mark.parametrize("name", PATHS)
def test_every_path_drops_what_the_reference_drops(name: str) -> None:
    seg, t = pack("ragged")
    ints = [torch.tensor(v, dtype=torch.int64, device="cuda") for v in ((3, 2**40 + 4, 5, 6), (0, 1, 7, 9))]
    dropout = Dropout(p_S=torch.tensor([0.5, 0.1, 0.25, 0.0], device="cuda"), seed_S=ints[0], step_S=ints[1], site=2)
    want = dropped_rows_ref(t["x"], seg, dropout)
    assert db(dropped(t["x"], seg, dropout), want) >= ROUNDED and torch.equal(dropped(t["x"], seg, dropout) == 0, want == 0)
    keep = dropped_rows_ref(torch.ones_like(t["x"], dtype=FP32), seg, dropout)
    x = torch.where(keep == 0, 0.0, t["x"].double()) * keep.double()
    assert_follows(run(PATHS[name], seg, t, dropout), seg, t, x=x, keep=keep)


@pytest.mark.parametrize("which, where", itertools.product(("ragged", "even"), ("a", "b", "x", "dy")))
@pytest.mark.parametrize("name", ["looped", "padded", "grouped", "triton"])
def test_a_neighbour_s_nan_changes_no_bit(name: str, which: str, where: str) -> None:
    seg, t = pack(which)
    clean = run(PATHS[name], seg, t)
    (m, r), *others = seg.bounds()
    t[where][r if where in "ab" else m] = NAN
    poisoned = run(PATHS[name], seg, t)
    assert any(value.isnan().any() for value in poisoned.values())
    for rows, ranks in others:
        assert all(torch.equal(clean[n][ranks if n in "ab" else rows], poisoned[n][ranks if n in "ab" else rows]) for n in clean)


def test_one_nan_ends_every_adapter_of_a_concatenated_pack() -> None:
    seg, t = pack("even")
    t["a"][seg.bounds()[0][1]] = NAN
    y = run(PATHS["concatenated"], seg, t)["y"]
    assert all(y[rows].isnan().all() for rows, _ in seg.bounds()[1:])


@pytest.mark.parametrize("which", ["ragged", "even"])
@pytest.mark.parametrize("name", PATHS)
def test_a_captured_path_replays_on_new_numbers_and_scales(name: str, which: str) -> None:
    seg, t = pack(which)
    out = run(PATHS[name], seg, t)
    graph = captured(lambda: run(PATHS[name], seg, t, out=out), *out.values())
    for value in t.values():
        value.copy_(value.roll(1, dims=1))
    seg.scales.mul_(2.0)
    graph.replay()
    assert_follows(out, seg, t)


@pytest.mark.parametrize("name", ["grouped", "triton"])
def test_paths_that_read_offsets_on_the_device_follow_them_inside_a_graph(name: str) -> None:
    rows, ranks = PACKS["ragged"]
    seg, t = pack("ragged")
    out = run(PATHS[name], seg, t)
    graph = captured(lambda: run(PATHS[name], seg, t, out=out), *out.values())
    seg.offsets.copy_(torch.tensor([0, 0, 100, 293, sum(rows)], dtype=torch.int32))
    graph.replay()
    assert_follows(out, seg, t)


# ---- optimizer -------------------------------------------------------------------------------------------------------------------

WIDTHS, RANKS = (576, 192, 1536, 1000), (16, 64, 8)


def filled(ranks: tuple[int, ...] = RANKS, device: str = "cuda", first: int = 0, dtype: torch.dtype = BF16) -> AdamState:
    state = AdamState.zeros(widths=WIDTHS, ranks=ranks, device=device, compute_dtype=dtype)
    for slot, rank in enumerate(ranks):
        for i, name in enumerate(("master", "grad", "m", "v")):
            x = philox_bell((rank * sum(WIDTHS),), 10 * (first + slot) + i)
            state.write(slot, name, x.abs() if name == "v" else x)
    return state


def everything(state: AdamState, slot: int) -> list[torch.Tensor]:
    return [x.cpu() for x in (*(state.read(slot, name) for name in ("master", "grad", "m", "v", "compute")), state.norms[slot])]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_update_has_the_reference_s_bits_and_the_norm_its_value(dtype: torch.dtype) -> None:
    got, want = filled(dtype=dtype), filled(device="cpu", dtype=dtype)
    steps = {0: SlotStep(learning_rate=1e-2, step=3, clip=0.5, divisor=3.0), 2: SlotStep(learning_rate=2e-3, step=1, weight_decay=0.1)}
    for state in (got, want):
        state.prepare(steps)
    adamw_step(got)
    for slot, step in steps.items():
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in want.slot_views(slot, "grad"))) / step.divisor
        assert abs(float(got.norms[slot]) - norm) <= (RANKS[slot] + 1024 + len(WIDTHS) + 4) * U * norm
        factor = min(1.0, step.clip / (float(got.norms[slot]) + 1e-6)) / step.divisor
        assert abs(float(got.factors[slot]) - factor) <= 4 * U * factor and (slot == 2) == (factor == 1.0)
        want.factors[slot], want.norms[slot] = got.factors[slot].cpu(), got.norms[slot].cpu()
        step_module.update_ref(want, slot)
    assert all(torch.equal(a, b) for slot in range(3) for a, b in zip(everything(got, slot), everything(want, slot), strict=True))


def test_a_slot_s_step_has_the_same_bits_alone_beside_a_nan_and_in_a_wider_slot() -> None:
    pack_, alone, wide = filled(), filled(ranks=(64,), first=1), filled(ranks=(2, 128), first=1)
    pack_.write(0, "grad", torch.full((RANKS[0] * sum(WIDTHS),), NAN))
    for name in ("master", "grad", "m", "v"):
        rows = [torch.cat([x, x.new_zeros(64, x.shape[1])]) for x in alone.slot_views(0, name)]
        wide.write(1, name, torch.cat([x.reshape(-1) for x in rows]))
    for state, slot in ((pack_, 1), (alone, 0), (wide, 1)):
        state.prepare({s: SlotStep(learning_rate=1e-2, step=2, clip=0.5) for s in {0, slot}})
        adamw_step(state)
    assert all(torch.equal(a, b) for a, b in zip(everything(pack_, 1), everything(alone, 0), strict=True))
    assert pack_.norms[0].isnan() and pack_.read(0, "master").isnan().all() and torch.equal(wide.norms[1], alone.norms[0])
    for name in ("master", "m", "v", "compute", "grad"):
        assert all(torch.equal(x[:64], y) and not x[64:].any() for x, y in zip(wide.slot_views(1, name), alone.slot_views(0, name), strict=True))


def test_a_captured_step_follows_what_is_prepared_outside_of_it() -> None:
    state, want = filled(), filled()
    step = {0: SlotStep(learning_rate=1e-2, step=1, clip=0.5), 1: SlotStep(learning_rate=1e-3, step=1)}
    for s in (state, want):
        s.prepare({})
    untouched = [everything(state, s) for s in range(3)]
    graph = captured(lambda: adamw_step(state))  # nobody is due: neither warming nor capturing changes a bit
    assert all(torch.equal(a, b) for s in range(3) for a, b in zip(everything(state, s), untouched[s], strict=True))
    for number in (1, 2, 3):
        due = {slot: SlotStep(learning_rate=settings.learning_rate, step=number, clip=settings.clip) for slot, settings in step.items() if number != 2 or slot == 0}
        for s, move in ((state, graph.replay), (want, lambda: adamw_step(want))):
            for slot in range(3):
                s.write(slot, "grad", philox_bell((RANKS[slot] * sum(WIDTHS),), 100 * number + slot))
            s.prepare(due)
            move()
    assert all(torch.equal(a, b) for s in range(3) for a, b in zip(everything(state, s), everything(want, s), strict=True))
    assert not torch.equal(state.read(0, "master").cpu(), untouched[0][0]) and torch.equal(state.read(2, "master").cpu(), untouched[2][0])


# ---- base products ---------------------------------------------------------------------------------------------------------------

# whole tiles; ragged in every axis, rows that 16 bytes do not divide; one row; narrow and wide outputs; a long sum
PRODUCTS = [(512, 576, 1536), (777, 333, 1000), (1, 512, 256), (300, 2048, 256), (130, 4096, 3584)]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("m, k, n", PRODUCTS)
def test_products_follow_float64(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, w, bias, dy = (philox_bell(shape, i, dtype).cuda() for i, shape in enumerate(((m, k), (n, k), (n,), (m, n))))
    wide = [v.double() for v in (x, w, bias, dy)]
    pairs = [(fixed_linear(x, w, bias), fixed_linear_ref(*wide[:3]), fixed_linear_ref(*(v.abs() for v in wide[:3])), k)]
    pairs.append((fixed_linear(x, w), fixed_linear_ref(*wide[:2]), fixed_linear_ref(*(v.abs() for v in wide[:2])), k))
    pairs.append((fixed_dgrad(dy, w), fixed_dgrad_ref(wide[3], wide[1]), fixed_dgrad_ref(wide[3].abs(), wide[1].abs()), n))
    for got, want, size, terms in pairs:
        assert got.dtype == dtype
        if dtype == FP32:
            assert ((got - want).abs() <= (terms + 4) * U * size).all()
        else:
            assert db(got, want) >= ROUNDED


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("m, k, n", [(1000, 576, 1536), (777, 333, 1000), (1000, 2048, 256)])
def test_a_row_has_the_same_bits_in_any_batch_at_any_place(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, w, bias, dy = (philox_bell(shape, i, dtype).cuda() for i, shape in enumerate(((m, k), (n, k), (n,), (m, n))))
    y, dx = fixed_linear(x, w, bias), fixed_dgrad(dy, w)
    for rows in (slice(5, 6), slice(100, 117), slice(3, 131), slice(400, 733)):
        assert torch.equal(fixed_linear(x[rows], w, bias), y[rows]) and torch.equal(fixed_dgrad(dy[rows], w), dx[rows])
    order = torch.argsort(philox_bell((m,), 9)).cuda()
    assert torch.equal(fixed_linear(x[order], w, bias), y[order]) and torch.equal(fixed_dgrad(dy[order], w), dx[order])
    x[7] = NAN
    got = fixed_linear(x, w, bias)
    assert got[7].isnan().all() and torch.equal(torch.cat([got[:7], got[8:]]), torch.cat([y[:7], y[8:]]))


def test_products_take_views_and_a_graph_replays_them() -> None:
    wide, w = philox_bell((200, 1024), 1, BF16).cuda(), philox_bell((384, 512), 2, BF16).cuda()
    x = wide[:, 512:]
    y, columns = fixed_linear(x, w), x.T.contiguous().T  # side by side along M
    assert columns.stride() == (1, 200) and torch.equal(y, fixed_linear(x.contiguous(), w)) and torch.equal(y, fixed_linear(columns, w))
    out = torch.empty_like(y)
    graph = captured(lambda: out.copy_(fixed_linear(x, w)), out)
    wide.mul_(2.0)
    graph.replay()
    assert torch.equal(out, y * 2) and fixed_linear(x[:0], w).shape == (0, 384)


# ---- attention --------------------------------------------------------------------------------------------------------------------


def operands(batch: int, tokens: int, heads: int, groups: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v as views of one tensor, as a fused projection leaves them; do."""
    qkv = (philox_bell((batch, tokens, heads + 2 * groups, dim), 1) * 2).to(dtype).cuda()
    return [*qkv.split([heads, groups, groups], dim=2), philox_bell((batch, tokens, heads, dim), 2, dtype).cuda()]


def all_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, lengths: torch.Tensor | None = None) -> list[torch.Tensor]:
    o, lse = attention_forward(q, k, v, lengths)
    return [o, *attention_backward(do, o, lse, q, k, v, lengths)]


# SmolLM2's heads and Qwen2.5's; ragged and short sequences; every head_dim; the longest
@pytest.mark.parametrize(
    "tokens, heads, groups, dim, lengths",
    [(128, 9, 3, 64, (128, 77)), (333, 16, 2, 128, (200, 333)), (64, 4, 4, 16, (1, 64)), (100, 6, 2, 32, (0, 65)), (2048, 4, 2, 64, (2048, 1025)), (512, 4, 1, 128, None)],
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_attention_and_its_gradients_follow_float64(tokens: int, heads: int, groups: int, dim: int, lengths: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    q, k, v, do = operands(2, tokens, heads, groups, dim, dtype)
    n = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    o = causal_attention_ref(*wide, n)
    want = [o.detach(), *torch.autograd.grad(o, wide, do.double())]
    for i, (a, b) in enumerate(zip(all_of(q, k, v, do, n), want, strict=True)):
        assert a.dtype == dtype and a.isfinite().all()
        # float32: sums of at most T + D terms with relative error gamma(T + D), through three products: -20 log10(3 (T + D) U) > 68 dB at 2112 terms
        assert db(a, b) >= (68.0 if dtype == FP32 else O_DB if i == 0 else GRADIENT_DB), i
        if lengths is not None:
            assert all(not a[row, length:].any() for row, length in enumerate(lengths))
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    causal_attention(*leaves, n).backward(do)
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(leaves, all_of(q, k, v, do, n)[1:], strict=True))


@pytest.mark.parametrize("dim, dtype", [(64, BF16), (128, BF16), (64, FP32)])
def test_a_sequence_has_the_same_bits_alone_elsewhere_beside_a_nan_and_under_more_padding(dim: int, dtype: torch.dtype) -> None:
    q, k, v, do = operands(4, 300, 6, 2, dim, dtype)
    lengths = torch.tensor([300, 211, 64, 129], dtype=torch.int32, device="cuda")
    together = all_of(q, k, v, do, lengths)
    assert all(torch.equal(a, b) for a, b in zip(together, all_of(q, k, v, do, lengths), strict=True)), "equal calls"
    for b, n in enumerate(lengths.tolist()):
        alone = all_of(*(x[b : b + 1, :n].contiguous() for x in (q, k, v, do)))
        assert all(torch.equal(a[b, :n], c[0]) for a, c in zip(together, alone, strict=True)), b
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    moved = all_of(*(x[order] for x in (q, k, v, do)), lengths[order])
    assert all(torch.equal(a[order], b) for a, b in zip(together, moved, strict=True))
    padded = all_of(*(torch.cat([x, torch.full_like(x[:, :100], NAN)], dim=1) for x in (q, k, v, do)), lengths)
    assert all(torch.equal(a, b[:, :300]) and not b[:, 300:].any() for a, b in zip(together, padded, strict=True))
    for x in (q, k, v, do):
        x[0] = NAN
    dirty = all_of(q, k, v, do, lengths)
    assert all(torch.equal(a[1:], b[1:]) and b[0].isnan().any() for a, b in zip(together, dirty, strict=True))


def test_a_captured_attention_follows_lengths_that_change_on_the_device() -> None:
    q, k, v, do = operands(2, 200, 4, 2, 64, BF16)
    lengths = torch.tensor([200, 200], dtype=torch.int32, device="cuda")
    out = [torch.empty_like(x) for x in all_of(q, k, v, do, lengths)]

    def call() -> None:
        for target, value in zip(out, all_of(q, k, v, do, lengths), strict=True):
            target.copy_(value)

    graph = captured(call, *out)
    lengths.copy_(torch.tensor([57, 130], dtype=torch.int32))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(out, all_of(q, k, v, do, lengths), strict=True)) and not out[0][0, 57:].any()
