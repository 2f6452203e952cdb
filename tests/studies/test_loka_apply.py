"""Apply: each planned product runs in its recipe, bit for bit as by hand; all else, and every parameter, stays what it was."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels.fp8.autograd import linear, matmul
from kernels.fp8.norm_backward import norm_backward_ref
from kernels.fp8.norm_quantise import norm_quantise_ref
from kernels.fp8.recipes import RECIPES, gemm
from studies.loka.site import Plan, read_plan, write_plan
from studies.loka.sites.apply import apply, recipe_of
from studies.loka.sites.fuse import norm_gradient, why_not_fused
from studies.loka.sites.registry import trace
from studies.models.recommenders import LOKA_MODS, MODELS, PUBLISHED, Mods
from studies.models.recommenders.mods import Mlp, build

# What is compared: EXACT, the same operations. Else:
# FLIPPED: a fused site rounds y = activation(norm(x)) to float32 from float64, an unfused one computes it in float32 with an error of a few 2^-24 of y. An FP8
#   number changes only where y scaled lies that near to a rounding boundary: about one in 2^(24 - 4) numbers, then by 2^-3 of itself. Among the
#   2048 numbers here at most a few, so the relative error of the whole is below 2^-3 sqrt(4 / 2048) = 0.0055 (44 dB); FP8 itself costs 31 dB.
# GRADIENT: the same formulas in float64 in another order: a few hundred roundings of 2^-53 relative to sums of absolute values, then one to float32.
FLIPPED = 0.0055
GRADIENT = dict(rtol=2.0**-22, atol=1e-6)


class Small(nn.Module):
    """Norm, activation, a layer; a bmm; a head. A buffer that is not stored, a parameter that nobody uses, modules of no products."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.norm, self.a, self.head = nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("hidden", torch.ones(16), persistent=False)
        self.register_buffer("shown", torch.ones(16))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) * 0.3
        self.info = {"name": "small"}

    def forward(self, x_BTD):
        h = self.a(F.silu(self.norm(x_BTD)))
        mixed = torch.matmul(h, h.transpose(1, 2)) @ h
        return self.head(mixed * self.hidden * self.shown)


SITES = ("a:linear", ":bmm", ":bmm#2", "head:linear")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planned(*recipes: str, **more) -> Plan:
    """SITES in these layer recipes."""
    return Plan(recipes={site: {w: RECIPES[r].of(w).name for w in ("forward", "dgrad", "wgrad")} for site, r in zip(SITES, recipes) if r}, **more)


