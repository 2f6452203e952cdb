"""Claims: a pack learns; what an adapter becomes is its own, bit for bit, whoever is beside it; a killed pack goes on as if it had not been.

Everything here is equality of bits except learning, whose bars are far from chance: 8 classes are guessed right one time in eight.
"""

import numpy as np
import pytest
import torch

from kernels.lora.segments import Segments
from studies.plora.adapter import PackShape, SlotShape
from studies.plora.data import synthetic
from studies.plora.engine import SHAPES, Base, EnginePack
from tests.studies.plora_packs import MIX, SLOTS, Maker, adapter, same

CHANCE, LEARNT = 1 / 8, 0.9


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sizes here are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base():
    return Base.random(SHAPES["tiny"], seed=0)


@pytest.fixture(scope="module")
def task():
    return synthetic(vocabulary=512, classes=8, seed=0, rows=(256, 32, 8))


@pytest.fixture(scope="module")
def maker(base, task):
    return Maker(base, task)


def test_adapters_of_a_pack_learn_each_from_its_own_rate(maker):
    pack = maker.pack((SlotShape(rank=16, rows=4),) * 2, {0: adapter(batch=4, budget_tokens=6000), 1: adapter(batch=4, learning_rate=1e-6, budget_tokens=6000)})
    before, _ = pack.evaluate()
    while not all(p.done for p in pack.live().values()):
        assert pack.advance(100) > 0
    after, seconds = pack.evaluate()
    assert seconds > 0
    assert before[0].score < 2 * CHANCE and after[0].score > LEARNT and after[0].loss < 0.25 * before[0].loss
    assert after[1].score < 2 * CHANCE  # nothing leaks from the neighbour that learnt
    assert pack.advance(5) == 0.0, "adapters at their budgets idle"


def test_packed_adapters_equal_separate_ones(maker):
    pack = maker.pack(SLOTS, MIX, 9)
    for slot, config in MIX.items():
        assert same(pack, slot, maker.alone(SLOTS[slot], config, 9), 0), f"slot {slot}"


def test_permuted_slots_change_nothing(maker):
    order = (2, 0, 3, 1)
    pack, other = maker.pack(SLOTS, MIX, 8), maker.pack(tuple(SLOTS[i] for i in order), {new: MIX[old] for new, old in enumerate(order)}, 8)
    for new, old in enumerate(order):
        assert same(pack, old, other, new)


def test_a_neighbour_that_is_not_finite_changes_nothing(maker):
    pack = maker.pack(SLOTS, MIX)
    for name in ("master", "compute"):
        for view in pack.adapters.state.slot_views(1, name)[:4]:
            view[0, 0] = float("nan")
    pack.advance(8)
    assert np.isnan(pack.live()[1].loss) and np.isnan(pack.evaluate()[0][1].loss)
    for slot in (0, 2, 3):
        assert same(pack, slot, maker.alone(SLOTS[slot], MIX[slot], 8), 0)


def test_a_diverged_adapter_has_no_score(maker):
    """The argmax over logits that are NaN is some class, and right as often as that class stands there."""
    pack = maker.pack(SLOTS, MIX)
    pack.adapters.state.slot_views(1, "compute")[0][0, 0] = float("nan")
    looks, _ = pack.evaluate()
    assert np.isnan(looks[1].loss) and np.isnan(looks[1].score)
    assert all(0 <= looks[slot].score <= 1 for slot in (0, 2, 3))


def test_a_neighbour_that_is_pruned_and_refilled_changes_nothing_and_starts_fresh(maker):
    pack = maker.pack(SLOTS, MIX, 5)
    pack.release(2)
    pack.admit(2, adapter(rank=64, seed=9, batch=1))
    pack.advance(5)
    for slot in (0, 1, 3):
        assert same(pack, slot, maker.alone(SLOTS[slot], MIX[slot], 10), 0)
    assert same(pack, 2, maker.alone(SLOTS[2], adapter(rank=64, seed=9, batch=1), 5), 0)
    weights = pack.release(1)
    assert all(np.isfinite(x).all() for x in weights.values())
    for name in ("master", "compute", "grad", "m", "v"):
        assert not pack.adapters.state.read(1, name).any() if name != "compute" else not any(v.any() for v in pack.adapters.state.slot_views(1, name))


