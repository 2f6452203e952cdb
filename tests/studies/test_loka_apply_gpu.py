"""Claims on a GPU: fused sites have the emulation's numbers forward and backward, compiled or not, and whole models train with them.

Run on a GPU host: python -m pytest tests/studies/test_loka_apply_gpu.py.
"""

import pytest
import torch

from kernels.exact.philox import philox_bell
from kernels.fp8.recipes import RECIPES
from studies.loka.site import Plan
from studies.loka.sites.apply import apply
from studies.loka.sites.fuse import fused
from studies.loka.sites.registry import trace
from studies.models.recommenders import LOKA_MODS, MODELS, PUBLISHED, Mods
from studies.models.recommenders.mods import Mlp, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# A site against its emulation, in dB over a whole tensor. Three errors add: sums in 14 bits, 45 dB and more (kernels.fp8.emulate); a result in bf16, 56 dB;
# and y = activation(norm(x)), float32 on a GPU and float64 here, which rounds to another bf16 number in about one case in 2^(24 - 9 - 2), then
# by 2^-8 of itself, and so to another FP8 number in one case in 2^4 of these, by 2^-3: 2^-17 of the power times 2^-6, 69 dB. In backward the
# gradient passes one more such product and the norm's formulas in float32: 3 dB. Together above 41 dB.
LEAST_DB = 41.0
# Whole models: between two ways to compute one FP8 model every site differs by the above, and by a rounding to FP8 where that crosses a boundary. What
# is asked is that they are nearer to each other than FP8 is to bf16, 28.6 dB a product.
MODEL_DB = 20.0
NORMED = {"layernorm, silu": Mods(), "rmsnorm, hardswish": Mods(norm="rmsnorm", activation="hardswish"), "blocknorm, hardswish": LOKA_MODS, "no norm, silu": Mods(norm="none")}


def db(found: torch.Tensor, want: torch.Tensor) -> float:
    want = want.cpu().double()
    noise = (found.cpu().double() - want).square().sum()
    return float(10 * torch.log10(want.square().sum() / noise)) if noise > 0 else float("inf")


def gradients(model, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    y = model(x)
    y.backward(dy.to(y))
    return {"output": y.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def everywhere(model, recipe: str, *example: torch.Tensor) -> Plan:
    """All sites but the head in one layer recipe, fused where they can be."""
    sites = [s for s in trace(model, *example).sites if not s.head]
    return fused(Plan(recipes={s.name: {w: RECIPES[recipe].of(w).name for w in s.passes} for s in sites}), model, *example)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "rowwise-hp-wgrad"])
@pytest.mark.parametrize("case", NORMED)
def test_a_fused_site_on_a_gpu_is_the_emulation_forward_and_backward(case, recipe):
    x, dy = philox_bell((300, 16), 1, torch.bfloat16), philox_bell((300, 64), 2, torch.bfloat16)
    found = {}
    for device in ("cuda", "cpu"):
        model = build(lambda: Mlp((16, 512, 64), NORMED[case]), seed=4, device="cpu").to(device, torch.bfloat16)
        site = trace(model, x.to(device)).sites[1].name
        plan = Plan(recipes={site: {w: RECIPES[recipe].of(w).name for w in ("forward", "dgrad", "wgrad")}}, fused=(site,))
        found[device] = gradients(apply(model, plan, x.to(device)), x.to(device), dy.to(device))
    fused_weight = [name for name in found["cpu"] if name.startswith(site.partition(":")[0] + ".weight")]
    for name in ["output", *fused_weight]:
        assert db(found["cuda"][name], found["cpu"][name]) > LEAST_DB, name


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_with_fused_sites_is_the_eager_one_and_learns(name):
    torch._dynamo.reset()
    model = MODELS[name](LOKA_MODS if name != "dlrm_v2" else PUBLISHED[name], "small", seed=1, device="cuda").to(torch.bfloat16)
    example = model.example(512, seed=0, device="cuda", dtype=torch.bfloat16)
    fast = apply(model, everywhere(model, "rowwise", *example), *example)
    compiled = torch.compile(fast, fullgraph=True)
    target = (philox_bell((512,), 3).cuda() > 0).float()
    with torch.no_grad():
        assert db(compiled(*example), fast(*example)) > MODEL_DB
    optimizer, losses = torch.optim.Adam(fast.parameters(), lr=1e-2), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(compiled(*example).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(p.grad.isfinite().all() for p in fast.parameters())


def test_a_training_step_can_be_captured_in_a_graph_and_replays_the_same_bits():
    model = build(lambda: Mlp((16, 512, 64), LOKA_MODS), seed=4, device="cuda").to(torch.bfloat16)
    x, dy = philox_bell((256, 16), 1, torch.bfloat16).cuda(), philox_bell((256, 64), 2, torch.bfloat16).cuda()
    fast = apply(model, everywhere(model, "rowwise", x), x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm, so that capturing compiles nothing
        for _ in range(3):
            want = gradients(fast, x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    fast.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        y = fast(x)
        y.backward(dy)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, want["output"]) and all(torch.equal(p.grad, want[name]) for name, p in fast.named_parameters())
