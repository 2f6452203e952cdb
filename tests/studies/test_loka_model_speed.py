"""Claims about the timing of models and of their products, on a CPU with small models: plans, checks, records. No time is asserted."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kernels.fp8 import autograd
from kernels.fp8.quantise import quantise_ref
from kernels.fp8.recipes import RECIPES
from studies.loka.learning.training import mods_named
from studies.loka.measures import contests, model_speed, site_times
from studies.loka.measures.contest_inputs import bell_rows, snr_db
from studies.loka.measures.model_speed import dense_step, mods_latency, single
from studies.loka.measures.replay import Replayed, replayed_variant, shared_pool
from studies.loka.measures.site_times import backends_of, built, distinct, fastest, predicted
from studies.loka.site import Plan, Site
from studies.loka.sites.apply import apply
from studies.loka.sites.epilogues import edges
from studies.loka.sites.frozen import frozen
from studies.loka.sites.fuse import why_not_fused
from studies.loka.sites.registry import trace
from studies.models.recommenders.mods import BlockNorm, Mlp, Mods, build
from suite.measure import Context, Pause
from suite.timing import WrongOutput, contest

QUICK = {"rounds": 1, "launches": 1, "warmup_s": 0.0}
ALL_MODS = "nobias+blocknorm+hardswish"
RECIPES_BY_PASS = {"forward": ["rowwise-fast", "blockwise"], "dgrad": ["rowwise-p2"], "wgrad": ["rowwise-p2"]}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(contests, "unsupported", lambda recipe, size, device, *, backend: "no batch" if size.batch > 1 and backend == "torch" else "")
    monkeypatch.setattr(contests, "rotations_needed", lambda moved, device: 2)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)


def lines(site: Site, which: str, us: dict[tuple[str, str], float], noise: float = 0.05) -> list[dict]:
    """Times of one product by (recipe, backend); bf16's is us["bf16", ""]."""
    where = {"batch": site.batch, "m": site.m, "n": site.n, "k": site.k, "which": which}
    log = lambda t: float(torch.tensor(us["bf16", ""] / t).log())  # noqa: E731
    return [where | {"recipe": r, "backend": b, "us": t, "log_speedup": log(t), "log_speedup_low": log(t) - (noise if b else 0.0)} for (r, b), t in us.items()]


# ---------------------------------------------------------------- products of a model


def test_every_product_of_a_model_is_timed_once_and_a_pause_goes_on(on_cpu, tmp_path) -> None:
    ask = {"model": "wukong", "size": "small", "mods": ALL_MODS, "batch": 6, "recipes": {"forward": ["rowwise-fast"], "wgrad": ["rowwise-p2"]}, "backends": ["triton", "torch"], **QUICK}
    with pytest.raises(Pause):
        site_times.site_times(Context(device="cpu", state_dir=tmp_path, deadline=time.monotonic() - 1), **ask)
    calls, real = [], site_times._timed

    def until_the_third(ctx, site, which, *rest):
        calls.append((which, site.batch, site.m, site.n, site.k))
        if len(calls) == 3:
            raise Pause
        return real(ctx, site, which, *rest)

    site_times._timed, ctx = until_the_third, Context(device="cpu", state_dir=tmp_path)
    try:
        with pytest.raises(Pause):
            site_times.site_times(ctx, **ask)
        result = site_times.site_times(ctx, **ask)
    finally:
        site_times._timed = real
    module, example = built("wukong", "small", ALL_MODS, 6, "cpu", 0)
    sites = trace(module, *example).sites
    want = [(which, s.batch, s.m, s.n, s.k) for s, which in distinct(sites)]
    assert calls == want[:3] + want[2:] and len(set(want)) == len(want)  # the third was asked for twice, what was timed is not timed again
    assert set(want) == {(which, s.batch, s.m, s.n, s.k) for s in sites for which in s.passes}
    timed = {(x["which"], x["batch"], x["m"], x["n"], x["k"], x["recipe"], x["backend"]) for x in result.records["times"]}
    assert len(timed) == len(result.records["times"]) and {t[:5] for t in timed} == set(want)
    serving = result.records["serving"]
    assert {_["which"] for _ in serving} == {"forward"} and {x["work"] for x in serving if x["batch"] == 1} == {"bf16", "frozen"}
    assert {x["work"] for x in serving if x["batch"] > 1} == {"bf16", "whole"}  # two activations: nothing is frozen
    assert {t[:5] for t in timed if t[0] == "forward"} == {(x["which"], x["batch"], x["m"], x["n"], x["k"]) for x in serving}
    assert any(u["why"] == "no batch" for u in result.records["unsupported"])
    assert not any(s.trains_x for s in sites if s.name.startswith("dense.0"))  # dense features have no gradient


