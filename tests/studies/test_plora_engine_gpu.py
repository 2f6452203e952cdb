"""Claims on a GPU: packed adapters equal separate ones bit for bit in deterministic mode, whoever is beside them; graphs follow refills and change no bit;
all ways to multiply train the same adapters.

Run on a GPU host: python -m pytest tests/studies/test_plora_engine_gpu.py. What is not equality of bits:

    EPS32    float32 GPU against the CPU's reference, relative to the largest element of a gradient: about twelve sums in a row of at most 160 terms in
             another order, 2^-24 sqrt(160) apiece, times 10 for what norms and softmax may amplify
    GRAD16   bf16 gradients against the float32 ones, by norm: a dozen roundings of 2^-9 in a row, each on another path to the loss, times 4
    PATHS    relative distance of losses after PATH_STEPS steps in bf16: paths round s and y at other places, 2^-9 apiece, over PATH_STEPS steps of a loss
             whose answers have about one bit of margin
"""

import numpy as np
import pytest
import torch

from studies.models.config import LlamaConfig
from studies.plora.adapter import SlotShape
from studies.plora.data import synthetic
from studies.plora.engine import SHAPES, Base
from tests.studies.plora_packs import MIX, SLOTS, Maker, adapter, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP32 = torch.bfloat16, torch.float32
EPS32 = 12 * 10 * 160**0.5 * 2**-24
GRAD16 = 4 * 12**0.5 * 2**-9 * 4
PATHS, PATH_STEPS = 0.05, 8
# head_dim 64 and 128 of the models, ranks and rows beside every tile
WIDE = LlamaConfig(layers=2, hidden=512, intermediate=1536, heads=4, kv_heads=2, vocabulary=1024, context_tokens=2048, rope_base=1e6, rms_eps=1e-6, qkv_bias=True, tied_head=True)
SMOL = LlamaConfig(layers=2, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=1024, context_tokens=2048, rope_base=1e5, rms_eps=1e-5)
TASKS = {}


def task_of(vocabulary: int, tokens: int = 24, classes: int = 8):
    key = vocabulary, tokens, classes
    if key not in TASKS:
        TASKS[key] = synthetic(vocabulary=vocabulary, classes=classes, seed=0, rows=(256, 32, 8), tokens=(6, tokens))
    return TASKS[key]


def maker_of(config=SHAPES["tiny"], dtype=BF16, *, tokens: int = 24, device: str = "cuda", classes: int = 8, **options) -> Maker:
    return Maker(Base.random(config, seed=0, device=device, dtype=dtype), task_of(config.vocabulary, tokens, classes), tuple(options.items()))


@pytest.fixture(scope="module")
def exact():
    """Deterministic bf16 packs of the small model."""
    return maker_of(deterministic=True)


def gradients(pack, slot: int) -> torch.Tensor:
    return pack.adapters.state.read(slot, "grad").cpu()


# ---- right numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_float32_gradients_and_losses_follow_the_reference_on_the_cpu(deterministic):
    """After two micro-steps: one adapter has stepped, so that gradients of A are not zero; its next batch is open."""
    adapters = {0: adapter(rank=5, batch=5), 1: adapter(batch=1, seed=2, warmup=0.0, dropout=0.25), 2: MIX[2]}
    gpu, cpu = (maker_of(dtype=FP32, device=device).pack(SLOTS[:3], adapters, 1, deterministic=deterministic) for device in ("cuda", "cpu"))
    assert gpu.live()[1].optimizer_steps == cpu.live()[1].optimizer_steps == 1
    for pack in (gpu, cpu):
        pack.adapters.state.write(1, "master", cpu.adapters.state.read(1, "master"))
        pack._courses[1].adapter = adapter(batch=9, seed=2, dropout=0.25)
        pack.advance(1)
    for slot in adapters:
        mine, want = gpu.adapters.state.slot_views(slot, "grad"), cpu.adapters.state.slot_views(slot, "grad")
        assert any(g.any() for g in want[::2]) == (slot == 1), "A's gradients are there once B is not zero"
        for a, b in zip(mine, want, strict=True):
            assert (a.cpu() - b).abs().max() <= EPS32 * b.abs().max()
    assert torch.allclose(gpu._open_loss_S.cpu(), cpu._open_loss_S, rtol=EPS32, atol=0)
    looks = [pack.evaluate()[0] for pack in (gpu, cpu)]
    assert all(abs(looks[0][s].loss - looks[1][s].loss) <= EPS32 * looks[1][s].loss for s in adapters)


