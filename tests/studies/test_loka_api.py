"""The public API: light to import, its functions stay functions, and a plan takes what is safe and measured to be faster."""

import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kernels.fp8.recipes import RECIPES, gemm
from studies import loka
from studies.loka.measures.safety_map import INNER_DB
from studies.loka.probing.distributions import draw
from studies.loka.probing.predict import predict
from studies.loka.probing.readings import Readings, SiteReading
from studies.loka.probing.sketch import sketch
from studies.loka.sites.planning import PREFERRED, judged, plan, tail

ROOT = Path(__file__).parents[2]
M, K, N = 512, 256, 64


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_study_loads_no_torch():
    assert run("import sys; from studies import loka; loka.__all__; print('torch' in sys.modules)") == "False"


def test_functions_stay_functions_when_the_modules_of_their_names_were_imported():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    for module in ("sites.apply", "probing.probe"):
        importlib.import_module(f"studies.loka.{module}")
    readings = loka.probe(model, [x], rows=2)
    assert list(readings.sites) == [":linear"]
    assert torch.equal(loka.apply(model, loka.plan(readings), x)(x), loka.apply(model, loka.plan(readings), x)(x))


def test_every_public_name_is_there_and_no_other():
    assert all(getattr(loka, name).__name__.split(".")[-1] == name and callable(getattr(loka, name)) for name in loka.__all__)
    with pytest.raises(AttributeError, match="no attribute 'conquer'"):
        loka.conquer  # noqa: B018


# ---- the README --------------------------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "studies/loka/README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [text for found, text in fences if found == language]


def test_the_readmes_example_runs_and_prints_and_plans_what_it_says(capsys, tmp_path, monkeypatch):
    model, example, training = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    names: dict = {}
    exec(model + example, names)
    assert capsys.readouterr().out == blocks("")[1]
    plan = names["plan"]
    assert set(plan.recipes) == {"embed:linear", ":bmm", ":bmm#2", "over.2:linear"} and plan.fused == ("over.2:linear",)
    assert all(p.grad is not None for p in names["model"].parameters())
    assert not torch.equal(names["fast"](names["example"]), names["model"](names["example"]))
    monkeypatch.chdir(tmp_path)
    loka.write_plan(plan, "plan.json")
    names["speedups"] = {(site, which, recipe): 1.2 for site, passes in plan.recipes.items() for which, recipe in passes.items()}
    exec(training, names)
    assert names["dispatch"].running.recipes["over.2:linear"]["forward"] == plan.recipe("over.2:linear", "forward").name


# ---- plans from readings ---------------------------------------------------------------------------------------------------------


def reading(name: str, x: str = "gaussian", *, head: bool = False, m: int = M, dy: bool = True) -> SiteReading:
    site = loka.Site(name=name, op="linear", batch=1, m=m, n=N, k=K, head=head)
    operands = [draw(d, rows, columns, seed=i).bfloat16() for i, (d, rows, columns) in enumerate([(x, m, K), ("gaussian", N, K), ("gaussian", m, N)])]
    return SiteReading(site=site, x=sketch(operands[0], step=0), w=sketch(operands[1], step=0, parameter=True), dy=sketch(operands[2], step=0) if dy else None)


def readings(*found: SiteReading) -> Readings:
    return Readings(sites={r.site.name: r for r in found}, unsupported={})


@pytest.fixture(scope="module")
def three() -> Readings:
    return readings(reading("even:linear"), reading("rows:linear", "row-scaled"), reading("head:linear", head=True))


TENSOR_FIRST = {(s, "forward", r): low for s in ("even:linear", "rows:linear", "head:linear") for r, low in (("tensorwise-fast", 1.5), ("rowwise-fast", 1.3), ("bf16", 1.0))}


def test_the_fastest_safe_recipe_is_taken_and_heads_stay(three):
    found = plan(three, speedups=TENSOR_FIRST, model="three")
    assert found.recipes == {"even:linear": {"forward": "tensorwise-fast"}, "rows:linear": {"forward": "rowwise-fast"}}, "rows of unequal size are not safe with one scale"
    assert found.model == "three" and "measured" in found.made_by


def test_what_is_not_surely_faster_stays_in_bf16(three):
    slower = {key: 1.0 if key[2] == "tensorwise-fast" else 0.97 for key in TENSOR_FIRST}
    assert plan(three, speedups=slower).recipes == {} == plan(three, speedups={}).recipes


def test_times_of_sizes_become_speedups_of_sites_by_the_faster_backend(three):
    sites = [*(r.site for r in three.sites.values()), loka.Site(name="other:linear", op="linear", batch=1, m=M, n=N, k=K + 16, trains_x=False)]
    line = lambda k, which, recipe, speed: {"batch": 1, "m": M, "n": N, "k": k, "which": which, "recipe": recipe, "log_speedup_low": math.log(speed)}  # noqa: E731
    times = [line(K, "forward", "rowwise-fast", 1.1), line(K, "forward", "rowwise-fast", 1.4), line(K + 16, "dgrad", "rowwise", 1.2), line(K + 16, "wgrad", "rowwise", 0.5)]
    found = loka.speedups_from(sites, times)
    assert found == pytest.approx({(name, "forward", "rowwise-fast"): 1.4 for name in three.sites} | {("other:linear", "wgrad", "rowwise"): 0.5})
    assert set(plan(three, speedups=found).recipes) == {"even:linear", "rows:linear"}


def test_without_times_the_plan_says_what_is_safe_and_that_time_is_unknown(three):
    found = plan(three)
    assert found.recipes["even:linear"] == dict.fromkeys(("forward", "dgrad", "wgrad"), PREFERRED[0]) and "head:linear" not in found.recipes
    assert "nothing is known of time" in found.made_by


def test_dispatch_reads_what_the_plan_was_made_of(three):
    found = plan(three, speedups=TENSOR_FIRST)
    dispatch = loka.Dispatch(plan=found, rules=loka.Rules(threshold_db=INNER_DB)).after(step=1, readings=judged(found, three, TENSOR_FIRST))
    assert dispatch.running.recipes == found.recipes
    (even,) = [r for r in judged(found, three, TENSOR_FIRST) if r.site == "even:linear"]
    db = tail(predict(three.sites["even:linear"], "forward", gemm("tensorwise-fast")))
    assert (even.sqnr_low_db, even.sqnr_high_db, even.speedup_low) == (db.low, db.high, 1.5)
    assert judged(found, readings(), TENSOR_FIRST) == [] == judged(found, three, {})


@pytest.mark.parametrize("rows", [1, 5, 6, 64, 299, 512])
def test_a_tail_is_read_however_few_rows_a_product_has(rows):
    found = predict(reading("few:linear", m=rows, dy=False), "forward", RECIPES["rowwise"].forward)
    db = tail(found)
    assert db.low <= db.value <= db.high and db.n == found.rows
    share = float((found.row_db < db.value).double().mean())
    assert share <= (0.011 if rows >= 299 else 3.1 / rows if rows >= 6 else 1.0)