def test_the_fastest_plan_takes_what_is_above_the_noise_and_leaves_heads_alone() -> None:
    a, b, head = (Site(name=n, op="linear", batch=1, m=64, n=32, k=k, head=n == "head", trains_x=False) for n, k in (("a", 16), ("b", 48), ("head", 80)))
    fast, slow, noisy = {("bf16", ""): 10.0, ("rowwise", "triton"): 8.0, ("rowwise", "torch"): 6.0, ("blockwise", "triton"): 7.0}, {("bf16", ""): 10.0, ("rowwise", "torch"): 11.0}, {("bf16", ""): 10.0, ("rowwise", "torch"): 9.8}
    times = lines(a, "forward", fast) + lines(a, "wgrad", noisy) + lines(b, "forward", slow) + lines(b, "wgrad", fast) + lines(head, "forward", fast) + lines(head, "wgrad", fast)
    plan, chosen = fastest([a, b, head], times)
    assert plan.recipes == {"a": {"forward": "rowwise"}, "b": {"wgrad": "rowwise"}}
    assert chosen == {("rowwise", 1, 64, 32, 16): "torch", ("rowwise", 1, 32, 48, 64): "torch"}
    assert fastest([a, b, head], times, passes=("wgrad",))[0].recipes == {"b": {"wgrad": "rowwise"}}
    assert fastest([a, b, head], times, keep=("a",))[0].recipes == {"b": {"wgrad": "rowwise"}}
    every = backends_of([a, b, head], times)
    assert every["blockwise", 1, 64, 32, 16] == "triton" and every["rowwise", 1, 64, 32, 16] == "torch" and len(every) == 2 * 2 + 2 * 2 + 2
    with pytest.raises(ValueError, match="every product is timed"):
        fastest([a, b, head], times[:-4])


def test_amdahls_cap_counts_the_products_share_and_their_speed() -> None:
    a, b = (Site(name=n, op="linear", batch=1, m=64, n=32, k=k, trains_x=False) for n, k in (("a", 16), ("b", 48)))
    times = lines(a, "forward", {("bf16", ""): 30.0, ("rowwise", "torch"): 10.0}) + lines(b, "forward", {("bf16", ""): 10.0, ("rowwise", "torch"): 9.0})
    times += lines(a, "wgrad", {("bf16", ""): 10.0}) + lines(b, "wgrad", {("bf16", ""): 10.0})
    plan, _ = fastest([a], times)
    found = predicted([a, b], times, plan, step_us=120.0)
    assert found["product_share"] == pytest.approx(0.5) and found["product_speedup"] == pytest.approx(60 / 40)
    assert found["amdahl_cap"] == pytest.approx(1 / (0.5 + 0.5 / 1.5))
    assert predicted([a, b], times, plan, step_us=80.0, passes=("forward",))["product_speedup"] == pytest.approx(40 / 20)


# ---------------------------------------------------------------- inference with weights in FP8


@pytest.mark.parametrize("recipe", ["rowwise-fast", "tensorwise", "blockwise"])
@pytest.mark.parametrize("model", ["wukong", "rankmixer"])
def test_a_frozen_model_gives_the_planned_models_logits_and_quantises_no_weight(model: str, recipe: str, monkeypatch) -> None:
    module, example = built(model, "small", ALL_MODS, 6, "cpu", 1)
    registry = trace(module, *example)
    plan = Plan(recipes={s.name: {"forward": recipe} for s in registry.sites if not s.head})
    able = tuple(s for s in plan.recipes if not why_not_fused(registry, s, plan.recipe(s, "forward")))
    plan = replace(plan, fused=able)
    assert bool(able) == (model == "wukong" and recipe != "tensorwise")
    with torch.no_grad():
        want, serving = apply(module, plan, *example)(*example), frozen(module, plan, *example)
        counted = []
        monkeypatch.setattr(autograd, "quantise_ref", lambda x, *args, **options: counted.append(x) or quantise_ref(x, *args, **options))
        assert torch.equal(serving(*example), want)
    twice = sum(registry.site(s).op == "bmm" for s in plan.recipes)  # both operands are activations
    assert len(counted) == len(plan.recipes) + twice - len(able)
    assert serving.state_dict().keys() == module.state_dict().keys()


