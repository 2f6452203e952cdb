"""The LoKA study: thresholds and quantiles of the safety map, what a cell finds, real activations, and which cells a preset asks for.

Tolerances:
    PRODUCT_DB  SQNR of a whole product: 512 x 128 outputs of independent errors vary by 10 log10(1 + sqrt(2 / 65536)) = 0.02 dB; the notes' own
                figures are rounded to 0.1 dB and come from other seeds, sizes and mantissa distributions: 28.4 to 28.8
    BUDGET_DB   the defaults of budget_db are given to four digits
    FLUSHED     a normal z times 10^-u, u uniform in [0, 5], becomes 0 below 2^-10 / 448 of an amax near 4: u > 5 + log10|z|, E[-log10|z|; |z| < 1] / 5 = 0.05
    COVERAGE    of 400 simulated samples at 95%: three standard errors, sqrt(0.95 0.05 / 400) = 0.011
"""

import inspect
import math
import subprocess
import sys
from collections import Counter

import pytest
import torch

from kernels.fp8.recipes import GEMMS, gemm
from studies.loka import presets, questions
from studies.loka.data.planted import Planted
from studies.loka.declared import kept
from studies.loka.learning.training import Learner, Training
from studies.loka.measures import safety_map
from studies.loka.measures.filter import torchao_filter
from studies.loka.measures.safety_map import budget_db, operands, quantile_bounds, row_sqnr_db, safety, verdict
from studies.loka.probing import captured as real
from studies.loka.probing.distributions import DISTRIBUTIONS
from studies.loka.sites.model_sites import model_sites, traced
from studies.loka.study import STUDY
from suite.measure import Context, Result

PRODUCT_DB = 0.3
BUDGET_DB = 0.05
FLUSHED = (0.03, 0.07)
COVERAGE = 0.95 - 3 * 0.011
CPU = Context(device="cpu")
SMALL = dict(op="linear", products=1, rows=256, contracted=256)


# ---- thresholds and quantiles --------------------------------------------------------------------------------------------------


def test_the_logit_threshold_is_where_the_whole_budget_is_spent():
    assert budget_db() == pytest.approx(safety_map.HEAD_DB, abs=BUDGET_DB)
    assert budget_db(share=0.5) - budget_db() == pytest.approx(10 * math.log10(2), abs=1e-9)


def test_thresholds_stand_3_db_above_what_rounding_leaves():
    """The two floors that the thresholds are derived from, found again on a gaussian product."""
    a, b = next(operands(0, which="forward", distribution="gaussian", **{**SMALL, "rows": 512}))
    exact = (a.double() @ b.double().mT).flatten()
    for name, threshold in (("rowwise", safety_map.INNER_DB), ("rowwise-grad", safety_map.GRADIENT_DB)):
        found = safety_map.product_ref(a, b, gemm(name)).flatten()
        assert row_sqnr_db(exact, found).item() - 3.0 == pytest.approx(threshold, abs=PRODUCT_DB), name


def test_questions_hold_the_thresholds_of_the_map():
    assert (questions.INNER_DB, questions.GRADIENT_DB, questions.HEAD_DB) == (safety_map.INNER_DB, safety_map.GRADIENT_DB, safety_map.HEAD_DB)
    assert questions.FEWEST_ROWS == real.FEWEST_ROWS


def test_299_rows_are_the_fewest_with_a_lower_bound():
    x = torch.arange(298.0)
    assert quantile_bounds(x)[0] is None
    assert quantile_bounds(torch.arange(299.0))[0] == 0.0


@pytest.mark.parametrize("n", [299, 512, 1024])
def test_order_statistics_are_those_of_the_binomial_distribution(n):
    from scipy.stats import binom

    low, _, high = quantile_bounds(torch.arange(float(n)))
    lower, upper = int(low) + 1, int(high) + 1
    assert binom.sf(lower - 1, n, 0.01) >= 0.95 > binom.sf(lower, n, 0.01)
    assert binom.cdf(upper - 1, n, 0.01) >= 0.95 > binom.cdf(upper - 2, n, 0.01)


def test_the_bounds_cover_the_true_quantile():
    generator, true = torch.Generator().manual_seed(1), -math.log(0.99)
    drawn = [quantile_bounds(torch.empty(512).exponential_(generator=generator)) for _ in range(400)]
    assert sum(low <= true for low, _, _ in drawn) / 400 >= COVERAGE
    assert sum(high >= true for _, _, high in drawn) / 400 >= COVERAGE


@pytest.mark.parametrize("low, high, expected", [(25.6, 27.0, "safe"), (25.5, 27.0, "undecided"), (10.0, 25.5, "unsafe"), (None, 25.5, "unsafe"), (None, 27.0, "undecided"), (27.0, None, "safe"), (10.0, None, "undecided")])
def test_a_verdict_needs_the_whole_interval(low, high, expected):
    assert verdict(low, high, 25.6) == expected


