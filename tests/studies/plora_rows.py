"""Rows of the PLoRA study made by hand, each with a payload of its own on disk. The numbers are made up: nothing in them was measured.

rows = Rows(tmp_path)
rows.ladder("3b", 1.0, replicate=0)     # ln of the pack's gain
rows.view()                             # a View of them
rows.everything()                       # one of each kind of question, on a CPU and an H200
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studies.plora.presets import ARMS, PRUNED_TRIALS
from suite.claims import Row, View
from suite.identity import canonical_json, sha256_file

CPU, H200, L4 = "AMD EPYC family 25 model 17 stepping 1 avx512", "NVIDIA H200", "NVIDIA L4"
AT = {"tokens": 128, "batch": 1, "rank": 16}


class Rows:
    """Rows in the order in which they were added."""

    def __init__(self, folder: Path | None):
        self.folder, self.made = folder, []

    def add(self, measure: str, params: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None, records: Mapping[str, Any] | None = None, device: str = H200, **fields: Any) -> Row:
        folder = self.folder / f"{len(self.made):04d}"
        folder.mkdir()
        for name, value in (records or {}).items():
            (folder / f"{name}.json").write_bytes(canonical_json(value))
        gpu = device.startswith("NVIDIA")
        given = {
            "study": "plora", "point": f"{measure} {dict(params)} {fields.get('seed', 0)} {fields.get('replicate', 0)}", "key": "k", "bundle_id": folder.name, "run_id": f"run{folder.name}", "label": folder.name,
            "measure": f"studies.plora.{measure}", "params": dict(params), "seed": 0, "replicate": 0, "metrics": dict(metrics or {}), "facts": {}, "kind": "measured", "status": "OK",
            "device": device, "machine": "m", "environment": {"process": folder.name, "torch": "2.11.0", "triton": "3.6.0"}, "commit": "c" * 40, "dirty": False, "code": "d",
            "origin": "published" if gpu else "here", "started_at": "2026-01-01T00:00:00+00:00", "path": folder, "files": {p.name: sha256_file(p) for p in folder.iterdir()},
        }  # fmt: skip
        row = Row(**{**given, **fields})
        self.made.append(row)
        return row

    def view(self, rows: list[Row] | None = None, plan_cells: tuple = ()) -> View:
        return View(study="plora", rows_=tuple(self.made if rows is None else rows), planned={}, plan_cells=plan_cells)

    # ---- time ----

    def ladder(self, model: str, log: float, *, cap: float = 2.0, k: int = 32, measure: str = "ladder", device: str = H200, **fields: Any) -> Row:
        lines = [{"variant": v, "adapters": n, "tokens": 128 * n, "us": 4000.0, "tokens_per_s": 1e4, "mfu": 0.1, "log_speedup": gain, "cosine": 0.99}
                 for v, n, gain in (("B1 one graphed", 1, 0.0), ("B3 looped", k, -0.5), ("B7 ours, graphed", k, log), ("saturated", 1, cap))]  # fmt: skip
        metrics = {"log_pack_speedup": log, "log_pack_cap": cap, "mfu_single": 0.05, "mfu_pack": 0.2, "mfu_max": 0.4}
        return self.add(f"cells.throughput:{measure}", {"model": model, **AT, "k": k}, metrics=metrics, records={"variants": lines}, device=device, **fields)

    def surface(self, model: str, tokens: int, gains: Mapping[int, float], *, batch: int = 1, cap: float = 1.5, **fields: Any) -> Row:
        lines = [{"variant": "B1 one graphed", "adapters": 1, "log_speedup": 0.0}] + [{"variant": f"k={k}", "adapters": k, "log_speedup": gain} for k, gain in gains.items()]
        return self.add("cells.throughput:surface", {"model": model, "tokens": tokens, "batch": batch, "rank": 16, "ks": list(gains)}, metrics={"log_pack_speedup": gains[max(gains)], "log_pack_cap": cap, "mfu_single": 0.3}, records={"variants": lines}, **fields)

    def processes(self, model: str, log: float, **fields: Any) -> Row:
        return self.add("measures.baselines:processes", {"model": model, **AT}, metrics={"log_processes_over_graphed": log}, **fields)

    def peft(self, log: float, *, model: str = "3b", rank: int = 16, lengths: str = "gsm8k", **fields: Any) -> Row:
        metrics = {"log_pack_over_peft": log, "log_pack_over_peft_bf16": log - 0.1, "host_us_per_op": 6.0}
        return self.add("measures.baselines:peft_eager", {"model": model, "tokens": 512, "batch": 1, "rank": rank, "lengths": lengths}, metrics=metrics, **fields)

    def saturation(self, model: str, log: float, **fields: Any) -> Row:
        return self.add("cells.throughput:saturation", {"model": model, "k": 64, "tokens": 128}, metrics={"log_saturation_share": log, "mfu_pack": 0.4, "mfu_max": 0.45}, **fields)

    def kernel(self, which: str, d: int, tokens: int, *, speedup: float = 2.0, share: float = -0.1, roofline: float = -0.1, over_cache: float = 5.0, **fields: Any) -> Row:
        metrics = {"kernel_us": 50.0, "log_kernel_speedup": speedup, "log_kernel_over_eager": speedup + 1, "log_kernel_cap_share": share, "log_kernel_roofline_share": roofline}
        lines = [{"path": p, "us": us} for p, us in (("triton", 50.0), ("looped", 400.0), ("padded", 90.0), ("grouped", 80.0))]
        return self.add("cells.kernels:kernels", {"which": which, "d": d, "tokens": tokens, "slots": 32, "rank": 64}, metrics=metrics, records={"variants": lines, "more": {"over_cache": over_cache}}, **fields)

    # ---- plans ----

    def cost_model(self, model: str, errors: list[float], **fields: Any) -> Row:
        lines = [{"tokens": 128, "slots": [[16, 1]], "part": part, "measured_s": 0.01 * (i + 1), "predicted_s": 0.01, "error": e} for part in ("fit", "holdout") for i, e in enumerate(errors)]
        return self.add("cells.planning:cost_model", {}, metrics={"mape": sum(map(abs, errors)) / len(errors)}, records={"residuals": lines}, device=CPU, label=f"cost model {model}", **fields)

    def regret(self, worst: float | None, *, cases: int = 12, kind: str = "replayed", **fields: Any) -> Row:
        lines = [{"case": c, "gpus": 1, "limit_bytes": 24e9, "planner": p, "regret": worst, "chosen_s": 1.0, "best_s": 1.0, "predicted_s": 1.0, "plans": 203, "gap": 0.0} for c in range(cases) for p in ("exact", "lpt")]
        metrics = {"planner_regret": worst} if worst is not None else {}
        return self.add("cells.planning:regret", {}, metrics=metrics, records={"planners": lines}, device=CPU, kind=kind, label="planners' regret 3b", **fields)

    def largest(self, gap: int, **fields: Any) -> Row:
        return self.add("cells.throughput:largest", {"model": "3b", "tokens": 512, "rank": 64}, metrics={"largest_k_gap": float(gap)}, records={"largest": [{"tokens": 512, "slot": [64, 1], "limit_bytes": 24e9, "k": 5, "predicted": 5 + gap}]}, **fields)

    def gaps(self, **fields: Any) -> Row:
        lines = [{"case": c, "planner": p, "gap": g, "bound_ratio": 1.1} for c in range(2) for p, g in (("exact", 0.0), ("fifo", 0.2))]
        return self.add("cells.planning:gaps", {}, records={"planners": lines}, device=CPU, kind="simulated", label="planners' gaps by assumed times 3b", **fields)

    def makespan(self, eager: float, tokens: int = 512, **fields: Any) -> Row:
        arms = [{"arm": a, "makespan_s": s, "busy_share": 0.9} for a, s in (("packed", 100.0), ("eager", 100.0 * eager), ("graphed", 300.0))]
        metrics = {"makespan_s": 100.0, "makespan_over_eager": eager, "makespan_over_graphed": 3.0}
        return self.add("cells.planning:makespan", {"tokens": tokens}, metrics=metrics, records={"makespans": arms}, device=CPU, kind="simulated", label="makespan of the paper, 3b gsm8k", **fields)

    def clusters(self, **fields: Any) -> Row:
        lines = [{"gpus": g, "planner": p, "tail": "idle", "makespan_s": s, "over_sequential": 10 / s, "busy_share": 0.9} for g in (8, 64) for p, s in (("sequential", 10.0), ("continuous", 4.0))]
        return self.add("cells.planning:clusters", {}, metrics={"simulated_over_sequential": 2.5}, records={"planners": lines}, device=CPU, kind="simulated", label="clusters by assumed times 3b", **fields)

    # ---- training ----

    def search(self, arm: str, seed: int, seconds: float, *, score: float = 0.8, measure: str = "replayed", trials: int = PRUNED_TRIALS, **fields: Any) -> Row:
        progress = [{"device_s": seconds / 4, "score": score - 0.1, "test_score": score - 0.1}, {"device_s": seconds / 2, "score": score, "test_score": score}]
        metrics = {"best_score": score + 0.01, "test_score": score, "device_s": seconds, "trained": 60.0, "pruned": 30.0}
        params = {"sampler": "tpe", "arm": arm, "trials": trials, "slots": [64] * 16}
        return self.add(f"cells.search:{measure}", params, seed=seed, metrics=metrics, records={"progress": progress}, device=CPU, kind="replayed" if measure == "replayed" else "measured", **fields)

    def searches(self, ratio: float, differences: list[float]) -> None:
        """Pairs of searches by seed: packed ones `ratio` times as fast, their scores better by `differences`."""
        for seed, difference in enumerate(differences, 1):
            seconds = 1000.0 + seed
            self.search("sequential+prune", seed, seconds)
            self.search("packed+prune+refill", seed, seconds / ratio * (1 + seed / 1e4), score=0.8 + difference)

    def live(self, speedup: float, gpus: int = 1, **fields: Any) -> Row:
        metrics = {"makespan_s": 60.0, "gpus": float(gpus), "tokens_per_s": 2e4, "makespan_speedup": speedup}
        more = {"score_difference": 0.001, "score_difference_low": -0.002, "score_difference_high": 0.004}
        return self.add("cells.training:makespan_live", {"configurations": 120}, metrics=metrics, records={"more": more}, **fields)

    def same(self, share: float = 1.0, **fields: Any) -> Row:
        return self.add("cells.training:same_adapters", {"model": "smollm2", "configurations": 8, "task": {"name": "banking77"}}, metrics={"equal_share": share}, **fields)

    def exact(self, name: str, share: float, **fields: Any) -> Row:
        metric = {"packed_equals_separate": "equal_share", "isolation": "isolated_share", "noise_floor": "noise_ratio"}[name]
        cases = [{"case": "permuted slots", "mode": "deterministic", "equal": share == 1.0, "gap": 0.0}]
        return self.add(f"measures.exactness:{name}", {"model": "smollm2"}, metrics={metric: share}, records={"cases": cases}, **fields)

    def quality(self, **fields: Any) -> None:
        task, spec = {"name": "banking77"}, {"rank": 16, "alpha": 32.0, "learning_rate": 1e-3, "batch": 4}
        at = {"model": "smollm2", "task": task, "seeds": 2}
        self.add("cells.training:quality", at, metrics={"test_score": 0.7}, records={"quality": [{"adapter": spec, "validation": [0.6, 0.7, 0.8], "test": None}], "more": {"base_score": 0.01, "chance": None}}, **fields)
        self.add("cells.training:winner", at, metrics={"test_score": 0.7}, records={"seeds": [{"seed": s, "alone": 0.7, "packed": 0.71} for s in range(2)]}, **fields)
        self.add("cells.training:against_peft", at, metrics={"test_score": 0.7}, records={"seeds": [{"seed": s, "ours": 0.7, "peft": 0.7} for s in range(2)]}, **fields)

    def pruners(self, **fields: Any) -> Row:
        lines = [{"pruner": "optuna: median", "order": "best first", "pruned": 0, "best_pruned": False, "order_free": True}]
        return self.add("cells.search:pruners", {"trials": 8, "steps": 16}, records={"pruners": lines}, device=CPU, facts={"optuna": "5.0.0"}, **fields)

    def everything(self) -> None:
        """Every claim stands."""
        for i in range(5):
            jitter = i / 1e4
            for model, gain in (("0.5b", math.log(8.0)), ("3b", math.log(3.0)), ("7b", math.log(2.0))):
                self.ladder(model, gain + jitter, cap=gain + 0.1, replicate=i)
                self.processes(model, math.log(1.1) + jitter, replicate=i)
                self.saturation(model, math.log(0.9) + jitter, replicate=i)
            self.peft(math.log(20.0) + jitter, replicate=i)
            for which in ("forward", "backward"):
                for d, tokens in ((3584, 128), (2048, 32)):
                    self.kernel(which, d, tokens, speedup=math.log(8.0) + jitter, share=math.log(0.8) + jitter, roofline=math.log(0.8) + jitter, replicate=i)
        self.surface("0.5b", 128, {2: 0.5, 64: 1.4})
        self.surface("0.5b", 1024, {2: 0.01, 16: 0.05}, cap=0.1)
        self.cost_model("3b", [0.01 * (-1) ** i * (1 + i % 3) for i in range(16)])
        self.regret(1.01)
        self.largest(0)
        self.gaps()
        self.clusters()
        self.makespan(9.0)
        self.searches(6.0, [0.001, -0.001, 0.0, 0.002, -0.002])
        for arm in ARMS:
            self.search(arm, 1, 500.0, measure="live", trials=12)
        for i in range(3):
            self.live(5.0 + i / 100, replicate=i)
            self.live(5.5 + i / 100, gpus=2, replicate=i)
        self.same()
        for name, value in (("packed_equals_separate", 1.0), ("isolation", 1.0), ("noise_floor", 1.4)):
            self.exact(name, value)
        self.quality()
        self.pruners()