def test_dropout_changes_training_and_not_evaluation(maker, base):
    """The first losses differ, and what is judged is the whole adapter: before training its loss is the base's."""
    plain, dropped = (maker.alone(SlotShape(rank=16, rows=4), adapter(dropout=p, warmup=0.0), 3) for p in (0.0, 0.5))
    assert not same(plain, 0, dropped, 0) and np.isfinite(dropped.live()[0].loss)
    untrained = [maker.alone(SlotShape(rank=16), adapter(dropout=p), 0).evaluate()[0][0] for p in (0.0, 0.5)]
    assert untrained[0] == untrained[1]


def test_every_site_and_micro_step_drops_other_elements(maker, monkeypatch):
    from studies.plora.engine import products

    keys = []

    class Spy(products.Dropout):
        def __post_init__(self):
            keys.append((int(self.step_S[0]), self.site))

    monkeypatch.setattr(products, "Dropout", Spy)
    pack = maker.alone(SlotShape(rank=16, rows=2), adapter(dropout=0.5, batch=4), 3)
    sites = len(pack.adapters.sites)
    assert set(keys) == {(step, site) for step in range(3) for site in range(1, sites + 1)} and len(keys) == 2 * 3 * sites, "forward and backward, once each"


def test_how_advance_is_cut_changes_nothing(maker):
    pack, other = maker.pack(SLOTS, MIX, 9), maker.pack(SLOTS, MIX)
    for n in (1, 5, 3):
        other.advance(n)
        assert n == 3 or other.evaluate()
    assert all(same(pack, slot, other, slot) for slot in MIX)


@pytest.mark.parametrize("cut", [3, 5])  # batches of 2, 3, 4 and 8 are open at some of these
def test_a_restored_pack_goes_on_with_the_bits_of_one_that_was_never_broken(maker, tmp_path, cut):
    from studies.plora.search.saved import load_state, save_state

    pack = maker.pack(SLOTS, MIX, cut)
    assert any(c.filled for c in pack._courses.values()), "no batch is open: the cut shows nothing"
    save_state(tmp_path / "pack.npz", pack.state())
    other = maker.pack(SLOTS, {1: adapter(seed=77)}, 2)  # it has another past
    other.restore(load_state(tmp_path / "pack.npz"))
    for _ in range(6):
        pack.advance(1)
        other.advance(1)
        assert [repr(p) for p in pack.live().values()] == [repr(p) for p in other.live().values()]  # losses of batches that were open, NaN before the first
    assert all(same(pack, slot, other, slot) for slot in MIX)


