"""Rows of the determinism study made by hand, each with a payload of its own on disk. The numbers are made up: nothing in them was measured.

rows = Rows(tmp_path)
rows.add("cells:operators", {"impl": "fma", ...}, records={"operators": [...]}, device=H200)
rows.view()                     # a View of them
rows.everything()               # one of each question of the presets, on a CPU and an H200
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from studies.determinism.bits import REQUIRED
from studies.determinism.golden_manifest import read
from suite.claims import Row, View
from suite.identity import canonical_json, sha256_file

CPU = "Intel(R) Xeon(R) Processor family 6 model 207 stepping 2 avx512"
OTHER_CPU = "Intel(R) Xeon(R) Processor family 6 model 143 stepping 8 avx512"
H200, L4 = "NVIDIA H200", "NVIDIA L4"
OPERATORS = ("layers.0.mlp.down_proj", "ragged.1x5x250.bfloat16")
ROWS = (1, 8, 64)
CASES = [{"operator": "linear", "case": f"case {i}", "equal": True, "error": ""} for i in range(4)]


class Rows:
    """Rows in the order in which they were added."""

    def __init__(self, folder: Path):
        self.folder, self.made, self.count = folder, [], 0

    def add(
        self,
        measure: str,
        params: Mapping[str, Any],
        *,
        records: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        device: str = CPU,
        **fields: Any,
    ) -> Row:
        self.count += 1
        folder = self.folder / f"{self.count:04d}"
        folder.mkdir()
        for name, value in (records or {}).items():
            (folder / f"{name}.json").write_bytes(canonical_json(value))
        if arrays:
            np.savez(folder / "arrays.npz", **arrays)
        gpu = device.startswith("NVIDIA")
        environment = {
            "process": folder.name,
            "cpu_model": CPU if gpu else device,
            "gpu_model": device if gpu else "",
            "device_model": device,
            "torch": "2.11.0",
            "triton": "3.6.0",
            **fields.pop("environment", {}),
        }
        given = {
            "study": "determinism",
            "point": f"{measure} {dict(params)} {fields.get('replicate', 0)}",
            "key": "k",
            "bundle_id": folder.name,
            "run_id": f"run{folder.name}",
            "label": folder.name,
            "measure": f"studies.determinism.{measure}",
            "params": dict(params),
            "seed": 0,
            "replicate": 0,
            "metrics": {},
            "facts": {},
            "kind": "measured",
            "status": "OK",
            "device": device,
            "machine": "m",
            "environment": environment,
            "commit": "c" * 40,
            "dirty": False,
            "code": "d",
            "origin": "published" if gpu else "here",
            "started_at": "2026-01-01T00:00:00+00:00",
            "path": folder,
            "files": {p.name: sha256_file(p) for p in folder.iterdir()},
        }
        row = Row(**{**given, **fields})
        self.made.append(row)
        return row

    def view(self, rows: list[Row] | None = None) -> View:
        return View(study="determinism", rows_=tuple(self.made if rows is None else rows), planned={})

    # ---- linear layers ----

    def oracle(self, family: str, engine: str = "auto", *, wrong: int = 0, **fields: Any) -> Row:
        digests = [{"operator": o, "digests": {str(r): f"{family} {o} {r}" + " wrong" * (i < wrong) for r in ROWS}} for i, o in enumerate(OPERATORS)]
        return self.add("cells:oracle", {"family": family, "engine": engine}, records={"oracle": digests}, **fields)

    def operators(self, impl: str, device: str, rows: int = 64, *, wrong: int = 0, kernel: Mapping | None = None, **fields: Any) -> Row:
        """Digests of the family's oracle, `wrong` of them others."""
        records = []
        for i, o in enumerate(OPERATORS):
            digests = {str(r): f"{impl} {o} {r}" + " wrong" * (i < wrong) for r in ROWS if r <= rows}
            records.append({"operator": o, "digest": digests[str(rows)], "digests": digests, "equal": i >= wrong})
        params = {
            "impl": impl,
            "device": "cuda" if device.startswith("NVIDIA") else "cpu",
            "rows": rows,
            "chunk_rows": 0,
            "threads": 0,
            "kernel": dict(kernel or {}),
        }
        metrics = {"operators": 2.0, "equal_operators": 2.0 - wrong, "differing": float(wrong), "elements": 99.0, "max_ulp": float(wrong)}
        return self.add("cells:operators", params, records={"operators": records}, metrics=metrics, device=device, **fields)

    # ---- whole texts and evidence ----

    def texts(self, family: str, device: str, *, prompts: int = 3, wrong: int = 0, fields: Mapping[str, Any] | None = None, **schedule: Any) -> Row:
        params = {
            "family": family,
            "device": "cuda" if device.startswith("NVIDIA") else "cpu",
            "prompts": prompts,
            "new_tokens": 16,
            "ranks": 1,
            "batch": 1,
            "chunk": 0,
            "pad_to": 0,
            "cache": True,
            "graph": False,
            "sampled": False,
            **schedule,
        }
        texts = [
            {"prompt": i, "tokens": [1, 2], "digest": f"{family} {params['sampled']} {i}" + " wrong" * (i < wrong), "first_logits": "x"}
            for i in range(prompts)
        ]
        return self.add("whole_model:generation", params, records={"texts": texts}, device=device, **(fields or {}))

    def counted(self, measure: str, params: Mapping[str, Any], cases: list[dict] = CASES, device: str = H200, **fields: Any) -> Row:
        return self.add(
            f"evidence:{measure}",
            params,
            records={"cases": cases},
            device=device,
            metrics={"cases": float(len(cases)), "equal_cases": float(sum(c["equal"] for c in cases))},
            **fields,
        )

    def required(self, measure: str, cases: list[dict] = CASES, device: str = H200, **fields: Any) -> None:
        """A row of each value that the claim on `measure` needs."""
        name, values = REQUIRED[measure]
        for value in values:  # one row each; `stress` may also answer for several at once
            self.counted(measure, {name: value}, cases, device, **fields)

    def training(self, device: str, loss: str = "a", *, more: Mapping[str, str] | None = None, steps: int = 1, **fields: Any) -> Row:
        return self.add(
            "evidence:training",
            {"device": "cuda" if device.startswith("NVIDIA") else "cpu", "steps": steps},
            records={"digests": {"loss": loss, "gradient": "b", **(more or {})}},
            device=device,
            **fields,
        )

    def verify(self, device: str, kernels: list[dict] | None = None, *, answered: int | None = None, questions: str = "") -> Row:
        """The manifest's answers to the first `answered` questions, by default to all."""
        golden = [
            {"operator": q.operator, "case": q.case, "input_digest": q.input_digest, "output_digest": q.output_digest} for q in read().questions
        ]
        return self.add(
            "verify_cells:verify",
            {"device": "cuda" if device.startswith("NVIDIA") else "cpu", "questions": questions},
            records={"golden": golden[:answered], "kernels": kernels or []},
            device=device,
        )

    # ---- flips ----

    def flips(self, impl: str, batch: int, tokens: list[list[int]], *, top1: float = 0.5, device: str = H200, **fields: Any) -> Row:
        tokens_PT = np.array(tokens, dtype=np.int32)
        gap = np.tile(np.arange(1, tokens_PT.shape[1] + 1, dtype=np.float32) / 10, (len(tokens), 1))
        arrays = {
            "tokens": tokens_PT,
            "gap": gap,
            "top1": np.full(tokens_PT.shape, top1, np.float32),
            "ends": np.full(len(tokens), tokens_PT.shape[1], np.int32),
        }
        return self.add(
            "flips:texts", {"impl": impl, "batch": batch, "prompts": len(tokens), "new_tokens": tokens_PT.shape[1]}, arrays=arrays, device=device, **fields
        )

    def labels(self, impl: str, batch: int, margins: list[float], accuracy: float, device: str = H200) -> Row:
        return self.add(
            "flips:labels",
            {"impl": impl, "batch": batch, "sentences": len(margins)},
            arrays={"margin": np.array(margins, np.float32)},
            metrics={"accuracy": accuracy},
            device=device,
        )

    # ---- time ----

    def contest(self, m: int, n: int, times_us: Mapping[str, float], *, device: str = H200, k: int = 4096, error: float = 1e-8, **fields: Any) -> Row:
        """One process: `times_us` of each variant; fma reads weights at half of the copy's bandwidth. Errors and calls without graphs too."""
        metrics = {f"{v}_us": t for v, t in times_us.items()} | {
            f"log_ratio_{v}": math.log(t / times_us["fma"]) for v, t in times_us.items() if v != "fma"
        }
        metrics |= {"log_bandwidth_share": math.log(0.5), "error_fma": error, "error_sgemm": 2 * error} | {
            f"{v}_eager_us": 2 * t for v, t in times_us.items()
        }
        return self.add(
            "contests:linear",
            {"rows": m, "n": n, "k": k, "variants": [*times_us, "copy"]},
            metrics=metrics,
            device=device,
            label=f"time M={m} {n}x{k}",
            **fields,
        )

    def serving(self, ms: Mapping[str, float], *, device: str = H200, replicate: int = 0, batches: tuple[int, ...] = (1, 8), only: Mapping[str, tuple[int, ...]] | None = None, **fields: Any) -> Row:
        """One process of the 7B-shaped decoder: a decode step takes `ms`, a prefill a hundred times that for 512 tokens, four hundred for 2048.

        only: variant -> the batches at which it was decoded; by default all.
        """
        shapes = [("decode", b, 1024, 1) for b in batches] + [("prefill", 1, t, t / 5.12) for t in (512, 2048)]
        phases = [
            {
                "phase": p,
                "batch": b,
                "tokens": t,
                "ms": {v: x * scale for v, x in ms.items()},
                "log_ratio": {v: math.log(x / ms["fma"]) for v, x in ms.items() if v != "fma" and (p != "decode" or b in (only or {}).get(v, (b,)))},
                "log_control": 0.0,
            }
            for p, b, t, scale in shapes
        ]
        return self.add(
            "end_to_end:serving",
            {"batches": [1, 8], "context": 1024, "prompts": [512, 2048], "variants": list(ms)},
            records={"phases": phases},
            device=device,
            replicate=replicate,
            **fields,
        )

    def everything(self) -> View:
        """One of each question."""
        for family in ("fma", "integer", "integer-b9"):
            self.oracle(family)
        for impl in ("fma", "integer", "layercast", "sgemm", "bf16"):
            for rows in (1, 64):
                self.operators(impl, CPU, rows)
        for impl in ("fma", "integer", "integer-b9", "layercast", "sgemm", "tf32", "bf16", "batch-invariant"):
            for rows in ROWS:
                self.operators(impl, H200, rows, wrong=2 if impl == "sgemm" else int(impl in ("bf16", "tf32") and rows < 64))
        self.operators("fma", H200, 1, kernel={"kind": "decode", "rows": 2, "x_ahead": True})
        self.operators("integer", H200, 64, kernel={"kind": "integer_prefill", "tma": False})
        for family in ("fma", "integer"):
            self.texts(family, CPU, batch=8), self.texts(family, CPU, batch=4, sampled=True)
            for schedule in (
                {"batch": 1, "graph": True},
                {"batch": 64, "graph": True},
                {"batch": 16, "chunk": 16},
                {"batch": 8, "pad_to": 128},
                {"batch": 64, "cache": False},
                {"batch": 7, "sampled": True},
                {"batch": 8, "ranks": 2},
            ):
                self.texts(family, H200, **schedule)
        self.verify(CPU), self.verify(H200, [kernel_record("a" * 64), kernel_record("b" * 64)])
        self.counted("stress", {"sms": 8}), self.counted("foreign", {"architecture": 80}), self.counted("engines", {"products": "b6"})
        self.training(CPU), self.training(H200)
        for target in ("sm_80", "sm_90", "gfx942"):
            self.counted("audit", {"target": target}, audit_cases(target), device=CPU)
        self.flip_study()
        self.timings()
        return self.view()

    def flip_study(self) -> None:
        texts = [[5, 6, 7, 8]] * 24
        for impl in ("bf16", "sgemm", "layercast", "fma", "tf32", "batch-invariant", "integer"):
            exact = impl in ("fma", "integer", "batch-invariant")
            for batch in (1, 8, 64):
                changed = 0 if exact else {1: 0, 8: 3, 64: 9}[batch]
                self.flips(impl, batch, [[5, 9, 9, 9]] * changed + texts[changed:], top1=0.5 if exact else 0.5 + batch / 1e4)
        for impl in ("bf16", "sgemm", "layercast", "fma"):
            for batch in (4, 16, 64):
                self.labels(
                    impl,
                    batch,
                    [1.0, -1.0, 0.001 - (0.002 if impl == "bf16" and batch == 64 else 0.0)],
                    2 / 3 if impl != "bf16" or batch < 64 else 1 / 3,
                )

    def timings(self) -> None:
        decode = {"fma": 10.0, "integer": 11.0, "layercast": 60.0, "sgemm": 20.0, "bf16": 9.0, "bf16_padded": 9.5}
        prefill = {"fma": 3000.0, "integer": 900.0, "integer-b9": 1300.0, "layercast": 2800.0, "sgemm": 2700.0, "bf16": 200.0}
        for replicate in range(5):
            jitter = 1 + replicate / 1000
            for n in (4096, 14336):
                for m in (1, 2, 8, 64):
                    self.contest(m, n, {v: t * (1 + m / 64) * (jitter if v == "fma" else 1) for v, t in decode.items()}, replicate=replicate)
            for m in (512, 4096):
                self.contest(m, 4096, {v: t * m / 4096 * (jitter if v == "fma" else 1) for v, t in prefill.items()}, replicate=replicate)
            self.contest(1, 14336, {"fma": 30.0 * jitter, "layercast_compiled": 33.0, "bf16_compiled": 29.0}, replicate=replicate)
            self.serving({"fma": 4.0 * jitter, "integer": 4.2, "layercast": 20.0, "sgemm": 7.5, "bf16": 3.8}, replicate=replicate)
        traffic = [
            {"variant": v, "read": 1e8, "written": 1e4, "per_weight": b + 0.01, "kernels": 1}
            for v, b in (("fma", 2), ("layercast", 10), ("sgemm", 4))
        ]
        self.add(
            "traffic:weight_bytes",
            {"rows": 1, "n": 14336, "k": 4096, "variants": ["fma", "layercast", "sgemm"]},
            records={"traffic": traffic},
            metrics={"bytes_fma": 2.01},
            device=H200,
        )


def kernel_record(sha256: str) -> dict:
    """What a GPU's verify records of one executed binary, as far as the report reads it."""
    return {"target": ["cuda", 90, 32], "kernel": "kernels.exact.decode:decode_kernel", "cubin_sha256": sha256, "triton": "3.6.0"}


def audit_cases(target: str, **change: Any) -> list[dict]:
    proved = {
        "kernel": "decode",
        "equal": True,
        "problems": [],
        "order": "opcodes only" if target.startswith("gfx") else "proved",
        "spill_bytes": 0,
        "shared_bytes": 1024,
        "registers": 64,
        "sha256": "a" * 64,
    }
    skipped = {"kernel": "integer dp4a", "equal": True, "skipped": "not built for this target", "problems": []}
    return [proved | change, {**proved, "kernel": "rmsnorm", "order": "opcodes only", "sha256": "c" * 64}, skipped]