NARROW = {  # what stands between layers: the joined pairs that it allows
    "nobias+blocknorm+hardswish": {"3:linear": "0:linear", "6:linear": "3:linear"},
    "blocknorm": {"3:linear": "0:linear", "6:linear": "3:linear"},  # biases, SiLU
    "": {},  # LayerNorm needs a whole row, which a tile has not
}


@pytest.mark.parametrize("mods", NARROW)
def test_products_are_joined_where_a_tile_holds_the_norms_blocks_and_stay_within_fp8s_error(mods: str) -> None:
    model = build(lambda: Mlp((512, 1024, 512, 512), mods_named(mods, Mods()), head=True), seed=1, device="cpu").bfloat16()
    x = bell_rows(40, 512, 1, "cpu")
    registry = trace(model, x)
    plan = Plan(recipes={s.name: {"forward": "blockwise"} for s in registry.sites if not s.head})
    assert {name: edge.producer for name, edge in edges(registry, plan).items()} == NARROW[mods]
    by_rows = replace(plan, recipes={s: {"forward": "rowwise"} for s in plan.recipes})
    assert not edges(registry, by_rows) and not edges(registry, replace(plan, recipes={"6:linear": {"forward": "blockwise"}}))
    with torch.no_grad():
        want, plain, joined = model(x).double(), frozen(model, plan, x)(x), frozen(model, plan, x, epilogues=True)(x)
    assert torch.equal(plain, joined) == (not NARROW[mods])
    assert abs(snr_db(joined, want) - snr_db(plain, want)) < 2.0  # 40 logits: their noise is known to 20 log10(1 + 1 / sqrt(40)) = 1.3 dB, twice


def test_a_product_that_is_read_twice_is_not_joined() -> None:
    class Pair(nn.Module):
        def __init__(self, block: int, residual: bool) -> None:
            super().__init__()
            self.a, self.b, self.norm, self.residual = nn.Linear(1024, 1024), nn.Linear(1024, 1024), BlockNorm(1024, block), residual

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            z = self.b(nn.functional.hardswish(self.norm(y)))
            return y + z if self.residual else z

    plan = Plan(recipes={"a:linear": {"forward": "blockwise"}, "b:linear": {"forward": "blockwise"}})
    joined = lambda block, residual: list(edges(trace(Pair(block, residual), bell_rows(4, 1024, 1, "cpu").float()), plan))  # noqa: E731
    assert joined(256, False) == ["b:linear"] and joined(256, True) == []
    assert joined(512, False) == []  # a tile is 256 features wide


# ---------------------------------------------------------------- a step


def asked(**changes) -> dict:
    return {"model": "wukong", "size": "small", "mods": ALL_MODS, "batch": 16, "training": True, "variants": ["bf16", "single rowwise", "single rowwise fused", "dispatch", "torchao"], **QUICK, **changes}


@pytest.fixture
def times(tmp_path):
    """A folder with times of every product: FP8 twice as fast forward and for wgrad, slower for dgrad."""
    module, example = built("wukong", "small", ALL_MODS, 16, "cpu", 0)
    half, more = {("bf16", ""): 2.0, ("rowwise", "torch"): 1.0}, {("bf16", ""): 2.0, ("rowwise", "torch"): 3.0}
    record = [x for s, which in distinct(trace(module, *example).sites) for x in lines(s, which, more if which == "dgrad" else half)]
    (tmp_path / "times.json").write_text(json.dumps(record))
    rows = [x | {"recipe": "bf16" if x["recipe"] == "bf16" else "rowwise-fast"} for x in record if x["which"] == "forward"]
    (tmp_path / "serving.json").write_text(json.dumps(rows))
    return tmp_path


