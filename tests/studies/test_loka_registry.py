"""The registry: no product of a model is missed, each has its sizes, its weight and its neighbours, and what cannot be traced is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from studies.loka.sites.apply import replacement, rewrite
from studies.loka.sites.products import multiply
from studies.loka.sites.registry import trace
from studies.models.recommenders import LOKA_MODS, MODELS, PUBLISHED, Mods

BATCH = 3
# A product that is written in another order, or transposed, sums the same at most 8 terms in another order: 8 x 2^-24 relative to a sum of absolute
# values, which for normal numbers is a few times the result.
REORDERED = dict(rtol=1e-5, atol=1e-5)


def draw(*shape: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


class Model(nn.Module):
    """`forward(self, *inputs)` is the function given; parameters by name."""

    def __init__(self, function, **parameters) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


# ---- nothing is missed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mods", ["published", LOKA_MODS, Mods(norm="rmsnorm", placement="pre")], ids=["published", "loka", "pre-rmsnorm"])
@pytest.mark.parametrize("name", MODELS)
def test_the_sites_of_a_recommender_have_all_of_its_flops(name, mods):
    model = MODELS[name](PUBLISHED[name] if mods == "published" else mods, "small", seed=1)
    registry = trace(model, *model.example(BATCH, seed=0))
    assert sum(s.gemm("forward").flops for s in registry.sites) == BATCH * model.flops_per_example
    assert len({s.name for s in registry.sites}) == len(registry.sites) and not registry.unsupported
    assert [s.name for s in registry.sites if s.head] == [registry.sites[-1].name]


@pytest.mark.parametrize(
    ("name", "there"),
    [("wukong", {"interaction.0.fmb:bmm", "interaction.0.fmb.y:linear", "interaction.0.residual:linear"}), ("dlrm_v2", {"cross.0.v:linear", "cross.1.w:linear"})],
)
def test_products_outside_of_nn_linear_are_sites(name, there):
    model = MODELS[name](size="small")
    assert there <= {s.name for s in trace(model, *model.example(1, seed=0)).sites}


def test_names_stay_with_another_batch_and_after_another_trace():
    model = MODELS["hstu"](size="small")
    names = [[s.name for s in trace(model, *model.example(batch, seed=0)).sites] for batch in (1, 1, 5)]
    assert names[0] == names[1] == names[2] and names[0][1:3] == ["layers.0:bmm", "layers.0:bmm#2"]


def test_a_module_that_is_called_twice_has_two_sites():
    model = Model(lambda self, x: self.layer(F.relu(self.layer(x))), layer=nn.Linear(4, 4))
    assert [s.name for s in trace(model, draw(2, 4)).sites] == ["layer:linear", "layer:linear#2"]


# ---- one form ----------------------------------------------------------------------------------------------------------------------
# call, shapes of inputs, of parameters -> op, batch, M, N, K
FORMS = {
    "F.linear": (lambda s, x: F.linear(x, s.w, s.b), [(2, 3, 8)], {"w": (5, 8), "b": (5,)}, ("linear", 1, 6, 5, 8)),
    "F.linear by names": (lambda s, x: F.linear(input=x, weight=s.w), [(6, 8)], {"w": (5, 8)}, ("linear", 1, 6, 5, 8)),
    "a weight from the input": (lambda s, x, y: F.linear(x, y), [(6, 8), (5, 8)], {}, ("bmm", 1, 6, 5, 8)),
    "x @ w": (lambda s, x: x @ s.w, [(2, 3, 8)], {"w": (8, 5)}, ("linear", 1, 6, 5, 8)),
    "x @ w.T": (lambda s, x: torch.mm(x, s.w.T), [(6, 8)], {"w": (5, 8)}, ("linear", 1, 6, 5, 8)),
    "x.matmul of a part of w": (lambda s, x: x.matmul(s.w[1]), [(6, 8)], {"w": (2, 8, 5)}, ("linear", 1, 6, 5, 8)),
    "a weight made of two": (lambda s, x: F.linear(x, torch.cat((s.v, s.w * 2.0))), [(6, 8)], {"v": (2, 8), "w": (3, 8)}, ("linear", 1, 6, 5, 8)),
    "w @ x": (lambda s, x: s.w @ x, [(2, 8, 3)], {"w": (5, 8)}, ("linear", 1, 6, 5, 8)),
    "weight norm": (lambda s, x: s.w(x), [(6, 8)], {"w": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))}, ("linear", 1, 6, 5, 8)),
    "w by token @ x": (lambda s, x: torch.matmul(x, s.w.transpose(1, 2)), [(4, 6, 8)], {"w": (4, 5, 8)}, ("linear", 4, 6, 5, 8)),
    "addmm": (lambda s, x: torch.addmm(s.b, x, s.w), [(6, 8)], {"b": (5,), "w": (8, 5)}, ("linear", 1, 6, 5, 8)),
    "addmm of a matrix": (lambda s, x: torch.addmm(s.b, x, s.w), [(6, 8)], {"b": (6, 5), "w": (8, 5)}, ("linear", 1, 6, 5, 8)),
    "x @ y": (lambda s, x, y: x @ y, [(6, 8), (8, 5)], {}, ("bmm", 1, 6, 5, 8)),
    "bmm": (lambda s, x, y: torch.bmm(x, y.transpose(1, 2)), [(4, 6, 8), (4, 5, 8)], {}, ("bmm", 4, 6, 5, 8)),
    "matmul, broadcast": (lambda s, x, y: x @ y, [(2, 1, 6, 8), (3, 8, 5)], {}, ("bmm", 6, 6, 5, 8)),
    "einsum of a layer": (lambda s, x: torch.einsum("bmk, nk -> bmn", x, s.w), [(2, 3, 8)], {"w": (5, 8)}, ("linear", 1, 6, 5, 8)),
    "einsum, heads": (lambda s, x: torch.einsum("bmk,hdk->bhmd", x, s.w), [(2, 3, 8)], {"w": (2, 5, 8)}, ("linear", 1, 6, 10, 8)),
    "einsum, weight first": (lambda s, x: torch.einsum("nk,mk->mn", s.w, x), [(6, 8)], {"w": (5, 8)}, ("linear", 1, 6, 5, 8)),
    "einsum of two inputs": (lambda s, x, y: torch.einsum("bnd,bdk->bkn", x, y), [(4, 6, 8), (4, 8, 5)], {}, ("bmm", 4, 6, 5, 8)),
    "einsum, two summed": (lambda s, x, y: torch.einsum("bmij,bnji->bmn", x, y), [(4, 6, 2, 4), (4, 5, 4, 2)], {}, ("bmm", 4, 6, 5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_product_however_written_has_its_sizes_and_goes_through_one_function(form):
    call, inputs, parameters, expected = FORMS[form]
    model = Model(call, **{name: shape() if callable(shape) else draw(*shape, seed=i + 9) for i, (name, shape) in enumerate(parameters.items())})
    example = [draw(*shape, seed=i) for i, shape in enumerate(inputs)]
    registry = trace(model, *example)
    (site,) = registry.sites
    assert not registry.unsupported
    assert (site.op, site.batch, site.m, site.n, site.k) == expected
    seen = []

    def doubled(x, w, bias):
        seen.append((x.shape[-1], w.shape[-2:]))
        return 2 * multiply(x, w, bias)

    found = rewrite(registry, [replacement(registry, site.name, doubled)])(*example)
    bias = model.b if form == "addmm of a matrix" else 0.0  # added behind the product
    torch.testing.assert_close(found, 2 * (model(*example) - bias) + bias, **REORDERED)
    assert seen == [(8, (site.n, 8))]


# call -> what is no site, and why
NO_SITES = {
    "three operands": (lambda s, x: torch.einsum("ij,jk,kl->il", x, s.w, s.w), ":einsum", "two operands"),
    "an ellipsis": (lambda s, x: torch.einsum("...j,jk->...k", x, s.w), ":einsum", "names all axes"),
    "an outer product": (lambda s, x: torch.einsum("ij,kl->ijkl", x, s.w), ":einsum", "contracts nothing"),
    "a sum of one operand": (lambda s, x: torch.einsum("ij,kl->il", x, s.w), ":einsum", "sums 'j' of one operand"),
    "a diagonal": (lambda s, x: torch.einsum("ii,ij->ij", x, s.w), ":einsum", "diagonal"),
    "a broadcast axis": (lambda s, x: torch.einsum("ij,jk->ik", x[:, :1], s.w), ":einsum", "broadcasts an axis of 1"),
    "a vector": (lambda s, x: x @ s.w[0], ":matmul", "vector"),
    "integers": (lambda s, x: (x.long() @ s.w.long()).float(), ":matmul", "floating-point"),
    "addmm with alpha": (lambda s, x: torch.addmm(x, x, s.w, alpha=2.0), ":addmm", "alpha"),
    "attention in one kernel": (lambda s, x: F.scaled_dot_product_attention(x[None], x[None], x[None]), ":scaled_dot_product_attention", "one kernel"),
}


@pytest.mark.parametrize("case", NO_SITES)
def test_a_product_that_is_no_site_is_named_with_the_reason(case):
    call, name, reason = NO_SITES[case]
    registry = trace(Model(call, w=draw(4, 4)), draw(4, 4, seed=1))
    assert registry.sites == () and list(registry.unsupported) == [name] and reason in registry.unsupported[name]


# ---- neighbours --------------------------------------------------------------------------------------------------------------------


def rms(x, w=None):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return y if w is None else w * y


CHAINS = {
    "layernorm, silu": (lambda s, x: s.layer(F.silu(F.layer_norm(x, (8,)))), ("layernorm", "silu"), ()),
    "rmsnorm": (lambda s, x: s.layer(F.rms_norm(x, (8,), s.norm)), ("rmsnorm",), ()),
    "rmsnorm written out": (lambda s, x: s.layer(rms(x, s.norm)), ("rmsnorm",), ()),
    "rmsnorm written out without weight, hardswish written out": (lambda s, x: s.layer((lambda z: z * F.relu6(z + 3) / 6)(rms(x))), ("rmsnorm", "hardswish"), ()),
    "hardswish, its gate divided": (lambda s, x: s.layer(x * (F.relu6(x + 3) / 6)), ("hardswish",), ()),
    "silu written out": (lambda s, x: s.layer(x * torch.sigmoid(x)), ("silu",), ()),
    "blocknorm": (lambda s, x: s.layer(F.rms_norm(x.reshape(-1, 4), (4,)).reshape(x.shape)), ("blocknorm",), ()),
    "blocks over rows": (lambda s, x: s.layer(F.rms_norm(x.reshape(-1, 16), (16,)).reshape(x.shape)), (), ()),
    "silu by name": (lambda s, x: s.layer(F.silu(input=x)), ("silu",), ()),
    "not quite hardswish": (lambda s, x: s.layer(x * F.relu6(x + 2) / 6), (), ()),
    "not quite rmsnorm": (lambda s, x: s.layer(x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)), (), ()),
    "rmsnorm with a weight by row": (lambda s, x: s.layer(s.column * rms(x)), (), ()),
    "a shift in place": (lambda s, x: (lambda z: s.layer(z * F.relu6(z.add_(3)) / 6))(x * 1.0), (), ()),
    "other products": (lambda s, x: s.layer(torch.mul(x, other=x) / torch.div(x, 6, rounding_mode="floor")), (), ()),
    "a norm over two axes": (lambda s, x: s.layer(F.layer_norm(x, (6, 8))), (), ()),
    "an activation in front of a norm": (lambda s, x: s.layer(F.layer_norm(F.silu(x), (8,))), ("layernorm",), ()),
    "two readers": (lambda s, x: (lambda z: s.layer(z) + z)(F.silu(x)), (), ()),
    "two readers of the norm": (lambda s, x: (lambda z: s.layer(F.silu(z)) + z)(F.layer_norm(x, (8,))), ("silu",), ()),
    "norm and activation behind": (lambda s, x: F.hardswish(F.rms_norm(s.layer(x).reshape(-1, 4), (4,)).reshape(x.shape)) * 1.5, (), ("blocknorm", "hardswish")),
    "written out behind": (lambda s, x: (lambda z: z * torch.sigmoid(z))(rms(s.layer(x))), (), ("rmsnorm", "silu")),
    "relu behind, read twice": (lambda s, x: (lambda z: F.relu(z) + z)(s.layer(x)), (), ()),
    "an activation of the input alone": (lambda s, x: F.relu(s.layer(x)) + F.relu(x), (), ("relu",)),
    "transposed in between": (lambda s, x: s.layer.weight @ F.layer_norm(x, (8,)).mT, (), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAINS)
def test_norms_and_activations_around_a_product_are_recognised_where_it_alone_reads_them(case):
    call, producer, consumer = CHAINS[case]
    (site,) = trace(Model(call, layer=nn.Linear(8, 8, bias=False), norm=torch.ones(8), column=torch.ones(6, 1)), draw(6, 8)).sites
    assert (site.producer, site.consumer) == (producer, consumer)


HEADS = {
    "the logit": (lambda s, x: s.b(F.relu(s.a(x))).flatten(), ["b:linear"]),
    "its probability": (lambda s, x: torch.sigmoid(s.b(F.relu(s.a(x))).squeeze(-1)), ["b:linear"]),
    "a sum of two": (lambda s, x: s.b(F.relu(s.a(x))) + s.c(x) * 0.5, ["b:linear", "c:linear"]),
    "an activation is no head": (lambda s, x: F.relu(s.b(s.a(x))), []),
    "two outputs": (lambda s, x: {"logit": s.c(x), "hidden": s.a(x)}, ["a:linear", "c:linear"]),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_reach_the_output_through_elementwise_operators(case):
    call, heads = HEADS[case]
    model = Model(call, a=nn.Linear(8, 4), b=nn.Linear(4, 1), c=nn.Linear(8, 1))
    assert sorted(s.name for s in trace(model, draw(6, 8)).sites if s.head) == heads


def test_a_product_whose_input_trains_nothing_has_no_dgrad():
    model = Model(lambda self, x: self.b(F.relu(self.a(x))) + self.b(self.a(x).detach()), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    trains = lambda registry: [s.trains_x for s in registry.sites]  # noqa: E731
    assert trains(trace(model, draw(6, 8))) == [False, True, False, False]
    assert trains(trace(model, draw(6, 8, grad=True))) == [True, True, True, False]
    model.a.requires_grad_(False)
    assert trains(trace(model, draw(6, 8))) == [False, False, False, False]


# ---- what cannot be traced -----------------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Decides by its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.yes(x) if x.sum() > 0 else self.no(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 8)
        self.first, self.gate, self.attend, self.last = nn.Linear(8, 8), Gate(), nn.Sequential(Attention(), nn.ReLU()), nn.Linear(8, 1)

    def forward(self, ids, x):
        h = self.gate(self.first(x) + self.bags(ids))
        return self.last(self.attend(h[None])[0])


def test_modules_that_decide_by_their_input_stay_as_they_are_and_the_rest_goes_on():
    model, example = Mixed(), (torch.arange(6).reshape(2, 3), draw(2, 8))
    registry = trace(model, *example)
    assert [s.name for s in registry.sites] == ["first:linear", "last:linear"]
    assert sorted(registry.unsupported) == ["attend.0.attention.out_proj", "gate.no", "gate.yes"]
    assert "inside gate (Gate)" in registry.unsupported["gate.no"] and "control flow" in registry.unsupported["gate.no"]
    for sign in (1.0, -1.0):  # both branches
        example = (example[0], sign * draw(2, 8))
        assert torch.equal(rewrite(registry, [])(*example), model(*example))
    assert [s.head for s in registry.sites] == [False, True] and all(s.trains_x for s in registry.sites[1:])
    with pytest.raises(ValueError, match=r"got 'gate.yes': inside gate"):
        registry.site("gate.yes")


class Shaped(nn.Module):
    """Asserts a shape, and decides by another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x):
        batch, features = x.shape
        assert features == 8 and x.dim() == 2, "features"
        h = self.inner(x)
        return self.outer(h) if h.shape[0] > 1 else -self.outer(h)


