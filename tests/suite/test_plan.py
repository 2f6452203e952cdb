"""States of a plan: what is done, blocked, unavailable, and in which order cells come."""

from dataclasses import replace
from pathlib import Path

import pytest

from suite.bundle import BundleStore, Draft
from suite.cell import Cell, Needs
from suite.machine import Gpu, Machine
from suite.measure import Result
from suite.plan import Options, make_plan, ordered

CPU = Machine(cpu_model="a cpu", cores=2, memory_gib=8.0, torch="2.13.0", triton="3.6.0")
H200 = Machine(cpu_model="a cpu", cores=2, memory_gib=8.0, torch="2.11.0", triton="3.6.0", driver="580", gpus=(Gpu(index=0, name="NVIDIA H200", memory_gib=139.0),))


def cell(n: int, **fields) -> Cell:
    return Cell(**{"study": "toy", "measure": "tests.toy.cells:answer", "params": {"n": n}, "label": f"answer {n}", **fields})


def plan(cells, *, bundles=(), machine=CPU, options=Options(), torch="2.13.0"):
    return make_plan("toy", "smoke", cells, bundles=bundles, machine=machine, versions=lambda device: {"torch": torch}, asset_sha256=lambda name: "0" * 64, options=options)


def write(store: BundleStore, entry, status="OK", started_at="2026-01-01T00:00:00+00:00"):
    return store.write(Draft(cell=entry.describe(), point=entry.cell.point, key=entry.key, code=entry.code, environment={}, commit="c", dirty=False,
                             started_at=started_at, duration_s=1.0, status=status, error="" if status == "OK" else "it broke"), Result())


def states(p) -> dict[str, str]:
    return {e.cell.label: e.state for e in p.entries}


def test_inputs_come_before_the_cells_that_read_them_and_once():
    a, b = cell(1), cell(2)
    total = cell(3, inputs={"x": b, "y": a})
    assert [c.label for c in ordered([total, a, b])] == ["answer 2", "answer 1", "answer 3"]


def test_one_question_asked_under_two_conditions_is_refused():
    with pytest.raises(ValueError, match="same question"):
        ordered([cell(1), cell(1, needs=Needs(exclusive=True))])


@pytest.mark.parametrize("status, options, state", [("OK", Options(), "DONE"), ("OK", Options(rerun=True), "TO RUN"), ("FAILED", Options(), "TO RUN"), ("FAILED", Options(keep_failed=True), "FAILED"),
                                                    ("TIMED OUT", Options(keep_failed=True), "FAILED"), ("PAUSED", Options(), "TO RUN")])
def test_only_ok_counts_as_done(tmp_path, status, options, state):
    bundle = write(BundleStore(tmp_path), plan([cell(1)]).entries[0], status)
    assert states(plan([cell(1)], bundles=[bundle], options=options)) == {"answer 1": state}


def test_an_answer_stands_though_a_later_attempt_failed(tmp_path):
    store, entry = BundleStore(tmp_path), plan([cell(1)]).entries[0]
    bundles = [write(store, entry), write(store, entry, "FAILED", "2026-01-02T00:00:00+00:00")]
    assert states(plan([cell(1)], bundles=bundles)) == {"answer 1": "DONE"}


def test_another_torch_or_device_is_another_key(tmp_path):
    bundle = write(BundleStore(tmp_path), plan([cell(1)]).entries[0])
    assert states(plan([cell(1)], bundles=[bundle], torch="2.14.0")) == {"answer 1": "TO RUN"}


def test_on_a_mixed_host_a_key_names_the_model_that_runs_the_cell():
    both = (Gpu(index=0, name="NVIDIA A100", memory_gib=40.0), Gpu(index=1, name="NVIDIA H200", memory_gib=139.0))
    mixed, gpu = replace(H200, gpus=both), cell(1, needs=Needs(device="cuda", gpu_model="H200"))
    alone, beside = plan([gpu], machine=H200).entries[0], plan([gpu], machine=mixed).entries[0]
    assert (beside.state, beside.device_model, beside.key) == ("TO RUN", "NVIDIA H200", alone.key)
    assert plan([cell(1, needs=Needs(device="cuda"))], machine=mixed).entries[0].device_model == "NVIDIA A100"