@pytest.mark.parametrize("config", [WIDE, SMOL], ids=["head_dim 128", "head_dim 64"])
def test_bf16_gradients_follow_float32_ones(config):
    packs = [maker_of(config, dtype).pack(SLOTS[:1], {0: adapter(batch=7, rank=16)}) for dtype in (BF16, FP32)]
    for pack in packs:
        pack.load(0, {n: (w if "lora_A" in n else np.full_like(w, 0.01)) for n, w in pack.weights(0).items()})
        pack.advance(3)
    mine, want = (gradients(pack, 0) for pack in packs)
    assert want.norm() > 0 and (mine - want).norm() <= GRAD16 * want.norm()


def test_a_pack_learns_in_bf16():
    pack = maker_of().pack((SlotShape(rank=16, rows=4),) * 2, {0: adapter(batch=4, budget_tokens=8000), 1: adapter(batch=4, learning_rate=1e-6, budget_tokens=8000)})
    before, _ = pack.evaluate()
    while not all(p.done for p in pack.live().values()):
        assert pack.advance(100) > 0
    after, seconds = pack.evaluate()
    assert seconds > 0 and after[0].score > 0.85 and before[0].score < 0.4 and after[1].score < 0.4


# grouped_mm is a baseline that the ladder launches eagerly
@pytest.mark.parametrize("path, graphed", [(path, graphed) for path in ("looped", "padded", "grouped", "triton", "concatenated") for graphed in (False, True) if (path, graphed) != ("grouped", True)])
def test_every_path_trains_the_same_adapters(path, graphed):
    slots, adapters = (SlotShape(rank=16, rows=2), SlotShape(rank=8), SlotShape(rank=64)), {0: adapter(rank=5, batch=2), 1: adapter(batch=1, seed=2), 2: adapter(rank=64, batch=3, seed=3)}
    reference = maker_of(dtype=FP32, device="cpu").pack(slots, adapters, PATH_STEPS)
    pack = maker_of().pack(slots, adapters, PATH_STEPS, path=path, graphed=graphed)
    for slot in adapters:
        mine, want = pack.live()[slot], reference.live()[slot]
        assert (mine.tokens_seen, mine.optimizer_steps) == (want.tokens_seen, want.optimizer_steps) and abs(mine.loss / want.loss - 1) <= PATHS


@pytest.mark.parametrize("config", [WIDE, SMOL], ids=["head_dim 128", "head_dim 64"])
def test_long_sequences_take_torch_s_attention_and_agree_with_ours(config):
    """1024 positions; several answer tokens a row."""
    losses = []
    for deterministic in (False, True):
        pack = maker_of(config, tokens=1024, classes=0).pack((SlotShape(rank=16, rows=2), SlotShape(rank=8)), {0: adapter(batch=2), 1: adapter(batch=3)}, 3, tokens=1024, deterministic=deterministic)
        losses.append([p.loss for p in pack.live().values()] + [e.loss for e in pack.evaluate()[0].values()])
    assert np.allclose(*losses, rtol=PATHS, atol=0)


# ---- whose bits they are -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SHAPES["tiny"], WIDE, SMOL], ids=["tiny", "head_dim 128", "head_dim 64"])
def test_packed_adapters_equal_separate_ones(config):
    maker = maker_of(config, deterministic=True)
    pack = maker.pack(SLOTS, MIX, 12)
    for slot, config in MIX.items():
        assert same(pack, slot, maker.alone(SLOTS[slot], config, 12), 0), f"slot {slot}"


def test_permuted_slots_change_nothing(exact):
    order = (2, 0, 3, 1)
    pack, other = exact.pack(SLOTS, MIX, 10), exact.pack(tuple(SLOTS[i] for i in order), {new: MIX[old] for new, old in enumerate(order)}, 10)
    assert all(same(pack, old, other, new) for new, old in enumerate(order))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_neighbour_that_is_not_finite_changes_nothing(deterministic):
    """In the fast mode the pack is compared with itself beside a finite neighbour: the same shapes, so the same tiles."""
    maker = maker_of(deterministic=deterministic)
    pack, healthy = maker.pack(SLOTS, MIX), maker.pack(SLOTS, MIX)
    for name in ("master", "compute"):
        for view in pack.adapters.state.slot_views(1, name)[:4]:
            view[0, 0] = float("nan")
    pack.advance(10)
    healthy.advance(10)
    assert np.isnan(pack.live()[1].loss) and np.isnan(pack.evaluate()[0][1].loss)
    assert all(same(pack, slot, healthy, slot) for slot in (0, 2, 3))


