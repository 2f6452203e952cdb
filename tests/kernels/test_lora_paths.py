"""Claims: every path computes the packed product and its five gradients, and all but the concatenated one keep slots apart.

    U          2^-24, one rounding of float32 relative to what is rounded
    gamma(n)   (n + 4) U: a sum of n products of float32, in any order, with the scale and the last addition, is within gamma(n) of the exact one,
               relative to the sum of magnitudes (Higham 2002, 3.1). So |y - exact| <= (gamma(K) + gamma(R)) times y from magnitudes, gradients likewise
"""

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.exact.philox import philox_bell
from kernels.lora.dropout import Dropout
from kernels.lora.dropped import dropped_rows_ref
from kernels.lora.paths import PATHS, Path, path_named
from kernels.lora.segments import Segments

U = 2.0**-24
K, N = 24, 40  # multiples of 8, for grouped_mm
APART = ("looped", "padded", "grouped")  # on the CPU; triton's tests are in the interpreter and on a GPU
# ragged with an empty slot and mixed ranks; even rows; one slot; an empty slot first and last
PACKS = [((5, 0, 9), (8, 16, 8)), ((4, 4, 4), (16, 16, 16)), ((7,), (8,)), ((0, 3, 1, 0), (8, 8, 24, 16))]


def gamma(n: int) -> float:
    return (n + 4) * U


def pack(rows: tuple[int, ...], ranks: tuple[int, ...], scales: tuple[float, ...] = (2.0, 0.3, 0.5, 1.7)) -> tuple[Segments, dict[str, torch.Tensor]]:
    seg = Segments.of(rows=rows, ranks=ranks, scales=scales[: len(rows)], device="cpu")
    shapes = dict(x=(sum(rows), K), dy=(sum(rows), N), a=(sum(ranks), K), b=(sum(ranks), N), y=(sum(rows), N), dx=(sum(rows), K))
    return seg, {name: philox_bell(shape, i) for i, (name, shape) in enumerate(shapes.items())}


def run(path: Path, seg: Segments, t: dict[str, torch.Tensor], dropout: Dropout | None = None) -> dict[str, torch.Tensor]:
    """y, dx and gradients that begin with ones."""
    y, dx, grad_a, grad_b = t["y"].clone(), t["dx"].clone(), torch.ones_like(t["a"]), torch.ones_like(t["b"])
    s = path.shrink(t["x"], t["a"], seg, dropout=dropout)
    path.expand(y, s, t["b"], seg)
    ds = path.grad_s(t["dy"], t["b"], seg)
    path.grad_b(s, t["dy"], seg, grad_b)
    path.grad_a(ds, t["x"], seg, grad_a, dropout=dropout)
    path.grad_x(dx, ds, t["a"], seg, dropout=dropout)
    return dict(y=y, dx=dx, a=grad_a, b=grad_b)


def exact(seg: Segments, t: dict[str, torch.Tensor], x: torch.Tensor | None = None, keep: torch.Tensor | float = 1.0) -> dict[str, torch.Tensor]:
    """float64, by the definition. x: after dropout; keep: what dropout multiplies dx with."""
    t = {name: value.double() for name, value in t.items()}
    x = t["x"] if x is None else x.double()
    y, dx, a, b = t["y"].clone(), t["dx"].clone(), torch.ones_like(t["a"]), torch.ones_like(t["b"])
    kept = torch.ones_like(x) * keep
    for i, (m, r) in enumerate(seg.bounds()):
        scale = seg.scales[i].double()
        y[m] += scale * (x[m] @ t["a"][r].T) @ t["b"][r]
        ds = scale * t["dy"][m] @ t["b"][r].T
        b[r] += scale * (x[m] @ t["a"][r].T).T @ t["dy"][m]
        a[r] += ds.T @ x[m]
        dx[m] += (ds @ t["a"][r]) * kept[m]
    return dict(y=y, dx=dx, a=a, b=b)


def assert_near(got: dict[str, torch.Tensor], seg: Segments, t: dict[str, torch.Tensor], **drop: torch.Tensor) -> None:
    want = exact(seg, t, **drop)
    sizes = exact(seg, {name: value.abs() for name, value in t.items()}, **{name: value.abs() for name, value in drop.items()})
    most = max(m.stop - m.start for m, _ in seg.bounds())
    terms = dict(y=(K, seg.widest), dx=(N, seg.widest), a=(N, most), b=(K, most))
    for name, tensor in got.items():
        assert tensor.dtype == torch.float32
        assert ((tensor - want[name]).abs() <= sum(gamma(n) for n in terms[name]) * sizes[name]).all(), name