def test_a_gpu_cell_is_unavailable_without_one_and_so_is_what_reads_it():
    gpu = cell(1, needs=Needs(device="cuda"))
    here, there = plan([cell(2, inputs={"x": gpu})]), plan([cell(2, inputs={"x": gpu})], machine=H200)
    assert states(here) == {"answer 1": "UNAVAILABLE", "answer 2": "UNAVAILABLE"}
    assert "CUDA" in here.entries[0].reason and "answer 1" in here.entries[1].reason
    assert states(there) == {"answer 1": "TO RUN", "answer 2": "TO RUN"}


def test_what_reads_a_failed_cell_is_blocked(tmp_path):
    bundle = write(BundleStore(tmp_path), plan([cell(1)]).entries[0], "FAILED")
    blocked = plan([cell(2, inputs={"x": cell(1)})], bundles=[bundle], options=Options(keep_failed=True))
    assert states(blocked) == {"answer 1": "FAILED", "answer 2": "BLOCKED"} and "answer 1" in blocked.entries[1].reason


@pytest.mark.parametrize("only, labels", [("answer 1", ["answer 1"]), ("a=1 b=2", ["a=1 b=2"]), ("n=2", ["answer 2"]), ("answer *", ["answer 1", "answer 2"]), ("a=1 b=?", ["a=1 b=2"])])
def test_only_takes_a_label_then_a_glob_then_parameters(only, labels):
    cells = [cell(1), cell(2), cell(3, label="a=1 b=2")]
    assert [e.cell.label for e in plan(cells, options=Options(only=only)).entries] == labels


def test_the_same_question_about_other_inputs_is_another_question():
    assert cell(3, inputs={"x": cell(1)}).point != cell(3, inputs={"x": cell(2)}).point


def test_foreign_bundles_count_only_with_reuse(tmp_path):
    made = write(BundleStore(tmp_path / "there"), plan([cell(1)], torch="2.11.0").entries[0])
    adopted, new = BundleStore(tmp_path / "here").adopt(made.path, "ingested")
    assert new and states(plan([cell(1)], bundles=[adopted])) == {"answer 1": "TO RUN"}
    assert states(plan([cell(1)], bundles=[adopted], options=Options(reuse=True))) == {"answer 1": "DONE"}


def test_of_foreign_bundles_a_published_one_is_reused_before_one_that_claims_a_later_time(tmp_path):
    entry, here = plan([cell(1)], torch="2.11.0").entries[0], BundleStore(tmp_path / "here")
    late = here.adopt(write(BundleStore(tmp_path / "a"), entry, started_at="2999-01-01T00:00:00+00:00").path, "ingested")[0]
    published = here.adopt(write(BundleStore(tmp_path / "b"), entry).path, "published")[0]
    for bundles in ([late, published], [published, late]):
        assert plan([cell(1)], bundles=bundles, options=Options(reuse=True)).entries[0].bundle.id == published.id


def test_a_foreign_bundle_of_other_code_is_not_reused(tmp_path):
    entry = plan([cell(1)]).entries[0]
    store = BundleStore(tmp_path / "there")
    made = store.write(Draft(cell=entry.describe(), point=entry.cell.point, key=entry.key, code="f" * 64, environment={}, commit="c", dirty=False, started_at="", duration_s=1.0, status="OK"))
    adopted, _ = BundleStore(tmp_path / "here").adopt(made.path, "ingested")
    assert states(plan([cell(1)], bundles=[adopted], options=Options(reuse=True))) == {"answer 1": "TO RUN"}


def test_adopting_twice_adds_nothing_and_keeps_the_id(tmp_path):
    made = write(BundleStore(tmp_path / "there"), plan([cell(1)]).entries[0])
    here = BundleStore(tmp_path / "here")
    first, second = here.adopt(made.path, "ingested"), here.adopt(made.path, "ingested")
    assert (first[1], second[1]) == (True, False) and first[0].id == second[0].id == made.id
    assert len(list(Path(here.bundles_dir).glob("??/*/*"))) == 1
