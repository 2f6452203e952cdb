"""The report's times: one GPU model at a time, one value a process, floors from the measured copy, and mixes that are called derived."""

import pytest

from studies.determinism import exhibits_serving, exhibits_speed
from studies.determinism.shown import over_processes, processes
from suite.exhibit import Prose, Table
from tests.studies.determinism_rows import H200, L4, Rows
from tests.studies.test_determinism_exhibits import column, tables

EXACT_INTERVAL = 1e-12  # ratios come back through exp(log(x)): two roundings of relative 2^-53, and a mean of five


@pytest.fixture
def rows(tmp_path) -> Rows:
    return Rows(tmp_path)


# ---- time ----------------------------------------------------------------------------------------------------------------------


def test_gpu_models_are_never_pooled(rows):
    for replicate in range(2):
        (
            rows.contest(1, 4096, {"fma": 10.0, "sgemm": 20.0}, replicate=replicate),
            rows.contest(1, 4096, {"fma": 10.0, "sgemm": 40.0}, device=L4, replicate=replicate),
        )
    found = tables(exhibits_speed.decode(rows.view()))
    title = "Decode, weights 4096x4096: time of the others over fma"
    for device, ratio in ((H200, 2.0), (L4, 4.0)):
        (table,) = (t for t in found.values() if t.title == f"Decode, weights 4096x4096, {device}: time of the others over fma")
        assert column(table, "fp32 SGEMM")[0][0] == pytest.approx(ratio, rel=EXACT_INTERVAL) and {r.device for r in table.sources} == {device}
    assert title not in found


def test_a_process_that_measured_twice_counts_once(rows):
    same = {"process": "one"}
    (
        rows.contest(1, 4096, {"fma": 10.0, "sgemm": 20.0}, environment=same),
        rows.contest(1, 4096, {"fma": 10.0, "sgemm": 20.0}, environment=same, replicate=1),
    )
    assert processes(rows.made) == 1 and over_processes(rows.made, exhibits_speed.log_ratio("sgemm", "fma")) is None
    found = tables(exhibits_speed.decode(rows.view()))
    times, ratios = (found[f"Decode, weights 4096x4096: {what}"] for what in ("time", "time of the others over fma"))
    assert column(ratios, "fp32 SGEMM") == [None] and column(times, "processes") == ["-", "1"]


def test_medians_of_an_even_number_lie_between_the_middle_two(rows):
    for replicate, us in enumerate((10.0, 11.0, 13.0, 99.0)):
        rows.contest(1, 4096, {"fma": us}, replicate=replicate)
    assert column(tables(exhibits_speed.decode(rows.view()))["Decode, weights 4096x4096: time"], "fma (ours)")[1] == 12.0


def test_floors_are_bytes_over_the_measured_copy_bandwidth(rows):
    for replicate in range(2):
        rows.contest(
            1, 4096, {"fma": 10.0, "layercast": 60.0, "sgemm": 30.0, "bf16": 9.0}, replicate=replicate
        )  # fma at half of the copy's bandwidth
    table = tables(exhibits_speed.decode(rows.view()))["Decode, weights 4096x4096: time"]
    assert table.rows[0][1:5] == pytest.approx((5.0, 25.0, 10.0, 5.0)) and "10 for LayerCast" in table.note


def test_the_floors_bytes_are_those_of_the_contests():
    from studies.determinism.contests import BYTES

    assert all(BYTES[v] == n for v, n in exhibits_speed.FLOOR_BYTES.items())


def test_compiled_programs_are_contests_of_their_own(rows):
    for replicate in range(2):
        rows.contest(1, 14336, {"fma": 30.0, "layercast_compiled": 33.0, "bf16_compiled": 29.0}, replicate=replicate)
    assert isinstance(exhibits_speed.decode(rows.view())[0], Prose)
    (table,) = exhibits_speed.compiled(rows.view())
    assert column(table, "time over fma")[0][0] == pytest.approx(1.1, rel=EXACT_INTERVAL) and column(table, "program") == [
        "LayerCast, compiled",
        "bf16, compiled",
    ]


def test_prefill_gives_speed_and_error_beside_sgemms(rows):
    for replicate in range(2):
        rows.contest(4096, 4096, {"fma": 3000.0, "integer": 900.0, "sgemm": 2700.0}, replicate=replicate)
    (table,) = exhibits_speed.prefill(rows.view())
    lines = {r[1]: r for r in table.rows}
    assert lines["integer b6 (ours)"][4][0] == pytest.approx(3.0, rel=EXACT_INTERVAL) and lines["fma (ours)"][4][0] == pytest.approx(
        0.9, rel=EXACT_INTERVAL
    )
    assert lines["fp32 SGEMM"][3] == pytest.approx(2 * 4096**3 / 2700e-6 / 1e12) and [
        lines[n][5] for n in ("fma (ours)", "fp32 SGEMM", "integer b6 (ours)")
    ] == [1e-8, 2e-8, None]


