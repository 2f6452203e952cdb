"""The ways to search that the study compares: who is trained when, under one sampler, one space and one budget of trials.

    arm = ARMS["packed+prune+refill"]
    arm.strategy(Halving(), micro_steps=32)

| arm | slots | losers | a free slot |
|---|---|---|---|
| sequential | one | run to their end | the next trial |
| sequential+prune | one | end at a rung | the next trial |
| packed | many | run to their end | waits for the whole pack |
| packed+prune | many | end at a rung | waits for the whole pack |
| packed+prune+refill | many | end at a rung | the next trial, at once |
"""

from __future__ import annotations

from dataclasses import dataclass

from studies.plora.search.driver import Strategy
from studies.plora.search.pruner import NO_PRUNING, Halving

__all__ = ["ARMS", "Arm"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    packed: bool
    prune: bool
    refill: bool

    def strategy(self, rule: Halving, *, micro_steps: int, checkpoint_s: float = 60.0) -> Strategy:
        return Strategy(prune=rule if self.prune else NO_PRUNING, refill=self.refill, micro_steps=micro_steps, checkpoint_s=checkpoint_s)


ARMS = {
    "sequential": Arm(packed=False, prune=False, refill=True),
    "sequential+prune": Arm(packed=False, prune=True, refill=True),
    "packed": Arm(packed=True, prune=False, refill=False),
    "packed+prune": Arm(packed=True, prune=True, refill=False),
    "packed+prune+refill": Arm(packed=True, prune=True, refill=True),
}