def test_a_training_step_of_every_variant_is_checked_against_bf16(on_cpu, times, monkeypatch) -> None:
    monkeypatch.setattr(model_speed, "torchao_absent", lambda: "torchao is not installed here")
    result = dense_step(Context(device="cpu", inputs={"times": times}), **asked())
    found = {x["variant"]: x for x in result.records["variants"]}
    assert list(found) == ["bf16", "single rowwise", "single rowwise fused", "dispatch"]
    assert result.records["unsupported"] == [{"variant": "torchao", "why": "torchao is not installed here"}]
    assert found["bf16"]["gradient_cosine"] == pytest.approx(1.0, abs=1e-6) and found["bf16"]["relative_loss"] == 0.0
    for name in list(found)[1:]:
        assert 0.8 < found[name]["gradient_cosine"] < 1 - 1e-6 and found[name]["fp8_products"] > 0  # FP8 leaves its trace in every one
    assert found["single rowwise fused"]["fused_sites"] > 0 == found["single rowwise"]["fused_sites"]
    plan = result.records["plans"]["dispatch"]["recipes"]
    assert plan and all("dgrad" not in p for p in plan.values()) and "head" not in " ".join(plan)
    assert {"log_speedup_single", "log_speedup_dispatch", "log_dispatch_over_single", "amdahl_cap", "noise_floor", "step_us"} <= set(result.metrics)
    assert result.metrics["log_dispatch_over_single"] == pytest.approx(found["dispatch"]["log_speedup"] - max(found[v]["log_speedup"] for v in found if v.startswith("single")))
    assert "log_speedup_torchao" not in result.metrics


def test_inference_runs_the_forward_products_of_a_plan_only(on_cpu, times) -> None:
    result = dense_step(Context(device="cpu", inputs={"times": times}), **asked(training=False, variants=["bf16", "single rowwise", "dispatch fused", "single blockwise epilogues"]))
    assert result.records["variants"][3]["joined_sites"] == 0 < result.records["variants"][3]["fused_sites"]  # its blocks are below 256 features
    assert {r for p in result.records["plans"]["dispatch fused"]["recipes"].values() for r in p.values()} == {"rowwise-fast"}  # of the table for serving
    assert all(set(p) == {"forward"} for v in ("single rowwise", "dispatch fused") for p in result.records["plans"][v]["recipes"].values())
    assert "gradient_cosine" not in result.records["variants"][1] and result.records["variants"][2]["fused_sites"] > 0


def test_whole_steps_are_sums_of_the_dense_part_and_a_rest_that_changes_nothing(on_cpu, monkeypatch) -> None:
    seen = []
    real = model_speed.rest_of
    monkeypatch.setattr(model_speed, "rest_of", lambda module, *args, **options: seen.append([p.detach().clone() for p in module.parameters()]) or seen.append(module) or real(module, *args, **options))
    result = dense_step(Context(device="cpu"), **asked(variants=["bf16", "single rowwise"], table_rows=30))
    before, module = seen
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    bf16, one, rest = (result.metrics["step_us"], next(x["us"] for x in result.records["variants"] if x["variant"] == "single rowwise"), result.metrics["rest_us"])
    assert result.metrics["log_speedup_step_single"] == pytest.approx(float(torch.tensor((bf16 + rest) / (one + rest)).log()), rel=1e-4, abs=1e-6)
    assert [x["variant"] for x in result.records["variants"]] == ["bf16", "single rowwise"]


def test_a_planners_plan_is_the_one_that_runs(on_cpu, tmp_path) -> None:
    recipes = {"interaction.0.lcb:linear": {"wgrad": "tensorwise"}, "over.0:linear": {"forward": "rowwise"}}
    (tmp_path / "plans.json").write_text(json.dumps({"loka": {"recipes": recipes, "made_by": "a test"}}))
    ctx = Context(device="cpu", inputs={"planners": tmp_path})
    result = dense_step(ctx, **asked(variants=["planner loka"]))
    assert result.records["plans"]["planner loka"] == {"recipes": recipes, "fused": [], "made_by": "a test"}
    assert result.records["variants"][1]["fp8_products"] == 2 and "amdahl_cap" not in result.metrics
    serving = dense_step(ctx, **asked(variants=["planner loka"], training=False))
    assert serving.records["plans"]["planner loka"]["recipes"] == {"over.0:linear": {"forward": "rowwise"}}
    with pytest.raises(ValueError, match="which has \\['loka'\\], got 'ours'"):
        dense_step(ctx, **asked(variants=["planner ours"]))