def gradients(model: nn.Module, *inputs: torch.Tensor, of: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Of a loss that weighs outputs unequally, and the output itself."""
    model.zero_grad()
    y = model(*inputs)
    (y.flatten() * torch.arange(1.0, y.numel() + 1)).sum().backward()
    return {"output": y.detach()} | {name: p.grad.clone() for name, p in (of or model).named_parameters() if p.grad is not None}


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


class ByHand(Small):
    """Small with its products written as calls of kernels.fp8.autograd."""

    def __init__(self, model: Small, *recipes: str) -> None:
        super().__init__()
        self.load_state_dict(model.state_dict())
        self.recipes = [RECIPES[r] for r in recipes]

    def forward(self, x_BTD):
        a, first, second, head = self.recipes
        h = linear(F.silu(self.norm(x_BTD)), self.a.weight, self.a.bias, a)
        mixed = matmul(matmul(h, h.transpose(1, 2), first), h, second)
        return linear(mixed * self.hidden * self.shown, self.head.weight, self.head.bias, head)


@pytest.mark.parametrize("recipes", [("rowwise", "blockwise", "tensorwise", "bf16"), ("planted-bad", "rowwise-hp-wgrad", "rowwise", "forward-only"), ("fp32",) * 4])
def test_each_product_runs_in_its_recipe_forward_and_backward(recipes):
    model, x = Small(), draw(4, 6, 32)
    assert_same(gradients(apply(model, planned(*recipes), x), x), gradients(ByHand(model, *recipes), x))


def test_the_plan_reaches_the_products_it_names_and_no_others():
    model, x = Small(), draw(4, 6, 32)
    backward = Plan(recipes={"a:linear": {"wgrad": "tensorwise"}})
    base, found = gradients(apply(model, Plan(recipes={"a:linear": {}}), x), x), gradients(apply(model, backward, x), x)
    assert [name for name in base if not torch.equal(base[name], found[name])] == ["a.weight"]
    assert torch.equal(apply(model, planned("", "", "", "rowwise"), x)(x), ByHand(model, *["fp32"] * 3, "rowwise")(x))


def test_the_empty_plan_gives_the_model_back_bit_for_bit_with_its_parameters_and_attributes():
    model, x = Small(), draw(4, 6, 32)
    found = apply(model, Plan(), x)
    assert_same(gradients(found, x), gradients(model, x))
    assert list(found.state_dict()) == list(model.state_dict()) and isinstance(found, Small) and found.info is model.info
    assert all(v.data_ptr() == model.state_dict()[k].data_ptr() for k, v in found.state_dict().items())
    assert [id(p) for p in found.parameters()] == [id(p) for p in model.parameters()] and set(dict(found.named_buffers())) == {"hidden", "shown"}


def test_a_step_of_an_optimizer_and_a_loaded_state_reach_both():
    model, x = Small(), draw(4, 6, 32)
    found = apply(model, planned("rowwise"), x)
    gradients(found, x)
    torch.optim.SGD(found.parameters(), lr=0.1).step()
    assert torch.equal(found.a.weight, model.a.weight) and not torch.equal(model.a.weight, Small().a.weight)
    model.load_state_dict(Small().state_dict())
    assert torch.equal(found(x), apply(Small(), planned("rowwise"), x)(x))


def test_applying_again_starts_from_the_model_as_it_was_written():
    model, x = Small(), draw(4, 6, 32)
    first, second = planned("rowwise", "rowwise", "", "tensorwise"), planned("", "blockwise", fused=())
    once = apply(model, first, x)
    for plan, expected in ((first, once), (second, apply(model, second, x)), (Plan(), model)):
        assert_same(gradients(apply(once, plan, x), x), gradients(expected, x))
    assert trace(once, x).sites == trace(model, x).sites


def test_the_model_itself_stays_as_it_is():
    model, x = Small(), draw(4, 6, 32)
    before, modules = gradients(model, x), list(model.modules())
    found = apply(model, planned(*["tensorwise"] * 4), x)
    gradients(found, x)
    found.a.register_buffer("later", x)
    assert_same(gradients(model, x), before)
    assert type(model) is Small and all(a is b for a, b in zip(model.modules(), modules, strict=True)) and "a.later" not in model.state_dict()


def test_a_deep_copy_has_parameters_of_its_own_and_the_same_recipes():
    model, x = Small(), draw(4, 6, 32)
    found = apply(model, planned("rowwise", "rowwise"), x)
    twin = copy.deepcopy(found)
    assert_same(gradients(twin, x), gradients(found, x))
    twin.a.weight.data.zero_()
    assert not torch.equal(twin(x), found(x)) and torch.equal(found(x), apply(model, planned("rowwise", "rowwise"), x)(x))


def test_other_batch_sizes_run_also_an_empty_one():
    model = Small()
    found = apply(model, planned(*["rowwise"] * 4), draw(4, 6, 32))
    hand = ByHand(model, *["rowwise"] * 4)
    for batch in (0, 1, 7):
        x = draw(batch, 6, 32, seed=batch)
        assert torch.equal(found(x), hand(x)) and found(x).shape == (batch, 6, 1)


def test_it_compiles_as_one_graph_to_the_same_bits():
    model, x = Small(), draw(4, 6, 32)
    found = apply(model, planned("rowwise", "blockwise", "tensorwise", "bf16", fused=("a:linear",)), x)
    compiled = torch.compile(found, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, x, of=found), gradients(found, x))


@pytest.mark.parametrize("mods", ["published", LOKA_MODS], ids=["published", "loka"])
@pytest.mark.parametrize("name", MODELS)
def test_recommenders_train_with_every_site_in_fp8(name, mods):
    model = MODELS[name](PUBLISHED[name] if mods == "published" else mods, "small", seed=1)
    example = model.example(4, seed=0)
    registry = trace(model, *example)
    recipes = {s.name: {w: RECIPES["rowwise"].of(w).name for w in s.passes} for s in registry.sites}
    fused = tuple(s.name for s in registry.sites if not why_not_fused(registry, s.name, gemm("rowwise-fast")))
    found = apply(model, Plan(recipes=recipes, fused=fused), *example)
    after = gradients(found, *model.example(5, seed=2))
    assert len(after) == 1 + len(list(model.parameters())) and all(g.isfinite().all() for g in after.values())
    assert after["output"].shape == (5,) and found.flops_per_example == model.flops_per_example
    assert not torch.equal(after["output"], model(*model.example(5, seed=2)))


# ---- fused sites -----------------------------------------------------------------------------------------------------------------

NORMED = {
    "layernorm, silu": Mods(),
    "rmsnorm, hardswish": Mods(norm="rmsnorm", activation="hardswish"),
    "blocknorm, hardswish": LOKA_MODS,
    "no norm, silu": Mods(norm="none"),
}


def mlp(mods: Mods) -> nn.Module:
    return build(lambda: Mlp((16, 512, 64), mods), seed=4, device="cpu")


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("case", NORMED)
def test_a_fused_site_has_the_numbers_of_norm_then_quantise(case, recipe):
    model, x = mlp(NORMED[case]), draw(4, 16)
    site = trace(model, x).sites[1].name
    recipes = {site: {w: RECIPES[recipe].of(w).name for w in ("forward", "dgrad", "wgrad")}}
    plain, fused = (gradients(apply(model, Plan(recipes=recipes, fused=f), x), x) for f in ((), (site,)))
    for name in plain:
        assert float((fused[name] - plain[name]).norm() / plain[name].norm()) < FLIPPED, name
    unquantised = gradients(model, x)
    assert float((fused["output"] - unquantised["output"]).norm() / unquantised["output"].norm()) > FLIPPED, "the site does run in FP8"


def test_a_fused_sites_norm_and_activation_are_gone_from_the_graph():
    model, x = mlp(LOKA_MODS), draw(4, 16)  # linear, norm, activation; linear, norm, activation
    site = trace(model, x).sites[1].name
    for fused, left in (((), 2), ((site,), 1)):
        source = inspect.getsource(type(apply(model, Plan(recipes={site: {"forward": "rowwise"}}, fused=fused), x)).forward)
        assert [source.count(name + "(") for name in ("rms_norm", "hardswish")] == [left, left]


class WrittenOut(nn.Module):
    """RMSNorm with a weight and HardSwish by their formulas, in front of w @ x as torch.addmm has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.w, self.bias = nn.Parameter(1 + draw(64, seed=1) / 4), nn.Parameter(draw(64, 32, seed=2) / 8), nn.Parameter(draw(32, seed=3))

    def forward(self, x):
        z = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return torch.addmm(self.bias, z * F.relu6(z + 3) / 6, self.w)


def test_producers_that_are_written_out_are_fused_too():
    model, x = WrittenOut(), draw(32, 64)
    recipes = {":linear": {w: RECIPES["rowwise"].of(w).name for w in ("forward", "dgrad", "wgrad")}}
    plain, fused = (gradients(apply(model, Plan(recipes=recipes, fused=f), x), x) for f in ((), (":linear",)))
    assert fused.keys() == {"output", "weight", "w", "bias"}
    for name in plain:
        assert float((fused[name] - plain[name]).norm() / plain[name].norm()) < FLIPPED, name


@pytest.mark.parametrize("activation", ["identity", "silu", "hardswish"])
@pytest.mark.parametrize(("norm", "weights"), [("none", ()), ("layernorm", ("w", "b")), ("layernorm", ()), ("rmsnorm", ("w",)), ("blocknorm", ())])
def test_the_gradient_by_formula_is_the_reference_differentiated(norm, weights, activation):
    x, dy = 3 * draw(6, 80), draw(6, 80, seed=1)
    w, b = (draw(80, seed=2 + i) if name in weights else None for i, name in enumerate("wb"))
    operand = gemm("rowwise").a
    _, saved = norm_quantise_ref(x, norm, activation, operand, w, b, 1e-5, 32, True)
    found = norm_gradient(dy, x, saved, norm, activation, w, b, 1e-5, 32)
    for a, e in zip(found, norm_backward_ref(dy, x, saved, norm, activation, w, b, 1e-5, 32), strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, **GRADIENT)


@pytest.mark.parametrize(("norm", "granularity", "keep"), [("layernorm", "row", True), ("blocknorm", "block", True), ("none", "row", True), ("rmsnorm", "row", False)])
def test_what_the_compiler_is_told_of_the_operators_is_what_they_give(norm, granularity, keep):
    x, w = draw(6, 80).bfloat16(), draw(80, seed=1) if norm in ("layernorm", "rmsnorm") else None
    rows = (x.T.contiguous().T, w, None, norm, "silu", 1e-5, 32, "e4m3", granularity, False, keep)
    torch.library.opcheck(torch.ops.loka.norm_quantise.default, rows, test_utils=("test_schema", "test_faketensor"))
    *_, mean, rstd = torch.ops.loka.norm_quantise(x, *rows[1:-1], True)
    torch.library.opcheck(torch.ops.loka.norm_backward.default, (x, x, w, None, mean, rstd, norm, "silu", 1e-5, 32), test_utils=("test_schema", "test_faketensor"))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = F.relu(self.a(x))
        return (self.b(h) @ F.silu(x).mT) + F.rms_norm(x.reshape(-1, 8), (8,)).reshape(x.shape) @ self.b.weight


WHY_NOT = {
    "nothing in front": ("a:linear", "rowwise", "no norm or activation"),
    "relu": ("b:linear", "rowwise", "not relu"),
    "two inputs": (":bmm", "rowwise", "a linear layer's"),
    "tensor scales": (":linear", "tensorwise", "not those of tensorwise"),
    "bf16": (":linear", "bf16", "not those of bf16"),
    "small blocks": (":linear", "rowwise", "powers of two from 16 on, not 8"),
}


@pytest.mark.parametrize("case", WHY_NOT)
def test_a_site_that_cannot_be_fused_says_why_and_is_refused(case):
    site, recipe, match = WHY_NOT[case]
    x = draw(32, 32)
    assert match in why_not_fused(trace(Two(), x), site, gemm(recipe))
    with pytest.raises(ValueError, match=f"{site} cannot be fused: .*{match}"):
        apply(Two(), Plan(recipes={site: {"forward": recipe}}, fused=(site,)), x)


# ---- plans -----------------------------------------------------------------------------------------------------------------------


def test_a_plan_from_a_file_is_the_plan(tmp_path):
    model, x = Small(), draw(4, 6, 32)
    plan = planned("rowwise", "", "tensorwise", fused=("a:linear",))
    write_plan(plan, tmp_path / "plan.json")
    assert torch.equal(apply(model, read_plan(tmp_path / "plan.json"), x)(x), apply(model, plan, x)(x))


def test_a_plan_of_another_model_is_refused_with_the_names_near_by():
    with pytest.raises(ValueError, match=r"got 'b:linear'.*a:linear"):
        apply(Small(), Plan(recipes={"b:linear": {"forward": "rowwise"}}), draw(4, 6, 32))


def test_a_sites_recipe_is_named_by_its_products():
    recipe = recipe_of(Plan(recipes={"a:linear": {"forward": "rowwise", "wgrad": "tensorwise"}}), "a:linear")
    assert recipe.name == "rowwise/bf16/tensorwise" and recipe.dgrad == gemm("bf16")