def test_accumulation_gives_the_gradient_of_the_batch(maker):
    """fp32 sums in another order: 2^-24 a rounding, a few hundred terms whose sum may cancel to a tenth."""
    gradients = []
    for rows in (1, 2, 3, 6):
        pack = maker.alone(SlotShape(rank=16, rows=rows), adapter(batch=7), 6 // rows)  # not full yet: 6 of 7 sequences
        assert pack._courses[0].filled == 6 and pack.live()[0].optimizer_steps == 0
        gradients.append(pack.adapters.state.read(0, "grad"))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() <= 300 * 10 * 2**-24 * gradients[0].norm() and gradients[0].norm() > 0


def test_an_adapter_sees_every_row_once_an_epoch_in_an_order_of_its_own(task):
    from studies.plora.engine.courses import Course

    n = len(task.train)
    first, second = Course(adapter=adapter(seed=1), rows=n), Course(adapter=adapter(seed=2), rows=n)
    epochs = [first.next_rows(n), first.next_rows(n), second.next_rows(n)]
    assert all(sorted(e) == list(range(n)) for e in epochs)
    assert not any(np.array_equal(a, b) for a, b in ((epochs[0], epochs[1]), (epochs[0], epochs[2])))
    again = Course(adapter=adapter(seed=1), rows=n)
    assert np.array_equal(np.concatenate([again.next_rows(c) for c in (5, n, n - 5)]), np.concatenate(epochs[:2]))


def test_tokens_count_without_padding_when_their_batch_is_full_and_training_ends_with_it(maker, task):
    config = adapter(batch=5, budget_tokens=100)
    pack = maker.alone(SlotShape(rank=16, rows=2), config, 2)
    assert (pack.live()[0].tokens_seen, pack.live()[0].optimizer_steps) == (0, 0) and np.isnan(pack.live()[0].loss)
    pack.advance(50)
    found, passed = pack.live()[0], pack._courses[0].passed
    from studies.plora.engine.courses import Course

    seen = task.train.lengths[Course(adapter=config, rows=len(task.train)).next_rows(passed)]
    assert found.done and passed == 5 * found.optimizer_steps and found.tokens_seen == seen.sum()
    assert seen[:-5].sum() < 100 <= seen.sum()


def test_answers_of_several_tokens_are_judged_by_their_mean_loss(base):
    task = synthetic(vocabulary=512, classes=0, seed=0)
    pack = Maker(base, task).alone(SlotShape(rank=16, rows=4), adapter(batch=4), 60)
    look = pack.evaluate()[0][0]
    assert look.score == -look.loss and look.loss < np.log(512)


def test_a_base_computes_what_the_exact_reference_does(monkeypatch):
    """studies.models.llama.forward on the same bf16 matrices, with float32 activations but for q, k and v, which it rounds to bf16: 2^-9 of a head's
    inputs, averaged over keys and layers, so a few times 2^-9 of the logits."""
    from studies.models.llama import forward
    from studies.models.synthetic import philox_weights
    from studies.plora.engine import base as module
    from studies.plora.engine.decoder import hidden
    from studies.plora.engine.operators import Frame
    from studies.plora.engine.reference import SlotBySlot
    from studies.plora.engine.sites import Adapters

    weights = philox_weights(SHAPES["tiny"], seed=3)
    monkeypatch.setattr(module, "load_smollm2", lambda: weights)
    for layers in (None, 1):
        base = Base.smollm2(layers=layers)
        assert (base.name, len(base.layers)) == ("HuggingFaceTB/SmolLM2-135M-Instruct", layers or 2)
    with pytest.raises(ValueError, match="1 to 2 layers"):
        Base.smollm2(layers=3)
    base, ids = Base.smollm2(), [3, 500, 7, 7, 44, 0, 91]
    adapters = Adapters.empty(base.config, ranks=(8,), device="cpu", compute_dtype=torch.float32)
    seg = Segments.of(rows=[7], ranks=[8], scales=[1.0], device="cpu")
    with torch.no_grad():
        ops, frame = SlotBySlot(), Frame.of(base.config, seg, 7)
        h = hidden(base, adapters.factors, ops, torch.tensor([ids]), torch.tensor([7], dtype=torch.int32), frame)
        logits = ops.add_norm(h, None, base.norm_K, base.config.rms_eps, frame.bounds)[1] @ base.head_VK.T
    exact = forward(weights, [ids], activation_dtype=torch.float32)
    assert (logits - exact).norm() <= 4 * 2**-9 * exact.norm() and (exact[1] - exact[2]).norm() > 0.1 * exact[1].norm()


def test_what_does_not_fit_is_refused_with_the_reason(maker, base, task):
    pack = maker.pack(SLOTS, MIX)
    for what, reason in (
        (lambda: pack.admit(0, adapter()), "empty slot"),
        (lambda: pack.admit(4, adapter()), "empty slot"),
        (lambda: maker.pack((SlotShape(rank=16),), {0: adapter(rank=17)}), "slot holds ranks"),
        (lambda: EnginePack(base, PackShape(tokens=23, slots=SLOTS), task), "longest row"),
        (lambda: EnginePack(base, PackShape(tokens=4096, slots=SLOTS), task), "context"),
        (lambda: EnginePack(base, PackShape(tokens=24, slots=SLOTS), synthetic(vocabulary=600)), "vocabulary of 512"),
        (lambda: EnginePack(base, PackShape(tokens=24, slots=SLOTS), task, path="quick"), "a path is one of"),
        (lambda: EnginePack(base, PackShape(tokens=24, slots=SLOTS), task, memory=10**6), r"fits 1000000 bytes, got one that takes \d+"),
        (lambda: EnginePack(base, PackShape(tokens=25, slots=SLOTS), task).restore(pack.state()), "tokens: 24 is not 25"),
        (lambda: pack.release(0) and pack.release(0), "an adapter is in the slot"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            what()


def test_numbers_drawn_on_a_device_are_those_of_the_reference_generator():
    """So a base and an adapter's start are the same on every machine."""
    from kernels.exact.philox import philox_bell, philox_uniform
    from studies.plora.engine.draws import bell, uniform

    seed, streams = 2**63 + 12345, (3, 2**31 + 5)
    drawn = uniform(streams=streams, count=1001, seed=seed, device="cpu")
    assert all(torch.equal(row, philox_uniform((1001,), seed, stream=s)) for row, s in zip(drawn, streams, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(bell(count=777, seed=9, stream=4, device="cpu", scale_log2=-3, dtype=dtype), philox_bell((777,), 9, stream=4, scale_log2=-3, dtype=dtype))


@pytest.mark.parametrize("streams, count", [((3, 2**31 + 5), 1001), (tuple(range(9)), 100)], ids=["long rows", "many rows"])
def test_numbers_are_drawn_in_pieces_so_that_a_start_is_no_peak_of_memory(streams, count, monkeypatch):
    from studies.plora.engine import draws

    whole, made, words = draws.uniform(streams=streams, count=count, seed=7, device="cpu"), [], draws._words
    monkeypatch.setattr(draws, "_AT_ONCE", 400)
    monkeypatch.setattr(draws, "_words", lambda some, n, *rest: made.append(len(some) * n) or words(some, n, *rest))
    assert torch.equal(draws.uniform(streams=streams, count=count, seed=7, device="cpu"), whole)
    assert max(made) <= 400 and sum(made) == len(streams) * count


def test_a_graph_is_captured_on_the_gpu_of_its_runner(monkeypatch):
    """One process may drive several; CUDA is a record of what was asked for here."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from studies.plora.engine import graph

    current, captured = ["cuda:0"], []

    class On(nullcontext):
        def __enter__(self):
            self.before, current[0] = current[0], self.enter_result

        def __exit__(self, *_):
            current[0] = self.before

    stream = lambda: SimpleNamespace(device=current[0], wait_stream=lambda other: None)  # noqa: E731
    asked = lambda made, stream=None: captured.append(stream and stream.device) or nullcontext()  # noqa: E731
    fake = SimpleNamespace(device=lambda d: On(str(d)), Stream=stream, current_stream=stream, stream=lambda s: On(s.device), CUDAGraph=lambda: SimpleNamespace(replay=lambda: None), graph=asked)
    monkeypatch.setattr(graph, "torch", SimpleNamespace(cuda=fake))
    for device in ("cuda:0", "cuda:1"):
        runner = graph.Runner(lambda: None, device=torch.device(device), graphed=True)
        runner.prepare()
        assert runner.ready
    assert captured == ["cuda:0", "cuda:1"] and current == ["cuda:0"]