def test_one_nan_ends_all_adapters_of_concatenated_ranks():
    """Why the path is no choice: 0 times NaN is NaN."""
    pack = maker_of(path="concatenated").pack(SLOTS, MIX)
    for name in ("master", "compute"):
        pack.adapters.state.slot_views(1, name)[0][0, 0] = float("nan")
    pack.advance(10)
    assert all(np.isnan(p.loss) for p in pack.live().values())


def test_a_pruned_and_refilled_neighbour_changes_nothing_and_needs_no_capture(exact):
    pack = exact.pack(SLOTS, MIX, 7)
    pack.evaluate()
    graphs = [r._graph for r in (pack._train_step, pack._optimizer_step, pack._judge._runner)]
    assert all(g is not None for g in graphs)
    pack.release(2)
    pack.admit(2, adapter(rank=64, seed=9, batch=1))
    pack.advance(8)
    assert [r._graph for r in (pack._train_step, pack._optimizer_step, pack._judge._runner)] == graphs
    for slot in (0, 1, 3):
        assert same(pack, slot, exact.alone(SLOTS[slot], MIX[slot], 15), 0)
    assert same(pack, 2, exact.alone(SLOTS[2], adapter(rank=64, seed=9, batch=1), 8), 0)


def test_a_neighbour_s_first_dropout_changes_nothing_of_those_without(exact):
    without = {slot: config for slot, config in MIX.items() if not config.dropout}
    pack = exact.pack(SLOTS, without, 5)
    pack.admit(1, MIX[1])
    pack.advance(5)
    assert all(same(pack, slot, exact.alone(SLOTS[slot], config, 10), 0) for slot, config in without.items())
    assert same(pack, 1, exact.alone(SLOTS[1], MIX[1], 5), 0)


def test_a_captured_graph_gives_the_bits_of_eager_launches(exact):
    pack, eager = exact.pack(SLOTS, MIX, 12), exact.pack(SLOTS, MIX, 12, graphed=False)
    assert pack._train_step.graphed and not eager._train_step.graphed
    assert all(same(pack, slot, eager, slot) for slot in MIX)


def test_warming_up_and_capturing_change_no_adapter(exact):
    pack = exact.pack(SLOTS, MIX)
    before = pack.state()
    pack._prepare()
    pack._judge.prepare()
    after = pack.state()
    for slot, held in before["slots"].items():
        assert all(np.array_equal(held[name], after["slots"][slot][name]) for name in ("master", "m", "v", "grad"))
        assert after["slots"][slot]["open_loss"] == 0.0


def test_a_restored_pack_goes_on_with_the_bits_of_one_that_was_never_broken(exact, tmp_path):
    from studies.plora.search.saved import load_state, save_state

    pack = exact.pack(SLOTS, MIX, 5)
    assert any(c.filled for c in pack._courses.values())
    save_state(tmp_path / "pack.npz", pack.state())
    other = exact.pack(SLOTS, {1: adapter(seed=77)}, 2)
    other.restore(load_state(tmp_path / "pack.npz"))
    pack.advance(9)
    other.advance(9)
    assert all(same(pack, slot, other, slot) for slot in MIX)


def test_two_runs_give_the_same_bits(exact):
    pack, again = exact.pack(SLOTS, MIX, 12), exact.pack(SLOTS, MIX, 12)
    assert all(same(pack, slot, again, slot) for slot in MIX)


def test_starts_and_random_bases_are_those_of_the_cpu():
    gpu, cpu = maker_of(), maker_of(device="cpu")
    assert torch.equal(gpu.base.embed_VK.cpu(), cpu.base.embed_VK) and torch.equal(gpu.base.layers[1].linears["v_proj"].bias_N.cpu(), cpu.base.layers[1].linears["v_proj"].bias_N)
    mine, theirs = (m.pack(SLOTS[:1], {0: MIX[0]}).weights(0) for m in (gpu, cpu))
    assert all(np.array_equal(mine[n], theirs[n]) for n in mine)


# ---- what is refused ---------------------------------------------------------------------------------------------------------------


def test_a_pack_beyond_the_card_is_refused_before_it_is_made():
    maker = maker_of()
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match="by the memory model"):
        maker.pack((SlotShape(rank=128, rows=2**22),), {})
    assert torch.cuda.memory_allocated() == before


def test_a_path_whose_bits_depend_on_neighbours_is_not_deterministic():
    with pytest.raises(ValueError, match="no neighbour changes"):
        maker_of().pack(SLOTS, MIX, path="padded", deterministic=True)
