"""What the tests of the search share: a grid of made-up learning curves, a pack that replays them, and a search of it."""

import math
from pathlib import Path

from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.search.driver import Strategy, drive, search_of
from studies.plora.search.pruner import NO_PRUNING, Halving
from studies.plora.search.recorded import Curve, RecordedPack, StepTimes
from studies.plora.search.space import Levels, Space
from suite.search import SearchRun

BUDGET = 20_000
SPACE = Space(axes={"learning_rate": Levels(values=(2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4)), "rank": Levels(values=(8, 16, 32, 64)), "batch": Levels(values=(1, 2, 4, 8)),
                    "alpha_ratio": Levels(values=(1.0, 2.0))})  # fmt: skip
PRUNE = Halving(shares=(0.125, 0.25, 0.5), eta=2)


def adapter_of(params):
    return SPACE.adapter(params, budget_tokens=BUDGET, seed=0)


def final_score(adapter: AdapterConfig) -> float:
    """One best learning rate, small batches and large ranks better: a smooth hill."""
    rate = math.log2(adapter.learning_rate / 1.6e-4) + 0.3 * (adapter.alpha / adapter.rank - 1)
    return 0.9 - 0.03 * rate**2 - 0.01 * math.log2(adapter.batch) + 0.005 * math.log2(adapter.rank / 8)


def curve(adapter: AdapterConfig) -> Curve:
    """Rises as 1 - exp(-tokens / a quarter of the budget): configurations keep their order, so what halving gives up is the worse."""
    tokens = tuple(BUDGET * i // 16 for i in range(17))
    scores = tuple(final_score(adapter) * (1 - math.exp(-4 * t / BUDGET)) for t in tokens)
    return Curve(adapter=adapter, tokens=tokens, scores=scores, losses=tuple(2 - s for s in scores), tokens_a_sequence=21.5, test_score=final_score(adapter) - 0.01)


def grid():
    rates, ranks, batches, ratios = (range(len(SPACE.axes[n].values)) for n in ("learning_rate", "rank", "batch", "alpha_ratio"))
    adapters = [adapter_of({"learning_rate_level": i, "rank_level": j, "batch_level": k, "alpha_ratio_level": m}) for i in rates for j in ranks for k in batches for m in ratios]
    return {a: curve(a) for a in adapters}


TIMES = StepTimes(micro_step_s={(1, 1, 64): 0.004, (8, 1, 64): 0.008, (3, 1, 64): 0.006, (8, 1, 8): 0.008}, evaluate_s={1: 0.05, 8: 0.1})


def pack(slots=8, kind=RecordedPack, rank=64):
    return kind(grid(), PackShape(tokens=32, slots=(SlotShape(rank=rank),) * slots), TIMES)


def searched(home: Path, *, slots=8, trials=24, sampler="tpe", seed=3, prune=PRUNE, refill=True, kind=RecordedPack, micro_steps=32, checkpoint_s=60.0, **options):
    """A whole search; returns what it found."""
    search = search_of(SPACE, name="toy", sampler=sampler, sampler_seed=seed, trials=trials, slots=slots)
    with SearchRun(search, home) as run:
        return drive(run, pack(slots, kind), adapter_of, Strategy(prune=prune, refill=refill, micro_steps=micro_steps, checkpoint_s=checkpoint_s), home, **options)


__all__ = ["BUDGET", "NO_PRUNING", "PRUNE", "SPACE", "TIMES", "adapter_of", "curve", "final_score", "grid", "pack", "searched"]