def test_a_condition_on_shapes_is_decided_by_the_example_and_checked_when_the_graph_runs():
    model = Shaped().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for batch, other in ((5, 1), (1, 5)):
        registry = trace(model, draw(batch, 8))
        traced = rewrite(registry, [])
        assert [s.name for s in registry.sites] == ["inner.2:linear", "outer:linear"] and not registry.unsupported
        assert torch.equal(traced(draw(batch, 8, seed=2)), model(draw(batch, 8, seed=2)))
        with pytest.raises(ValueError, match=f"was {batch > 1} for the example is {batch == 1} for these inputs"):
            traced(draw(other, 8))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and not model.training
    compiled = torch.compile(rewrite(trace(model, draw(5, 8)), []), backend="eager", fullgraph=True)
    assert torch.equal(compiled(draw(4, 8)), model(draw(4, 8)))


def test_a_module_that_branches_on_its_mode_is_kept_whole_and_follows_it():
    moded = Model(lambda s, x: s.layer(x * 2 if s.training else x), layer=nn.Linear(8, 8))
    model = nn.Sequential(moded, nn.Linear(8, 2))
    registry = trace(model, draw(6, 8))
    assert [s.name for s in registry.sites] == ["1:linear"] and "0.layer" in registry.unsupported
    traced = rewrite(registry, [])
    for mode in (True, False):
        assert torch.equal(traced.train(mode)(draw(6, 8)), model.train(mode)(draw(6, 8)))


