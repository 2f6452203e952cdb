"""Dispatch: which recipe each product runs in now, from a plan and from readings as they come, without flapping.

    dispatch = Dispatch(plan=read_plan("plan.json"), rules=Rules(threshold_db=25.6))
    dispatch = dispatch.after(step=5000, readings=readings, alarms=("over.0:linear",))
    if dispatch.changes:
        fast = apply(fast, dispatch.running, *example)

Pure logic: it measures nothing and holds no tensors; the same calls give the same plans. A plan says what may run: for each site and pass one FP8 recipe that
somebody's budget allows. A reading says what is known of it: an interval of its row SQNR, and the lower end of the 95% interval of its speed-up over
bf16. A product starts in bf16, and

    goes to FP8    when a reading shows SQNR low >= threshold and speed-up low > 1, `dwell` steps or more after its last change or alarm
    goes to bf16   when a reading shows SQNR low < threshold - margin, or SQNR high < threshold, or speed-up low <= 1, or NaN; at once
    goes to bf16   in all passes of a site whose drift alarm rang, at once; earlier readings no longer count

and else it stays. What rises is safe in the safety map's sense; what is undecided by less than the margin changes nothing; and between two rises of a
product lie at least `dwell` steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kernels.fp8.recipes import PASSES, gemm
from studies.loka.site import BASE, Plan

__all__ = ["Change", "Dispatch", "Reading", "Rules"]

Key = tuple[str, str]  # site, pass


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is known of one product in one recipe."""

    site: str
    which: str  # a pass of PASSES
    recipe: str
    sqnr_low_db: float  # the interval of the quantile that the threshold is about
    sqnr_high_db: float
    speedup_low: float  # of the 95% interval of bf16's time over its own, quantising included

    def __post_init__(self) -> None:
        gemm(self.recipe)
        if self.which not in PASSES:
            raise ValueError(f"a pass is one of {PASSES}, got {self.which=} at {self.site}")
        if self.sqnr_low_db > self.sqnr_high_db:
            raise ValueError(f"an interval's low end is not above its high end, got {self.sqnr_low_db=} {self.sqnr_high_db=} at {self.site}")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`threshold_db`: what a product needs; `thresholds_db` by (site, pass) where it differs: a logit needs more, a gradient less (safety_map)."""

    threshold_db: float
    thresholds_db: Mapping[Key, float] = field(default_factory=dict)
    margin_db: float = 1.0
    dwell: int = 1000  # steps

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin_db) and self.margin_db > 0) or self.dwell < 1:
            raise ValueError(f"hysteresis has a finite margin > 0 dB and a dwell of at least one step, got {self.margin_db=} {self.dwell=}")

    def of(self, key: Key) -> float:
        return self.thresholds_db.get(key, self.threshold_db)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A product's recipe at a step, and why it changed."""

    step: int
    site: str
    which: str
    recipe: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """`plan` says what may run, `running` what does. `changes` are those of the last `after`, rises and falls in the order of the plan."""

    plan: Plan
    rules: Rules
    step: int = 0
    up: frozenset[Key] = frozenset()  # products that run in their FP8 recipe
    since: Mapping[Key, int] = field(default_factory=dict)  # the step of a product's last change or alarm
    changes: tuple[Change, ...] = ()

    @property
    def running(self) -> Plan:
        """The plan of what runs now, for `apply`. A site is fused where its forward product is up."""
        recipes = {site: {w: r for w, r in passes.items() if (site, w) in self.up} for site, passes in self.plan.recipes.items()}
        recipes = {site: passes for site, passes in recipes.items() if passes}
        fused = tuple(s for s in self.plan.fused if (s, "forward") in self.up)
        return replace(self.plan, recipes=recipes, fused=fused, made_by=f"dispatch of: {self.plan.made_by}")

    def after(self, *, step: int, readings: Iterable[Reading] = (), alarms: Iterable[str] = ()) -> Dispatch:
        """The state after `step`, at which these readings were taken and these sites' drift alarms rang.

        Readings of products or recipes that the plan does not have are left aside; one product has one reading of a recipe. Raises ValueError for
        two of them, for an alarm of a site that the plan does not have, and for a step before the last.
        """
        alarms = set(alarms)
        self._check(step, alarms)
        found = self._matching(readings)
        up, since, changes = set(self.up), dict(self.since), []
        for site, passes in self.plan.recipes.items():
            for which, recipe in passes.items():
                key = (site, which)
                is_up, why = self._decide(key, found.get(key), step, site in alarms)
                if site in alarms or is_up != (key in up):
                    since[key] = step
                if is_up != (key in up):
                    changes.append(Change(step=step, site=site, which=which, recipe=recipe if is_up else BASE, why=why))
                    (up.add if is_up else up.discard)(key)
        return replace(self, step=step, up=frozenset(up), since=since, changes=tuple(changes))

    def _decide(self, key: Key, reading: Reading | None, step: int, alarm: bool) -> tuple[bool, str]:
        """(whether the product runs in FP8 from now on, why)."""
        if alarm:
            return False, "its site's drift alarm rang"
        if reading is None:
            return key in self.up, "no reading"
        threshold, low, high = self.rules.of(key), reading.sqnr_low_db, reading.sqnr_high_db
        if not reading.speedup_low > 1.0:
            return False, f"its speed-up may be {reading.speedup_low:.3f}, which is no gain"
        if not low >= threshold - self.rules.margin_db or not high >= threshold:
            return False, f"its SQNR is {low:.1f} to {high:.1f} dB where {threshold:.1f} are needed"
        rested = key not in self.since or step - self.since[key] >= self.rules.dwell
        if low >= threshold and rested:
            return True, f"its SQNR is at least {low:.1f} dB where {threshold:.1f} are needed, its speed-up at least {reading.speedup_low:.3f}"
        return key in self.up, "within the margin, or changed lately"

    def _matching(self, readings: Iterable[Reading]) -> dict[Key, Reading]:
        found: dict[Key, Reading] = {}
        for r in readings:
            key = (r.site, r.which)
            if self.plan.recipes.get(r.site, {}).get(r.which) != r.recipe or not gemm(r.recipe).is_fp8:
                continue
            if key in found:
                raise ValueError(f"a product has one reading of a recipe at a step, got two of {r.recipe} at {key}; merge them first")
            found[key] = r
        return found

    def _check(self, step: int, alarms: set[str]) -> None:
        if step < self.step:
            raise ValueError(f"steps go on, got {step=} after {self.step}")
        if unknown := sorted(alarms - set(self.plan.recipes)):
            raise ValueError(f"an alarm is one of a site of the plan, got {unknown}; the plan has {list(self.plan.recipes)[:3]} ...")
