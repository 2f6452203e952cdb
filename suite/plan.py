"""Plan: the ordered graph of a preset's cells, and what is already done.

    plan = make_plan("demo", "smoke", cells, bundles=store.load_all()[0], machine=this_machine(), versions=versions, asset_sha256=sha256_of)
    [entry.state for entry in plan.entries]     # DONE, TO RUN, FAILED, BLOCKED, UNAVAILABLE

Keys are known before anything runs: an input enters by its key, not by its content.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from suite import identity
from suite.bundle import Bundle, origin_of, trust
from suite.cell import Cell
from suite.machine import Machine, device_model, refusal

DONE, TO_RUN, FAILED, BLOCKED, UNAVAILABLE = "DONE", "TO RUN", "FAILED", "BLOCKED", "UNAVAILABLE"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cell in a plan: its key, where it stands and why, and the bundle if it is done."""

    cell: Cell
    key: str
    code: str
    input_keys: Mapping[str, str]
    assets: Mapping[str, str]
    state: str
    reason: str = ""
    bundle: Bundle | None = None
    device_model: str = ""  # of the device that runs it here

    def describe(self) -> dict[str, Any]:
        """The cell as bundle.json stores it."""
        c = self.cell
        inputs = {role: {"point": c.inputs[role].point, "key": k} for role, k in self.input_keys.items()}
        return {"study": c.study, "label": c.label, "measure": c.measure, "params": dict(c.params), "seed": c.seed, "replicate": c.replicate,
                "needs": c.needs.to_json(), "inputs": inputs, "assets": dict(self.assets)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Entries in running order: every input before the cells that read it."""

    study: str
    preset: str
    entries: tuple[Entry, ...]

    def counts(self) -> dict[str, int]:
        return dict(Counter(e.state for e in self.entries))

    def points(self) -> dict[str, str]:
        return {e.cell.point: e.state for e in self.entries}

    def to_json(self) -> dict[str, Any]:
        rows = [{"label": e.cell.label, "point": e.cell.point, "key": e.key, "state": e.state, "reason": e.reason, "measure": e.cell.measure} for e in self.entries]
        return {"study": self.study, "preset": self.preset, "cells": rows}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked of a run."""

    rerun: bool = False
    keep_failed: bool = False
    reuse: bool = False  # foreign bundles of the same point and code count as done
    only: str = ""


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Inputs first, otherwise in the given order; a cell reached twice is listed once."""
    out: dict[str, Cell] = {}

    def visit(cell: Cell) -> None:
        if cell.point in out:
            if out[cell.point] != cell:
                raise ValueError(f"two cells of one plan ask the same question but differ in needs, inputs or label, got label={cell.label!r}; give them different params")
            return
        for source in cell.inputs.values():
            visit(source)
        out[cell.point] = cell

    for cell in cells:
        visit(cell)
    return list(out.values())


def make_plan(study: str, preset: str, cells: Sequence[Cell], *, bundles: Sequence[Bundle], machine: Machine, versions, asset_sha256, options: Options = Options()) -> Plan:
    """Find each cell's key and state.

    `versions(device)` gives the versions in the key; `asset_sha256(name)` an asset's declared digest.
    """
    chosen = select(ordered(cells), options.only)
    ours, foreign = _latest(bundles)
    keyed: dict[str, Entry] = {}
    code = {m: identity.code_digest(m) for m in {c.module for c in chosen}}
    for cell in chosen:
        input_keys = {role: keyed[c.point].key for role, c in cell.inputs.items()}
        assets = {name: asset_sha256(name) for name in cell.assets}
        model = device_model(cell.needs, machine)
        k = identity.key(point=cell.point, code=code[cell.module], input_keys=input_keys, assets=assets, versions=versions(cell.needs.device), device_model=model)
        entry = Entry(cell=cell, key=k, code=code[cell.module], input_keys=input_keys, assets=assets, state=TO_RUN, device_model=model)
        keyed[cell.point] = _with_state(entry, keyed, ours, foreign if options.reuse else {}, machine, options)
    return Plan(study=study, preset=preset, entries=tuple(keyed.values()))


def _latest(bundles: Sequence[Bundle]) -> tuple[dict[str, Bundle], dict[tuple[str, str], Bundle]]:
    ours: dict[str, Bundle] = {}
    foreign: dict[tuple[str, str], Bundle] = {}
    for b in sorted(bundles, key=lambda b: (trust(origin_of(b.path)), b.started_at)):  # the last one stays
        if origin_of(b.path) == "here":
            if b.status == "OK" or b.key not in ours or ours[b.key].status != "OK":
                ours[b.key] = b
        elif b.status == "OK":
            foreign[b.point, b.data["code"]] = b
    return ours, foreign


def _with_state(entry: Entry, keyed: Mapping[str, Entry], ours: Mapping[str, Bundle], foreign: Mapping, machine: Machine, options: Options) -> Entry:
    cell = entry.cell
    found = ours.get(entry.key)
    if found is not None and found.status == "OK" and not options.rerun:
        return replace(entry, state=DONE, bundle=found)
    borrowed = foreign.get((cell.point, entry.code))
    if borrowed is not None and not options.rerun:
        return replace(entry, state=DONE, bundle=borrowed, reason="measured elsewhere (--reuse)")
    for role, source in cell.inputs.items():
        upstream = keyed[source.point]
        if upstream.state in (BLOCKED, UNAVAILABLE, FAILED):
            state = UNAVAILABLE if upstream.state == UNAVAILABLE else BLOCKED
            return replace(entry, state=state, reason=f"its input {role!r} ({source.label}) is {upstream.state}: {upstream.reason}")
    why = refusal(cell.needs, machine)
    if why:
        return replace(entry, state=UNAVAILABLE, reason=why)
    if found is not None and found.status in ("FAILED", "TIMED OUT") and options.keep_failed:
        return replace(entry, state=FAILED, bundle=found, reason=last_line(found.data["error"]))
    return entry


def last_line(text: str) -> str:
    """Where a traceback says what went wrong."""
    return text.strip().splitlines()[-1] if text.strip() else ""


def select(cells: list[Cell], only: str) -> list[Cell]:
    """Cells that `--only` names, with their inputs: a label, a glob on labels, or 'name=value[,name=value]' on params."""
    if not only:
        return cells
    chosen = [c for c in cells if c.label == only] or [c for c in cells if fnmatch.fnmatch(c.label, only)]
    if not chosen and "=" in only:
        pairs = [p.partition("=")[::2] for p in only.split(",")]
        chosen = [c for c in cells if all(str(c.params.get(k.strip())) == v.strip() for k, v in pairs)]
    if not chosen:
        raise ValueError(f"--only must name at least one cell, got {only!r}; labels are, e.g., {[c.label for c in cells[:3]]}")
    return ordered(chosen)


def planned_modules(plan: Plan) -> set[str]:
    """Modules of the plan's measure functions."""
    return {e.cell.module for e in plan.entries}