@pytest.mark.parametrize("training, message", [(True, "has a cosine of"), (False, "logits are")])
def test_a_step_that_is_wrong_ends_the_contest(training: bool, message: str, on_cpu, monkeypatch) -> None:
    real = autograd.multiply_ref
    wrong = lambda a, b, how, **options: real(a, b, how, **options) * (-1 if how.name == "rowwise-p2" or not training else 1)  # noqa: E731
    monkeypatch.setattr(autograd, "multiply_ref", wrong)
    with pytest.raises(WrongOutput, match=message):
        dense_step(Context(device="cpu"), **asked(training=training, variants=["bf16", "single rowwise"]))


def test_a_replay_that_writes_nothing_or_not_all_is_found() -> None:
    whole, part = torch.ones(4), torch.ones(4)
    for writes in (lambda: [whole], lambda: [torch.ones(4), part]):
        made = replayed_variant("stale", Replayed(writes, "cpu", shared_pool("cpu")), lambda y: None, touched=16)
        with pytest.raises(WrongOutput, match="were not written whole"):
            contest([made], device="cpu", rounds=1, launches_per_round=1, warmup_s=0.0, mode="eager")


def test_every_single_recipe_covers_every_site_but_heads() -> None:
    module, example = built("dlrm_v2", "small", "", 4, "cpu", 0)
    registry = trace(module, *example)
    for recipe in RECIPES:
        plan = single(registry, recipe)
        assert set(plan.recipes) == {s.name for s in registry.sites if not s.head} and any(s.head for s in registry.sites)
        assert all(plan.recipe(s, w) == RECIPES[recipe].of(w) for s in plan.recipes for w in plan.recipes[s])
    assert "dgrad" not in single(registry, "rowwise").recipes["bottom.0:linear"]


@pytest.mark.parametrize("name, message", [("dispatch", "needs the input cell"), ("single nonsense", "a layer's recipe is one of"), ("fastest", "a variant is"), ("single blockwise epilogues", "keeps nothing for a backward"), ("single rowwise twice", "a variant is")])
def test_names_that_are_no_variants(name: str, message: str, on_cpu) -> None:
    with pytest.raises(ValueError, match=message):
        dense_step(Context(device="cpu"), **asked(variants=["bf16", name]))


def test_torchao_gets_every_linear_that_16_divides_and_a_model_of_its_own(monkeypatch) -> None:
    """A stand-in with torchao.float8's one function that is used: layers that the filter lets through are replaced."""

    def convert_to_float8_training(model, *, module_filter_fn):
        for path, m in list(model.named_modules()):
            if isinstance(m, nn.Linear) and module_filter_fn(m, path):
                model.set_submodule(path, nn.Identity())
        return model

    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchao.float8", SimpleNamespace(convert_to_float8_training=convert_to_float8_training))
    model = nn.Sequential(nn.Linear(13, 32), nn.Linear(32, 48), nn.Linear(48, 1))
    assert [type(m) for m in model_speed.converted(model)] == [nn.Linear, nn.Identity, nn.Linear] and isinstance(model[1], nn.Linear)


# ---------------------------------------------------------------- Mods


@pytest.mark.parametrize("training", [True, False])
def test_all_eight_combinations_of_mods_are_timed_in_one_contest(training: bool, on_cpu) -> None:
    result = mods_latency(Context(device="cpu"), size="small", batch=8, training=training, **QUICK)
    assert [x["mods"] for x in result.records["mods"]] == ["", "hardswish", "blocknorm", "blocknorm+hardswish", "nobias", "nobias+hardswish", "nobias+blocknorm", ALL_MODS]
    assert result.metrics["log_speedup_mods"] == result.records["mods"][-1]["log_speedup"] and result.records["mods"][0]["log_speedup"] == 0.0
    assert all(x["output_db"] > 200 for x in result.records["mods"])  # not compiled here: a layer is itself
