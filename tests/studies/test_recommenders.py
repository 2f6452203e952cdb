"""Recommenders: the sizes that they claim, the equations that they follow, switches that change one thing each, and inputs by seed."""

import math

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from studies.models.recommenders import LOKA_MODS, MODELS, PUBLISHED, SIZES, BlockNorm, Embeddings, Mods, embeddings, power_law_ids
from studies.models.recommenders.dlrm import DLRM_SIZES, Cross, Dlrm
from studies.models.recommenders.hstu import HSTU_SIZES, Hstu
from studies.models.recommenders.mods import Product, block_of, build
from studies.models.recommenders.rankmixer import RANKMIXER_SIZES, RankMixer
from studies.models.recommenders.wukong import WUKONG_SIZES, FmBlock, Wukong, WukongConfig

# What is compared and how far it may differ.
# EXACT: fp32 against float64. A chain of a few products of at most 512 terms, each with a relative error of sqrt(512) 2^-24 = 1.3e-6, and ten times that
#   for cancellation in values of size 1.
# NAME: a model's name gives two or three digits of its FLOPs; the paper's own text leaves its inputs and top MLP open.
# SHARE: a share of 20,000 draws has a standard error below 0.5 / sqrt(20000) = 0.0035; five of them.
EXACT = 1.3e-5
NAME = 0.10
SHARE = 5 * 0.5 / 20_000**0.5

CLASSES = {"dlrm_v2": (Dlrm, DLRM_SIZES), "wukong": (Wukong, WUKONG_SIZES), "hstu": (Hstu, HSTU_SIZES), "rankmixer": (RankMixer, RANKMIXER_SIZES)}
EVERY_SIZE = [(name, size) for name in MODELS for size in SIZES[name]]
VARIANTS = (  # each switch of Mods away from the published models at least once, and LoKA's three together
    LOKA_MODS, Mods(bias=False), Mods(norm="rmsnorm", placement="pre"), Mods(norm="blocknorm", placement="pre"), Mods(norm="none"),
    Mods(activation="hardswish"), Mods(placement="pre"), Mods(placement="post"),
)  # fmt: skip


def on_meta(name: str, size: str) -> nn.Module:
    kind, sizes = CLASSES[name]
    with torch.device("meta"):
        return kind(sizes[size], PUBLISHED[name])