def test_sqnr_is_by_row_and_rows_of_zeros_have_none():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    found = torch.tensor([[3.0, 4.5], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    assert row_sqnr_db(exact, found).tolist() == pytest.approx([20.0, 0.0, safety_map.MAX_DB])


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="at least one value"):
        quantile_bounds(torch.empty(0))


# ---- a cell of the map ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verdicts() -> dict:
    def of(distribution: str, which: str = "forward", threshold: float = safety_map.INNER_DB, **sizes):
        return safety(CPU, which=which, distribution=distribution, threshold_db=threshold, **{**SMALL, **sizes})

    return {
        "gaussian": of("gaussian"),
        "row-scaled": of("row-scaled"),
        "logit": of("gaussian", threshold=safety_map.HEAD_DB),
        "wgrad": of("row-scaled", "wgrad", safety_map.GRADIENT_DB),
        "bmm": of("row-scaled", op="bmm", products=8, rows=32),
    }


def by_recipe(result) -> dict[str, dict]:
    return {r["recipe"]: r for r in result.records["recipes"]}


def test_gaussian_products_are_safe_in_e4m3_and_unsafe_in_e5m2(verdicts):
    found = {name: r["verdict"] for name, r in by_recipe(verdicts["gaussian"]).items()}
    assert {found[n] for n in ("tensorwise", "rowwise", "rowwise-p2", "blockwise", "bf16")} == {"safe"}
    assert found["e5m2-tensorwise"] == "unsafe"


def test_rows_of_different_scale_break_one_scale_a_tensor_and_no_scale_a_row(verdicts):
    found = by_recipe(verdicts["row-scaled"])
    assert found["tensorwise"]["verdict"] == "unsafe" and found["tensorwise"]["p01_db"] < 10
    assert found["tensorwise"]["median_db"] > 25, "an average hides it"
    assert found["rowwise"]["verdict"] == found["blockwise"]["verdict"] == "safe"
    assert FLUSHED[0] < found["tensorwise"]["flushed"] < FLUSHED[1] and found["rowwise"]["flushed"] < 0.001


def test_no_fp8_recipe_reaches_the_logit(verdicts):
    assert verdicts["logit"].metrics["safe_recipes"] == 0.0
    assert by_recipe(verdicts["logit"])["bf16"]["verdict"] == "safe"


def test_gradients_of_weights_contract_the_examples(verdicts):
    """Small rows then add little to a sum instead of being a row of their own: tensorwise stays within a few dB."""
    assert by_recipe(verdicts["wgrad"])["tensorwise"]["p01_db"] > 20


def test_products_of_two_activations_pool_all_their_rows(verdicts):
    assert by_recipe(verdicts["bmm"])["rowwise"]["rows"] == 512
    assert by_recipe(verdicts["bmm"])["tensorwise"]["verdict"] == "unsafe"


def test_a_cell_reports_declared_finite_metrics_of_its_kind(verdicts):
    for result in verdicts.values():
        assert set(result.metrics) <= STUDY.metric_names() and all(map(math.isfinite, result.metrics.values()))
        assert result.kind == "emulated" and "hardware_db" not in result.metrics


def test_every_recipe_is_in_the_map(verdicts):
    assert set(by_recipe(verdicts["gaussian"])) == {g.name for g in GEMMS.values() if g.dtype in ("fp8", "bf16") and not g.fast_accum}


# ---- real activations ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner(Training(model="dlrm_v2", size="small", steps=2, batch=32), seed=1, device="cpu")


def test_what_a_site_saw_gives_its_products_and_gradients_again(learner):
    """x w^T, dy w and dy^T x of the captured operands are the site's output and the parameter's gradient."""
    batch = Planted(seed=1).batch(0, 64)
    for p in learner.model.parameters():
        p.grad = None
    seen = real.seen(learner, batch)
    w = learner.model.cross[0].v.weight
    a, b = seen["cross.0.v:linear"]["wgrad"]
    assert torch.equal(a @ b.mT, w.grad)
    x, same = seen["cross.0.v:linear"]["forward"]
    assert same.data_ptr() == w.data_ptr() and x.shape == (64, w.shape[1])
    dy, w_t = seen["cross.0.v:linear"]["dgrad"]
    assert dy.shape == (64, w.shape[0]) and torch.equal(w_t.mT, w)


def test_a_site_of_few_columns_gets_more_of_the_same_size():
    a, b = torch.ones(600, 8), torch.arange(24.0).reshape(3, 8)
    rows, columns = real.cut(a, b, seed=0)
    assert rows.shape == (real.ROWS, 8) and columns.shape == (safety_map.OUTPUTS, 8)
    assert torch.equal(columns[:3].float(), b) and torch.equal(columns.abs().float(), b.repeat(43, 1)[:128])
    assert not torch.equal(columns[3:6].float(), b)


def test_products_over_a_batch_are_cut_to_as_many_rows():
    a, b = torch.randn(4, 6, 100, 8), torch.randn(1, 6, 200, 8)
    rows, columns = real.cut(a, b, seed=0)
    assert rows.shape == (5, 100, 8) and columns.shape == (5, 128, 8)


# ---- declared metrics ----------------------------------------------------------------------------------------------------------


def test_what_is_not_declared_stays_in_the_bundle():
    def measure(ctx: Context, *, n: int) -> Result:
        return Result(metrics={"slope": 1.0, "rank_correlation": math.nan, "own": 2.0, "odd": math.inf}, records={"points": [n]}, kind="emulated")

    cell = kept(measure, "slope", "rank_correlation")
    found = cell(CPU, n=3)
    assert dict(found.metrics) == {"slope": 1.0} and found.kind == "emulated"
    assert found.records == {"points": [3], "more": {"rank_correlation": None, "own": 2.0, "odd": None}}
    assert "more" not in kept(lambda: Result(metrics={"slope": 1.0}), "slope")().records


def test_cells_keep_declared_metrics_only():
    from studies.loka.cells import contests as cells_contests
    from studies.loka.cells import pricing as cells_pricing
    from studies.loka.cells import probing as cells_probe
    from studies.loka.cells import real as cells_real
    from studies.loka.cells import speed as cells_speed

    for module in (cells_contests, cells_pricing, cells_probe, cells_real, cells_speed):
        for name in module.__all__:
            names = inspect.getclosurevars(getattr(module, name)).nonlocals["names"]
            assert names and set(names) <= STUDY.metric_names(), (module.__name__, name)


# ---- the study -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(STUDY.presets))
def test_presets_ask_each_question_once_of_functions_that_exist(name):
    cells = STUDY.cells(STUDY.presets[name]())
    assert max(Counter(c.point for c in cells).values()) == 1
    assert max(Counter((c.measure, c.label, c.replicate) for c in cells).values()) == 1
    for measure in {c.measure for c in cells}:
        module, _, function = measure.partition(":")
        assert callable(getattr(__import__(module, fromlist=["_"]), function))


def test_cells_pass_exactly_what_their_functions_take():
    for cell in STUDY.cells(presets.gpu()) + STUDY.cells(presets.cpu()):
        module, _, function = cell.measure.partition(":")
        wanted = inspect.signature(getattr(__import__(module, fromlist=["_"]), function)).parameters
        needed = {n for n, p in wanted.items() if n != "ctx" and p.default is p.empty}
        assert needed <= set(cell.params) <= set(wanted), cell.label


def test_only_a_gpu_preset_times_anything():
    assert all(c.needs.device == "cpu" and not c.needs.exclusive for c in STUDY.cells(presets.cpu()))
    timed = [c for c in STUDY.cells(presets.gpu()) if c.label.startswith("time ")]
    assert timed and all(c.needs.exclusive and c.needs.device == "cuda" for c in timed)


def test_sites_of_one_cut_size_share_a_cell():
    asked = questions.site_questions(presets.cpu().map)
    key = questions.asked(model_sites("dlrm_v2", "mlperf", 8192)[3], "forward", presets.cpu().map)
    assert {m for m, _, _ in asked[key]} >= {"dlrm_v2 mlperf", "wukong 5.6"}
    assert sum(map(len, asked.values())) > 5 * len(asked)


def test_the_head_is_asked_for_32_db_forward_only():
    head = next(s for s in model_sites("wukong", "5.6", 8192) if s.head)
    assert [questions.asked(head, which, presets.cpu().map)[-1] for which in ("forward", "dgrad")] == [questions.HEAD_DB, questions.GRADIENT_DB]


@pytest.mark.parametrize("model, size", [("dlrm_v2", "mlperf"), ("wukong", "5.6"), ("hstu", "dlrm-v3"), ("rankmixer", "100m")])
def test_the_table_of_sites_is_what_the_registry_traces(model, size):
    from studies.loka.sites.model_sites import _table

    assert traced(model, size) == _table()[f"{model} {size}"]


def test_torchaos_filter_converts_no_layer_of_dlrm_v2():
    """8 nn.Linear: 13-512-256-128 and 3456-1024-1024-512-256-1. 13 and 1 are no multiples of 16; the largest, 3456 -> 1024, is just too small for either rule."""
    (found,) = torchao_filter(CPU, models=[["dlrm_v2", "mlperf"]]).records["filter"]
    assert (found["products"], found["seen"], found["converted"]) == (14, 8, {"tensorwise": 0, "rowwise": 0})
    (wukong,) = torchao_filter(CPU, models=[["wukong", "5.6"]]).records["filter"]
    assert wukong["seen"] < wukong["products"] and 0.5 < wukong["flops_share"]["tensorwise"] < 1, "large MLPs pass"


def test_unknown_models_and_empty_sizes_are_refused():
    with pytest.raises(ValueError, match="a model of the table is one of"):
        model_sites("gpt", "2", 1)
    with pytest.raises(ValueError, match="sizes are positive"):
        presets.Map(rows=0)


def test_distributions_of_the_map_are_those_there_are():
    assert set(presets.SYNTHETIC) == set(DISTRIBUTIONS)


def test_the_study_is_listed_without_torch():
    code = "import sys; from studies.loka.study import STUDY; print(sorted({'torch', 'scipy', 'numpy.random'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