def test_no_error_is_told_of_inputs_whose_sums_are_exact(rows):
    for replicate in range(2):
        rows.contest(4096, 4096, {"fma": 3000.0, "sgemm": 2700.0}, replicate=replicate, error=0.0)
    (table,) = exhibits_speed.prefill(rows.view())
    assert column(table, "mean error") == [exhibits_speed.EXACT_SUMS] * 2


def test_times_of_older_code_are_left_out_where_todays_are_there(rows):
    for replicate in range(2):
        rows.contest(1, 4096, {"fma": 10.0, "sgemm": 90.0}, replicate=replicate, stale=True), rows.contest(1, 4096, {"fma": 10.0, "sgemm": 20.0}, replicate=replicate)
        rows.contest(1, 14336, {"fma": 10.0, "sgemm": 30.0}, replicate=replicate, stale=True)
    found = tables(exhibits_speed.decode(rows.view()))
    today, old = (found[f"Decode, weights {n}x4096: time of the others over fma"] for n in (4096, 14336))
    assert column(today, "fp32 SGEMM")[0][0] == pytest.approx(2.0, rel=EXACT_INTERVAL) and column(found["Decode, weights 4096x4096: time"], "processes") == ["-", "2"]
    assert not any(r.stale for r in today.sources) and all(r.stale for r in old.sources) and column(old, "fp32 SGEMM")[0][0] == pytest.approx(3.0, rel=EXACT_INTERVAL)


def test_a_compiled_bf16_program_in_a_plain_contest_is_one_of_its_columns(rows):
    for replicate in range(2):
        rows.contest(1, 4096, {"fma": 10.0, "bf16": 12.0, "bf16_compiled": 11.0}, replicate=replicate)
    table = tables(exhibits_speed.decode(rows.view()))["Decode, weights 4096x4096: time of the others over fma"]
    assert column(table, "bf16, compiled")[0][0] == pytest.approx(1.1, rel=EXACT_INTERVAL)


def test_the_note_says_for_which_family_each_claim_is_judged(rows):
    rows.timings()
    found = tables([*exhibits_speed.decode(rows.view()), *exhibits_serving.serving(rows.view())])
    layer, decoder = (found[t].note for t in ("Decode, weights 4096x4096: time of the others over fma", "A 7B-shaped decoder: decode, ratios"))
    assert "decode_vs_layercast for fma" in layer and "exactness_cost for fma" in decoder and all("a model runs in one family" in note for note in (layer, decoder))


def test_bytes_a_weight_are_the_profilers(rows):
    rows.timings()
    (table,) = exhibits_speed.bytes_moved(rows.view())
    assert column(table, "bytes a weight") == [2.01, 10.01, 4.01] and column(table, "floor") == [2, 10, 4]


# ---- the 7B-shaped decoder -----------------------------------------------------------------------------------------------------


def serving(rows: Rows, n: int = 2) -> dict[str, Table]:
    for replicate in range(n):
        rows.serving({"fma": 4.0, "integer": 5.0, "layercast": 20.0, "sgemm": 8.0, "bf16": 3.2}, replicate=replicate)
    return tables(exhibits_serving.serving(rows.view()))


def test_the_decoders_ratios_and_cost_are_per_family(rows):
    table = serving(rows)["A 7B-shaped decoder: decode, ratios"]
    fma, integer = table.rows[0], table.rows[1]
    assert (
        fma[3][0] == pytest.approx(5.0, rel=EXACT_INTERVAL)
        and fma[4][0] == pytest.approx(2.0, rel=EXACT_INTERVAL)
        and fma[5][0] == pytest.approx(25.0)
    )
    assert integer[3][0] == pytest.approx(4.0, rel=EXACT_INTERVAL) and integer[5][0] == pytest.approx(56.25)


def test_a_mix_is_the_prefill_plus_its_steps_and_is_called_derived(rows):
    table = serving(rows)["A 7B-shaped decoder: mixes (derived)"]
    first = table.rows[0]  # prompt 512, output 64: fma 400 ms + 64 * 4 ms
    assert first[:3] == (512, 64, pytest.approx(0.656)) and first[7][0] == pytest.approx((2000 + 64 * 20) / 656) and table.note.startswith("Derived")


def test_phases_of_older_code_are_left_out_where_todays_are_there(rows):
    for replicate in range(2):
        rows.serving({"fma": 4.0, "layercast": 99.0}, replicate=replicate, stale=True)
    found = serving(rows)
    assert [t for t in found.values() if any(r.stale for r in t.sources)] == [] and len(found) == 5
    assert found["A 7B-shaped decoder: decode, ratios"].rows[0][3][0] == pytest.approx(5.0, rel=EXACT_INTERVAL)
    assert column(found["A 7B-shaped decoder: decode"], "processes") == [2, 2]


def test_one_process_gives_times_and_no_interval(rows):
    found = serving(rows, n=1)
    assert (
        column(found["A 7B-shaped decoder: decode"], "fma (ours)") == [4.0, 4.0]
        and column(found["A 7B-shaped decoder: decode, ratios"], "faster than LayerCast") == [None] * 4
    )