@pytest.mark.parametrize(("name", "size"), EVERY_SIZE)
def test_flops_from_the_structure_are_those_of_a_counted_forward_pass(name, size):
    model = on_meta(name, size)
    shapes = [x.shape for x in MODELS[name](size="small").example(2, seed=0)]
    config = model.config
    wide = (2, config.tokens, config.dim) if name == "hstu" else (2, config.fields, getattr(config, "field_dim", config.dim))
    inputs = [torch.empty(wide if len(shape) == 3 else (2, config.tokens if name == "hstu" else shape[1]), device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counted:
        model(*inputs)
    assert counted.get_total_flops() == 2 * model.flops_per_example


@pytest.mark.parametrize("size", ["0.53", "1.25", "5.6"])
def test_wukong_has_the_gflops_of_its_name_forward_and_backward(size):
    assert abs(3 * on_meta("wukong", size).flops_per_example / 1e9 / float(size) - 1) < NAME


def test_rankmixer_100m_has_100_million_parameters():
    assert abs(sum(p.numel() for p in on_meta("rankmixer", "100m").parameters()) / 1e8 - 1) < NAME


def test_dlrm_has_mlperfs_layers_and_its_cross_network_is_no_linear_module():
    model = on_meta("dlrm_v2", "mlperf")
    linears = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert linears == [(13, 512), (512, 256), (256, 128), (3456, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert [tuple(m.weight.shape) for m in model.modules() if isinstance(m, Product)] == [(512, 3456), (3456, 512)] * 3
    assert not any(isinstance(m, (nn.LayerNorm, nn.RMSNorm, BlockNorm)) for m in model.modules())


def test_hstu_has_dlrm_v3s_products():
    model = on_meta("hstu", "dlrm-v3")
    assert [tuple(m.weight.shape) for m in model.modules() if isinstance(m, Product)] == [(2048, 512), (512, 1536)] * 5


# ---- the equations ---------------------------------------------------------------------------------------------------------------


def test_cross_layer_is_dcnv2s():
    cross = build(lambda: Cross(48, 8, Mods()), seed=1, device="cpu")
    x0, x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        cross.w.bias.fill_(0.25)
        expected = x0 * (x @ cross.v.weight.double().T @ cross.w.weight.double().T + 0.25) + x
        torch.testing.assert_close(cross(x0.float(), x.float()).double(), expected, rtol=EXACT, atol=EXACT)


def test_factorization_machine_is_x_xt_y_through_norm_and_mlp():
    config = WukongConfig(layers=1, made=4, k=6, hidden=(32,), dim=16)
    block = build(lambda: FmBlock(10, config, Mods(norm="rmsnorm", activation="hardswish")), seed=1, device="cpu")
    x_BND = torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        found = block(x_BND.float()).double()
        fm = (x_BND @ x_BND.transpose(1, 2) @ block.y.weight.double().T).flatten(1)
        rms = lambda z: z / (z.square().mean(1, keepdim=True) + 1e-5).sqrt()  # noqa: E731
        h = rms(fm)
        for linear in (m for m in block.mlp if isinstance(m, nn.Linear)):
            z = rms(h @ linear.weight.double().T)
            h = z * (z + 3).clamp(0, 6) / 6
    torch.testing.assert_close(found, h.reshape(3, 4, 16), rtol=EXACT, atol=EXACT)


def test_blocknorm_divides_each_block_by_its_root_mean_square():
    x = torch.randn(7, 768, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 2, 7)[:, None]
    blocks = x.double().view(7, 3, 256)
    expected = (blocks / (blocks.square().mean(2, keepdim=True) + 1e-5).sqrt()).view(7, 768)
    norm = BlockNorm(768)
    torch.testing.assert_close(norm(x).double(), expected, rtol=EXACT, atol=EXACT)
    other = x.clone()
    other[:, 256:] *= 100.0
    assert torch.equal(norm(other)[:, :256], norm(x)[:, :256]) and not list(norm.parameters())


def test_blocks_are_the_smallest_divisors_from_256_on():
    assert [block_of(w) for w in (13, 255, 256, 384, 512, 1536, 18432)] == [13, 255, 256, 384, 256, 256, 256]
    with pytest.raises(ValueError, match="blocks divide the features"):
        BlockNorm(384, block=256)


def test_hstu_sees_neither_padding_nor_the_future():
    model = MODELS["hstu"](size="small", seed=1)
    x_BTD, valid_BT = model.example(4, seed=2)
    assert valid_BT[:, -1].all() and not valid_BT.all()
    noise = torch.randn(x_BTD.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(model(x_BTD + noise * (1 - valid_BT)[..., None], valid_BT), model(x_BTD, valid_BT), rtol=EXACT, atol=EXACT)
        mask, later = model.mask(valid_BT), x_BTD.clone()
        later[:, 9:] += noise[:, 9:]
        first, second = model.layers[0](x_BTD, mask), model.layers[0](later, mask)
    torch.testing.assert_close(first[:, :9], second[:, :9], rtol=EXACT, atol=EXACT)
    assert not torch.allclose(first[:, 9:], second[:, 9:], rtol=EXACT, atol=EXACT)


def test_hstu_layer_is_gated_attention_without_softmax():
    model = MODELS["hstu"](size="small", seed=1)
    layer, c = model.layers[0], model.config
    x_BTD, valid_BT = model.example(2, seed=2)
    with torch.no_grad():
        found = layer(x_BTD, model.mask(valid_BT)).double()
        w, out = layer.uvqk.weight.double(), layer.out.weight.double()
        silu = lambda z: z * torch.sigmoid(z)  # noqa: E731
        x, valid = x_BTD.double(), valid_BT.double()
        z = nn.functional.layer_norm(x, (c.dim,), eps=1e-5)
        u, v, q, k = silu(z @ w.T).split(c.inner, dim=2)
        heads = []
        for h in range(c.heads):
            part = slice(h * c.head_dim, (h + 1) * c.head_dim)
            score = silu(q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(c.head_dim)) / c.tokens
            heads.append((score.tril() * valid[:, None]) @ v[..., part])
        o = torch.cat(heads, 2)
        expected = x + torch.cat((u, o, u * nn.functional.layer_norm(o, (c.inner,), eps=1e-5)), 2) @ out.T
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=10 * EXACT)  # a norm of a small output divides by it


def test_rankmixer_gives_every_token_its_part_of_all_and_a_network_of_its_own():
    model = MODELS["rankmixer"](size="small", seed=1)
    block, c = model.blocks[0], model.config
    x_BTD = torch.arange(2 * c.tokens * c.dim, dtype=torch.float32).view(2, c.tokens, c.dim)
    mixed, part = block.mix(x_BTD), c.dim // c.tokens
    assert torch.equal(mixed[:, 1], x_BTD[:, :, part : 2 * part].flatten(1)) and torch.equal(block.mix(mixed), x_BTD)
    x_TBK = torch.randn(c.tokens, 3, c.dim, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = torch.stack([x_TBK[t].double() @ block.up.weight_TNK[t].double().T for t in range(c.tokens)])
        torch.testing.assert_close(block.up(x_TBK).double(), expected, rtol=EXACT, atol=EXACT)


# ---- switches --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mods", VARIANTS, ids=str)
def test_every_variant_traces_to_the_same_outputs_and_every_parameter_learns(name, mods):
    model = MODELS[name](mods, "small", seed=1)
    inputs = model.example(6, seed=2)
    logit_B = model(*inputs)
    assert logit_B.shape == (6,) and torch.isfinite(logit_B).all() and logit_B.std() > 0
    assert torch.equal(fx.symbolic_trace(model)(*inputs), logit_B)
    logit_B.square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", MODELS)
def test_each_mod_changes_one_thing(name):
    def kinds(mods: Mods) -> set[type]:
        return {type(m) for m in MODELS[name](mods, "small").modules()}

    def biases(mods: Mods) -> list[str]:
        return [n for n, _ in MODELS[name](mods, "small").named_parameters() if "bias" in n]

    plain = Mods()
    assert len(biases(plain)) > 1 and len(biases(Mods(bias=False))) == 1  # the head's
    assert nn.LayerNorm in kinds(plain) and kinds(Mods(norm="blocknorm")) & {nn.LayerNorm, nn.RMSNorm, BlockNorm} == {BlockNorm}
    assert nn.Hardswish in kinds(Mods(activation="hardswish")) and nn.SiLU not in kinds(Mods(activation="hardswish"))
    before, behind = (MODELS[name](Mods(placement=p), "small", seed=3) for p in ("pre", "post"))
    assert not torch.allclose(before(*before.example(4, seed=1)), behind(*behind.example(4, seed=1)))


def test_bad_choices_are_refused():
    for wrong in ({"norm": "batchnorm"}, {"activation": "gelu"}, {"placement": "middle"}):
        with pytest.raises(ValueError, match="is one of"):
            Mods(**wrong)
    for name in MODELS:
        with pytest.raises(ValueError, match="'huge'"):
            MODELS[name](size="huge")
    with pytest.raises(ValueError, match="tokens divide"):
        type(RANKMIXER_SIZES["small"])(layers=1, tokens=5, dim=32, inner=8, dense=1, fields=3, field_dim=4)


# ---- seeds and inputs ------------------------------------------------------------------------------------------------------------


def test_values_come_from_the_seed_and_torchs_own_generator_is_not_touched():
    before = torch.random.get_rng_state()
    a, same, other = (MODELS["wukong"](size="small", seed=s) for s in (4, 4, 5))
    inputs = a.example(8, seed=6)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(a(*inputs), same(*inputs)) and not torch.equal(a(*inputs), other(*inputs))
    assert torch.equal(a.example(8, seed=6)[1], inputs[1]) and not torch.equal(a.example(8, seed=7)[1], inputs[1])
    w = a.over[0].weight
    assert abs(w.std().item() * w.shape[1] ** 0.5 - 1) < 5 / (2 * w.numel()) ** 0.5  # a sample's deviation has a relative error of 1 / sqrt(2 n)


def test_power_law_ids_have_equal_shares_in_each_power_of_two():
    ids = power_law_ids(20_000, 1, rows=1023, generator=torch.Generator().manual_seed(1))
    assert ids.min() == 0 and ids.max() <= 1022
    for digits in range(10):
        share = ((ids + 1 >= 2**digits) & (ids + 1 < 2 ** (digits + 1))).double().mean()
        assert abs(share - 0.1) < SHARE, digits
    with pytest.raises(ValueError, match="at least one row"):
        power_law_ids(1, 1, rows=0, generator=torch.Generator())


def test_embeddings_keep_fields_apart_and_spread_ids():
    tables = embeddings(fields=3, rows=64, dim=4, seed=1)
    for stride in (1, 64):  # ids that count up, and ids that differ in their high bits alone
        ids_BN = stride * torch.arange(20_000).view(-1, 1).expand(-1, 3)
        slots = tables.slots(ids_BN)
        for field in range(3):
            counts = torch.bincount(slots[:, field] - 64 * field, minlength=64)
            assert len(counts) == 64 and counts.min() > 0.8 * 20_000 / 64, stride
    assert tables(ids_BN[:5]).shape == (5, 3, 4) and torch.equal(tables(ids_BN[:5])[2, 1], tables.table[slots[2, 1]])
    for wrong in (torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 3, dtype=torch.int32), torch.zeros(15, dtype=torch.int64)):
        with pytest.raises(ValueError, match="one column a field"):
            tables(wrong)
    with pytest.raises(ValueError, match="at least one field"):
        Embeddings(0, 4, 4)