def test_modules_that_multiply_inside_one_operator_are_named():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.LSTM(6, 6), Model(lambda s, y: y[0]), nn.Linear(6, 2))
    registry = trace(model, draw(2, 4, 8))
    assert [s.name for s in registry.sites] == ["3:linear"] and registry.unsupported == {
        name: f"{kind} is torch.nn's own and kept whole, its products out of sight" for name, kind in (("0", "Conv1d"), ("1", "LSTM"))
    }  # fmt: skip


def test_dropout_and_batch_norm_follow_the_mode_of_the_module_that_runs():
    def forward(self, x):
        return self.layer(self.norm(F.dropout(self.drop(x), 0.5, training=self.training)))

    model = Model(forward, layer=nn.Linear(8, 4), norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5))
    x = draw(6, 8)
    traced = rewrite(trace(model.train(), x), [])
    results = {}
    for mode in (True, False):
        for which, module in (("model", model), ("traced", traced)):
            module.train(mode)
            torch.manual_seed(5)
            results[which, mode] = module(x)
    for mode in (True, False):
        assert torch.equal(results["traced", mode], results["model", mode])
    assert not torch.equal(results["model", True], results["model", False])


def test_tracing_moves_no_statistic_no_mode_no_random_state_and_adds_no_attribute():
    model = Model(lambda s, x: s.layer(s.norm(s.drop(x))) + torch.arange(4), layer=nn.Linear(8, 4), norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5)).train()
    model.drop.eval()
    before = ({k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()], torch.get_rng_state(), set(vars(model)))
    trace(model, draw(6, 8))
    assert all(torch.equal(v, before[0][k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == before[1] and torch.equal(torch.get_rng_state(), before[2]) and set(vars(model)) == before[3]


def test_a_buffer_is_read_when_the_traced_model_runs():
    model = Model(lambda s, x: s.layer(x * (s.scale + 1.0)), layer=nn.Linear(8, 4))
    model.register_buffer("scale", torch.ones(8))
    traced, x = rewrite(trace(model, draw(6, 8)), []), draw(6, 8)
    model.scale.fill_(3.0)
    assert torch.equal(traced(x), model(x))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, mask=None, scale: float = 2.0):
        y = self.layer(x) * scale
        return y if mask is None else y * mask


def test_arguments_that_the_example_leaves_out_keep_their_defaults():
    model, x, mask = Optional(), draw(6, 8), draw(6, 4, seed=1)
    for example in ((x,), (x, mask)):
        traced = rewrite(trace(model, *example), [])
        assert torch.equal(traced(*example), model(*example))
        assert torch.equal(rewrite(trace(traced, x, mask), [])(x, mask), model(x, mask)), "tracing again reads the model's own forward"


WRONG = {
    "a compiled model": (lambda: trace(torch.compile(Optional(), backend="eager"), draw(6, 8)), "before torch.compile or torch.jit, got OptimizedModule"),
    "a scripted model": (lambda: trace(torch.jit.script(nn.Linear(8, 8)), draw(6, 8)), "got RecursiveScriptModule"),
    "a function": (lambda: trace(F.relu, draw(6, 8)), "got function"),
    "too many arguments": (lambda: trace(Optional(), *[draw(6, 8)] * 4), "takes 1 to 3 arguments"),
    "too few": (lambda: trace(Optional()), "takes 1 to 3 arguments"),
    "a number": (lambda: trace(Optional(), draw(6, 8), None, 2.0), "an example holds tensors"),
    "a root that decides": (lambda: trace(Gate(), draw(6, 8)), "forward of Gate itself cannot be traced.*submodule"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("case", WRONG)
def test_an_example_or_a_model_that_cannot_be_traced_is_refused_in_words(case):
    do, match = WRONG[case]
    with pytest.raises(ValueError, match=match):
        do()


def test_a_name_that_is_no_site_is_refused_with_those_near_it():
    model = MODELS["dlrm_v2"](size="small")
    with pytest.raises(ValueError, match=r"got 'over.1:linear'.*over.0:linear"):
        trace(model, *model.example(1, seed=0)).site("over.1:linear")
