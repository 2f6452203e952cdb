"""Claims: the bench's floors count every tensor once, its small cases are right by every path, and tuning writes the fastest choices as a table that is read back.

Without a GPU: times are given, launches are collected and not made.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from kernels.exact.audit.specimen import captured
from kernels.lora import _tune, bench, schedules
from kernels.lora._bench_cases import COPY_TBPS, OURS, PEAK_TFLOPS, ROTATE_BYTES, Case, cases
from kernels.lora.schedules import PASSES, PRODUCTS, Schedule, candidates, key

SMALL = dict(d=1024, rows=32, slots=4, rank=16)


def test_floors_are_the_bytes_of_every_tensor_once_and_the_flops_of_every_product() -> None:
    o = bench.empty(Case(way="backward", **SMALL))
    size = lambda *tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    forward, backward = (Case(way=way, **SMALL) for way in ("forward", "backward"))
    assert forward.moved_bytes == size(o.x_MK, o.y_MN, o.y_MN, o.a_TK, o.b_TN, o.s_MR, o.s_MR)
    grads = size(o.a_grad_TK, o.a_grad_TK, o.b_grad_TN, o.b_grad_TN)
    assert backward.moved_bytes == size(o.x_MK, o.y_MN, o.dx_MK, o.dx_MK, o.a_TK, o.b_TN, o.s_MR, o.s_MR, o.s_MR) + grads
    assert forward.flops == 2 * 2 * 128 * 16 * 1024 and backward.flops == 2 * forward.flops
    assert forward.floor_us() == max(forward.moved_bytes / COPY_TBPS, forward.flops / PEAK_TFLOPS) / 1e6


def test_operands_rotate_through_more_than_three_l2s_even_for_one_product() -> None:
    case = Case(way="backward", **SMALL)
    o = bench.empty(case)
    assert case.least_bytes == (o.y_MN.numel() + o.b_TN.numel()) * 2
    for c in cases(**bench.SPACES, slots=32):
        for each in (c.moved_bytes, c.least_bytes):
            assert max(2, min(16, ROTATE_BYTES // each + 1)) * each >= 3 * 60e6 or each < ROTATE_BYTES / 16, c.name


def test_a_row_of_the_table_is_flat_and_its_cap_is_the_loop_over_the_floor() -> None:
    case = Case(way="forward", **SMALL)
    row = bench.row_of(case, OURS, 10.0, {OURS: 10.0, "looped": 80.0}, 4.0)
    assert all(isinstance(v, str | int | float) for v in row.values())
    assert row["speedup_over_looped"] == 8.0 and row["byte_cap"] == pytest.approx(80.0 / case.floor_us(4.0)) and row["share_of_floor"] * row["byte_cap"] == pytest.approx(8.0)


def test_a_dry_run_checks_small_cases_and_lists_the_floors_of_every_case(capsys: pytest.CaptureFixture) -> None:
    assert bench.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * (3 * 4 + 4) and lines[0].startswith("forward d=2048 T=32 n=32 r=64")
    assert len({c.name for c in cases(**bench.SPACES, slots=32)}) == len(lines)


def test_a_wrong_product_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(way="backward", d=64, rows=5, slots=3, rank=8)
    assert case.problem("looped", "cpu") == ""
    right = Case.run
    monkeypatch.setattr(Case, "run", lambda self, path, o: (right(self, path, o), o.a_grad_TK.mul_(1.01))[0])
    assert case.problem("looped", "cpu").startswith("dA has 40.0 dB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="times are taken where there is a GPU")
def test_times_need_a_gpu(capsys: pytest.CaptureFixture) -> None:
    assert bench.main([]) == 2 and "need a CUDA device" in capsys.readouterr().err


def test_tuning_leaves_a_copy_and_times_in_a_process_that_reads_the_new_table(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    began: list = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "TUNED", tmp_path / "tuned.py")
    monkeypatch.setattr(bench, "tune", lambda wanted, path: path.write_text(f"{len(wanted)} cases"))
    monkeypatch.setattr(bench.subprocess, "run", lambda command, check: began.append(command) or SimpleNamespace(returncode=3))
    assert bench.main(["--tune", "--ds", "2048", "--tokens", "32,64", "--tuned", str(tmp_path / "copy.py"), "--json", "table.json"]) == 3
    assert (tmp_path / "copy.py").read_text() == f"{2 * (2 + 4)} cases"
    assert "--tune" not in began[0] and began[0][began[0].index("--tokens") + 1] == "32,64" and began[0][-2:] == ["--json", "table.json"]


def test_every_candidate_makes_its_launches() -> None:
    o, shape = bench.empty(Case(way="backward", **SMALL)), SMALL
    for product in PRODUCTS:
        for s in candidates(product, **shape):
            made = captured(product, _tune.call_of(product, o, (s,)), family="elementwise")
            assert len(made) == 1 + (s.split > 1) and made[0].kwargs["num_warps"] == s.warps
    for name, (first, second) in PASSES.items():
        one, two = schedules.rule(first, **shape), Schedule(16, 64, 16, schedules.rule(first, **shape).warps)
        assert len(captured(name, _tune.call_of(name, o, (one, two)), family="elementwise")) == 1 + (one.split > 1)
        assert len(captured(name, _tune.call_of(name, o, (), (one, two)), family="elementwise")) == 2 + (one.split > 1), second


def test_tuning_keeps_the_fastest_and_its_table_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Given times: 8 warps beat 4, larger tiles smaller ones; a pass loses against two launches at dy, and wins at x."""

    def ranked(name: str, sets: list, choices: list, singles: tuple = ()) -> list:
        def us(s: tuple[Schedule, ...]) -> float:
            if name in PASSES:
                return (5.0 if name == "dy" else 50.0) if not s else 10.0 + s[1].block_d / 1000
            return 100.0 / s[0].warps / (s[0].block_m * s[0].block_d)

        return sorted(((us(s), s) for s in choices), key=lambda found: found[0])

    monkeypatch.setattr(_tune, "ranked", ranked)
    monkeypatch.setattr(_tune, "compiled", lambda jobs: None)
    monkeypatch.setattr(_tune, "overlap_pays", lambda wanted: True)
    monkeypatch.setattr(_tune, "rotated", lambda shape: [])
    path = tmp_path / "tuned.py"
    _tune.tune([Case(way="forward", **SMALL), Case(way="backward", **SMALL)], path)
    found: dict = {}
    exec(path.read_text(), found)
    assert found["PDL"] is True and found["__doc__"].startswith("Schedules measured on an H200")
    table = found["TUNED"]
    assert set(table) == {key(n, **SMALL) for n in (*PRODUCTS, *PASSES)}
    for product in PRODUCTS:
        best = min(candidates(product, **SMALL), key=lambda s: 100.0 / s.warps / (s.block_m * s.block_d))
        assert Schedule(*table[key(product, **SMALL)]) == best
    assert table[key("dy", **SMALL)] == () and len(table[key("x", **SMALL)]) == 12
    monkeypatch.setattr(schedules, "TUNED", table)
    schedules.pass_schedule.cache_clear()
    wide, outer = schedules.pass_schedule("x", **SMALL)
    assert wide.warps == outer.warps == 8 and not math.isnan(outer.block_d)
    schedules.pass_schedule.cache_clear()
