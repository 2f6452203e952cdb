"""Rows of the LoKA study made by hand, each with a payload of its own on disk. The numbers are made up: nothing in them was measured.

rows = Rows(tmp_path)
rows.safety("forward", "row-scaled", {"tensorwise": "unsafe", "rowwise": "safe"})
rows.view()                     # a View of them
rows.everything()               # one of each kind of question, on a CPU and an H200
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.fp8.recipes import GEMMS
from studies.loka.presets import ALL_MODS, MODS_2K
from studies.loka.questions import GRADIENT_DB, INNER_DB
from suite.claims import Row, View
from suite.identity import canonical_json, sha256_file

CPU, H200, L4 = "AMD EPYC family 25 model 17 stepping 1 avx512", "NVIDIA H200", "NVIDIA L4"
RECIPES = [g.name for g in GEMMS.values() if g.dtype in ("fp8", "bf16") and not g.fast_accum]
QUALITY = {"model": "wukong", "size": "small", "mods": "", "data": "planted", "steps": 60, "batch": 256, "test_rows": 16384}
STEP = {"model": "wukong", "size": "5.6", "mods": "", "batch": 6144, "training": True, "variants": ["bf16"]}


class Rows:
    """Rows in the order in which they were added."""

    def __init__(self, folder: Path):
        self.folder, self.made = folder, []

    def add(self, measure: str, params: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None, records: Mapping[str, Any] | None = None, device: str = CPU, **fields: Any) -> Row:
        folder = self.folder / f"{len(self.made):04d}"
        folder.mkdir()
        for name, value in (records or {}).items():
            (folder / f"{name}.json").write_bytes(canonical_json(value))
        gpu = device.startswith("NVIDIA")
        given = {
            "study": "loka", "point": f"{measure} {dict(params)} {fields.get('seed', 0)} {fields.get('replicate', 0)}", "key": "k", "bundle_id": folder.name, "run_id": f"run{folder.name}", "label": folder.name,
            "measure": f"studies.loka.{measure}", "params": dict(params), "seed": 0, "replicate": 0, "metrics": dict(metrics or {}), "facts": {}, "kind": "measured" if gpu else "emulated", "status": "OK",
            "device": device, "machine": "m", "environment": {"process": folder.name, "torch": "2.11.0", "triton": "3.6.0"}, "commit": "c" * 40, "dirty": False, "code": "d",
            "origin": "published" if gpu else "here", "started_at": "2026-01-01T00:00:00+00:00", "path": folder, "files": {p.name: sha256_file(p) for p in folder.iterdir()},
        }  # fmt: skip
        row = Row(**{**given, **fields})
        self.made.append(row)
        return row

    def view(self, rows: list[Row] | None = None, plan_cells: tuple = ()) -> View:
        return View(study="loka", rows_=tuple(self.made if rows is None else rows), planned={}, plan_cells=plan_cells)

    # ---- safety ----

    def safety(self, which: str = "forward", distribution: str = "gaussian", verdicts: Mapping[str, str] | None = None, *, threshold: float | None = None, op: str = "linear", products: int = 1, rows: int = 256, contracted: int = 512, **fields: Any) -> Row:
        """Recipes that are not named are safe, bf16 among them."""
        threshold = threshold or (INNER_DB if which == "forward" else GRADIENT_DB)
        params = {"which": which, "op": op, "products": products, "rows": rows, "contracted": contracted, "distribution": distribution, "threshold_db": threshold}
        records = self.recipes(verdicts or {})
        safe = sum(r["verdict"] == "safe" and r["fp8"] for r in records)
        return self.add("measures.safety_map:safety", params, metrics={"safe_recipes": float(safe), "p01_db_tensorwise": 20.0, "p01_db_rowwise": 26.8, **fields.pop("metrics", {})}, records={"recipes": records}, **fields)

    @staticmethod
    def recipes(verdicts: Mapping[str, str]) -> list[dict]:
        return [{"recipe": r, "fp8": r != "bf16", "verdict": verdicts.get(r, "safe"), "p01_db": 26.0, "low_db": 25.0, "high_db": 27.0, "median_db": 28.6, "rows": 512, "flushed": 0.0} for r in RECIPES]

    def captured(self, verdicts: Mapping[str, str] | None = None, **fields: Any) -> Row:
        sites = [{"site": s, "op": "linear", "which": w, "head": s == "over.3:linear", "threshold_db": 25.6, "recipes": self.recipes(verdicts or {} if s != "over.3:linear" else dict.fromkeys(RECIPES, "unsafe"))}
                 for s in ("dense.0:linear", "over.3:linear") for w in ("forward", "wgrad")]  # fmt: skip
        return self.add("probing.captured:captured", {"model": "wukong", "size": "small", "mods": "", "steps": 200, "batch": 512, "examples": 512}, records={"sites": sites}, **fields)

    def filtered(self, converted: int = 0, **fields: Any) -> Row:
        counts, shares = {"tensorwise": converted, "rowwise": 0}, {"tensorwise": converted / 8, "rowwise": 0.0}
        record = [{"model": "dlrm_v2 mlperf", "products": 14, "seen": 8, "converted": counts, "flops_share": shares}]
        return self.add("measures.filter:torchao_filter", {"models": [["dlrm_v2", "mlperf"]]}, records={"filter": record}, kind="measured", **fields)

    def validation(self, distribution: str = "gaussian", gap: float = 0.4, **fields: Any) -> Row:
        found = [{"which": w, "recipe": r, "rows": 1024, **{f"{k}_{q}_db": v for q in ("p01", "median") for k, v in (("true", 26.0), ("predicted", 26.0 + gap), )}, "p01_gap_db": gap, "median_gap_db": 0.1}
                 for w in ("forward", "dgrad", "wgrad") for r in RECIPES if r != "bf16"]  # fmt: skip
        return self.add("cells.probing:validation", {"distribution": distribution, "m": 1024, "k": 256, "n": 128}, metrics={"prediction_error_db": gap}, records={"recipes": found}, **fields)

    def surrogate(self, gap: float = 19.9, spread: float = 1.7, **fields: Any) -> Row:
        laws = [{"distribution": "row-scaled", "true_p01_db": 7.8, "ours_p01_db": 8.0, "surrogate_p01_db": 7.8 + gap, "mean_of_ratios": 0.3, "ratio_of_sums": 0.04, "true_ratio_of_sums": 0.04}]
        tries = [{"mean_of_ratios": 0.3, "ratio_of_sums": 0.04}, {"mean_of_ratios": 0.3 * spread, "ratio_of_sums": 0.0401}]
        return self.add("cells.probing:surrogate_failures", {"m": 4096}, metrics={"surrogate_gap_db": gap, "mere_spread": spread}, records={"laws": laws, "mere": tries}, **fields)

    def stopping(self, wrong: float = 0.0, **fields: Any) -> Row:
        stream = [{"share_below": 0.2, "rows": 8192, "truth": "unsafe", "low": 0.18, "high": 0.22}]
        return self.add("cells.probing:stopping", {"distribution": "row-scaled", "recipe": "tensorwise"}, metrics={"stop_error_share": wrong, "stop_rows": 64.0}, records={"stream": stream}, **fields)

    def overhead(self, logs: float, **fields: Any) -> Row:
        params = {"model": "wukong", "size": "5.6", "batch": 6144, "every": 100, "compiled": True}
        return self.add("cells.probing:overhead", params, metrics={"log_probe_overhead": logs, "step_us": 9000.0}, device=H200, **fields)

    def log(self, change: float, data: str = "movielens-1m", *, half: float = 2e-5, **fields: Any) -> Row:
        more = {"loss_change": change, "loss_low": change - half, "loss_high": change + half, "detectable": 1.4 * half, "rows": 1e6}
        return self.add("cells.real:real_change", {"data": data, "recipe": "rowwise"}, metrics={"auc": 0.8}, facts={"verdict": "within"}, records={"more": more}, **fields)

    def planners(self, **fields: Any) -> Row:
        lines = [{"planner": p, "made_by": p, "products": n, "heads": 0, "step_us": 90.0, "speedup": 1.0 + n / 100, "predicted": None if p == "torchao" else n / 1e6, "predicted_forward": None,
                  "measured": n / 1e6, "low": n / 2e6, "high": n / 5e5, "time_kind": "simulated"} for p, n in (("bf16", 0), ("torchao", 30), ("ours", 20))]  # fmt: skip
        params = {"training": {"size": "small", "steps": 400, "batch": 1024}, "data": {"largest": 50}, "rows": 32768, "chunk": 4096, "budget": 2e-4, "examples": 8192, "width": 32}
        return self.add("cells.pricing:planners", params, records={"planners": lines, "plans": {}}, kind="simulated", **fields)

    # ---- log-loss ----

    def quality(self, arm: str, changes: list[float], *, device: str = CPU, mods: str = "", size: str = "small", fields: Mapping[str, Any] | None = None) -> None:
        """Seeds 1, 2, ... whose losses are bf16's times 1 + change."""
        for seed, change in enumerate(changes, 1):
            self.add("learning.quality:quality", {**QUALITY, "arm": arm, "mods": mods, "size": size}, metrics={"log_loss": (0.5 + seed / 1000) * (1 + change), "diverged": 0.0}, seed=seed, device=device, **(fields or {}))

    def arms(self, ours: list[float], *, spread: float = 1e-5, bad: float = 0.01, **where: Any) -> None:
        n = len(ours)
        wiggle = [spread * (-1) ** i for i in range(n)]
        self.quality("bf16", [0.0] * n, **where)
        self.quality("bf16-perturbed", wiggle, **where)
        self.quality("planted-bad", [bad + w for w in wiggle], **where)
        self.quality("ours", ours, **where)

    def flips(self, points: list[tuple[float, float]], *, sites: int = 10, noise: list[float] | None = None, **fields: Any) -> Row:
        """(predicted, measured) changes; points go round the sites. The noise ranks as given, else at random."""
        made = [{"site": f"s{i % sites}:linear", "recipe": "rowwise" if i % 2 else "tensorwise", "error": e, "measured": m, "standard_error": 1e-9, "excluded": False,
                 "noise_to_signal": (noise or [((7 * j) % 11) / 11 for j in range(len(points))])[i]} for i, (e, m) in enumerate(points)]  # fmt: skip
        return self.add("cells.pricing:flips", {"rows": 32768}, metrics={"log_loss": 0.5}, records={"points": made}, **fields)

    # ---- time ----

    def step(self, logs: Mapping[str, float], *, mods: str = "", training: bool = True, device: str = H200, whole: float | None = None, **fields: Any) -> Row:
        records = {"more": {"log_speedup_step_dispatch": whole}} if whole else {}
        records["variants"] = [{"variant": "bf16", "fp8_products": 0, "log_speedup": 0.0}, {"variant": "dispatch", "fp8_products": 30, "log_speedup": logs.get("log_speedup_dispatch", 0.1)}]
        records["unsupported"] = [{"variant": "torchao", "why": "torchao is not installed here"}]
        return self.add("cells.speed:dense_step", {**STEP, "mods": mods, "training": training}, metrics={"step_us": 9000.0, **logs}, records=records, device=device, **fields)

    def everything(self) -> None:
        for distribution in ("gaussian", "row-scaled"):
            self.safety("forward", distribution, {"tensorwise": "unsafe"} if distribution == "row-scaled" else {})
            self.safety("wgrad", distribution, {"tensorwise-grad": "undecided"})
        self.safety("forward", "gaussian", device=H200, rows=512, contracted=4096, metrics={"hardware_db": 48.0})
        self.captured()
        self.filtered()
        self.validation()
        self.log(1e-5)
        self.surrogate()
        self.stopping()
        self.planners()
        self.arms([1e-5, 2e-5, -1e-5, 0.0, 1e-5, 3e-5, 0.0, 1e-5])
        for i, mods in enumerate(MODS_2K[1:], 1):
            self.quality("bf16", [i / 1e4] * 3, device=H200, mods=mods)
        self.quality("bf16", [0.0] * 3, device=H200)
        self.flips([(1e-6 * 1.3**i, 1.1e-6 * 1.3**i) for i in range(44)])
        variants = [{"variant": "whole", "work": "whole", "recipe": "rowwise-fast", "backend": "triton", "log_speedup": 0.2}]
        for m, n in ((2048, 128), (8192, 1024), (8192, 4096)):
            self.add("cells.contests:crossover", {"m": m, "k": n, "n": n, "which": "forward"}, metrics={"bf16_us": n / 10, "log_speedup_whole": math.log(n / 1000), "log_speedup_product": 0.5}, records={"variants": variants}, device=H200)
        for replicate in range(5):
            bandwidth = {"fused_us": 200.0, "copy_gbps": 4200.0, "log_bandwidth_share": math.log(0.9) + replicate / 1e4, "log_speedup_over_compiled": 0.3, "log_speedup_over_separate": 0.6}
            self.add("cells.contests:fused_quantise", {"m": 65536, "k": 4096, "norm": "blocknorm", "activation": "hardswish", "granularity": "row", "keep": False}, metrics=bandwidth, replicate=replicate, device=H200)
            jitter = replicate / 1e4
            self.overhead(0.003 + jitter, replicate=replicate)
            self.step({"log_speedup_dispatch": 0.25 + jitter, "log_speedup_single": 0.2, "log_dispatch_over_single": 0.05 + jitter, "log_speedup_torchao": -0.2 + jitter}, replicate=replicate)
            for training in (True, False):
                self.step({"log_speedup_dispatch": 0.36 + jitter, "log_speedup_single": 0.3, "amdahl_cap": 1.6}, mods=ALL_MODS, training=training, replicate=replicate, whole=0.1 + jitter if training else None)
            mods = [{"mods": m, "us": 100.0, "log_speedup": 0.1 * i + jitter} for i, m in enumerate(MODS_2K)]
            self.add("cells.speed:mods_latency", {"size": "5.6"}, metrics={"layer_us": 100.0, "log_speedup_mods": 0.7 + jitter}, records={"mods": mods}, replicate=replicate, device=H200)