@pytest.mark.parametrize("rows, ranks", PACKS)
@pytest.mark.parametrize("name", [*APART, "concatenated"])
def test_every_path_computes_the_product_and_its_gradients(name: str, rows: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    seg, t = pack(rows, ranks)
    assert_near(run(PATHS[name], seg, t), seg, t)


@pytest.mark.parametrize("name", [*APART, "concatenated"])
def test_every_path_drops_the_same_elements_forward_and_backward(name: str) -> None:
    seg, t = pack((5, 0, 9), (8, 16, 8))
    dropout = Dropout(p_S=torch.tensor([0.5, 0.1, 0.25]), seed_S=torch.tensor([3, 4, 5]), step_S=torch.tensor([0, 1, 7]), site=2)
    x = dropped_rows_ref(t["x"], seg, dropout)
    keep = dropped_rows_ref(torch.ones_like(t["x"]), seg, dropout)
    assert 0.3 < (keep == 0).float().mean() < 0.45  # 5 rows lose half, 9 a quarter: 0.34 on average
    assert_near(run(PATHS[name], seg, t, dropout), seg, t, x=x, keep=keep)


def test_a_looped_slot_has_the_bits_that_it_has_alone() -> None:
    seg, t = pack((33, 0, 7, 20), (8, 16, 8, 3))
    together = run(PATHS["looped"], seg, t)
    for i, (m, r) in enumerate(seg.bounds()):
        alone = Segments.of(rows=[m.stop - m.start], ranks=[seg.ranks[i]], scales=[float(seg.scales[i])], device="cpu")
        single = run(PATHS["looped"], alone, {name: value[r if name in "ab" else m].clone() for name, value in t.items()})
        for name, value in together.items():
            assert torch.equal(value[r if name in "ab" else m], single[name]), (i, name)


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliased = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        self.count += not (aliased and not any(a.is_write for a in aliased)) and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def test_another_slot_costs_the_loop_no_more_launches_than_its_products() -> None:
    """One a product; gradients of A and B are products that are then added. A loop that launches more is no fair baseline."""
    counts = {}
    for k in (2, 5):
        seg, t = pack((4,) * k, (8,) * k, scales=(0.5,) * k)
        path = PATHS["looped"]
        s, ds = path.shrink(t["x"], t["a"], seg), path.grad_s(t["dy"], t["b"], seg)  # the host's table is made
        path.expand(t["y"], s, t["b"], seg)
        calls = dict(shrink=lambda: path.shrink(t["x"], t["a"], seg), expand=lambda: path.expand(t["y"], s, t["b"], seg), grad_s=lambda: path.grad_s(t["dy"], t["b"], seg),
                     grad_a=lambda: path.grad_a(ds, t["x"], seg, torch.zeros_like(t["a"])), grad_b=lambda: path.grad_b(s, t["dy"], seg, torch.zeros_like(t["b"])),
                     grad_x=lambda: path.grad_x(t["dx"], ds, t["a"], seg))  # fmt: skip
        for name, call in calls.items():
            with Launches() as launches:
                call()
            counts.setdefault(name, []).append(launches.count)
    assert {name: (more - few) / 3 for name, (few, more) in counts.items()} == dict(shrink=1, expand=1, grad_s=1, grad_a=2, grad_b=2, grad_x=1)


def with_poison(t: dict[str, torch.Tensor], seg: Segments, slot: int, where: str) -> dict[str, torch.Tensor]:
    m, r = seg.bounds()[slot]
    t = {name: value.clone() for name, value in t.items()}
    t[where][r if where in "ab" else m] = math.nan
    return t


@pytest.mark.parametrize("where", ["a", "b", "x", "dy"])
@pytest.mark.parametrize("rows, ranks", [((5, 0, 9), (8, 16, 8)), ((4, 4, 4), (16, 16, 16))])
@pytest.mark.parametrize("name", APART)
def test_a_neighbour_s_nan_changes_no_bit(name: str, rows: tuple[int, ...], ranks: tuple[int, ...], where: str) -> None:
    seg, t = pack(rows, ranks)
    clean, poisoned = run(PATHS[name], seg, t), run(PATHS[name], seg, with_poison(t, seg, 0, where))
    assert any(value.isnan().any() for value in poisoned.values())
    for m, r in seg.bounds()[1:]:
        assert all(torch.equal(clean[n][r if n in "ab" else m], poisoned[n][r if n in "ab" else m]) for n in clean)


@pytest.mark.parametrize("where, ends", [("a", "y"), ("b", "dx"), ("x", "b"), ("dy", "a")])
def test_one_nan_ends_every_adapter_of_a_concatenated_pack(where: str, ends: str) -> None:
    seg, t = pack((4, 4, 4), (16, 16, 16))
    poisoned = run(PATHS["concatenated"], seg, with_poison(t, seg, 0, where))[ends]
    assert all(poisoned[r if ends in "ab" else m].isnan().all() for m, r in seg.bounds()[1:])


@pytest.mark.parametrize("name", ["looped", "padded", "concatenated"])
def test_rows_that_move_between_slots_are_noticed_and_scales_are_read_every_time(name: str) -> None:
    seg, t = pack((4, 4, 4), (16, 16, 16))
    seg = dataclasses.replace(seg, most_rows=8)
    run(PATHS[name], seg, t)
    seg.offsets.copy_(torch.tensor([0, 1, 9, 12], dtype=torch.int32))
    seg.scales.copy_(torch.tensor([0.25, 3.0, 1.5]))
    assert_near(run(PATHS[name], seg, t), seg, t)


def test_what_a_path_cannot_do_is_refused() -> None:
    assert set(PATHS) == {"looped", "padded", "grouped", "triton", "concatenated"} and all(path.name == name for name, path in PATHS.items())
    with pytest.raises(ValueError, match="a path is one of"):
        path_named("stacked")
    assert path_named("padded") is PATHS["padded"]
    seg, t = pack((5, 4), (8, 12))
    with pytest.raises(ValueError, match="multiples of 8"):
        PATHS["grouped"].shrink(t["x"], t["a"], seg)
    with pytest.raises(ValueError, match="runs on a GPU"):
        PATHS["triton"].shrink(t["x"], t["a"], seg)
    with pytest.raises(ValueError, match="on the segments' device"):
        dropped_rows_ref(t["x"][0], seg, Dropout(p_S=torch.zeros(2), seed_S=torch.zeros(2, dtype=torch.int64), step_S=torch.zeros(2, dtype=torch.int64), site=0))
