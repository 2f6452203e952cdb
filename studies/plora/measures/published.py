"""Searches replayed on the grid that was recorded on a GPU and travels with the source: a laptop sees how arms compare where training is real.

    replayed_published(ctx, grid="3f2a...", times="90c1...", sampler="tpe", arm="packed+prune+refill", trials=64, slots=[64] * 16, looks=16, shares=[0.125, 0.25, 0.5], eta=2)

A bundle is named by the sha256 of its bundle.json, which names the sha256 of the payload, so what is replayed is what was asked for. Kind: replayed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from studies.plora.measures.search import replayed
from suite.measure import Context, Result

__all__ = ["PUBLISHED", "folder_of", "replayed_published"]

PUBLISHED = Path(__file__).parents[3] / "reports" / "published" / "plora"


def replayed_published(
    ctx: Context, *, grid: str, times: str, sampler: str, arm: str, trials: int, slots: Sequence[int], looks: int, shares: Sequence[float], eta: int,
) -> Result:  # fmt: skip
    """grid, times: ids of published bundles of studies.plora.measures.grid. Raises ValueError where one is absent or is not what was measured."""
    inputs = {"grid": folder_of(grid, "curves.json"), "times": folder_of(times, "times.json")}
    return replayed(replace(ctx, inputs=inputs), sampler=sampler, arm=arm, trials=trials, slots=slots, looks=looks, shares=shares, eta=eta)


def folder_of(bundle_id: str, payload: str) -> Path:
    """The published bundle's folder, its payload checked."""
    for path in sorted(PUBLISHED.glob("*/*/bundle.json")):
        if hashlib.sha256(path.read_bytes()).hexdigest() == bundle_id:
            wanted = json.loads(path.read_text())["files"].get(payload, {}).get("sha256")
            if wanted is None or hashlib.sha256((path.parent / payload).read_bytes()).hexdigest() != wanted:
                raise ValueError(f"{payload} of a published bundle has the sha256 that its bundle names, got another in {bundle_id[:12]}; check it out again")
            return path.parent
    raise ValueError(f"a published bundle lies under reports/published/plora, got no {bundle_id[:12]}; run the preset again, it names the newest")
