"""Contests of single layers, the profiler's bytes, what the presets ask of them, and what a decode step launches beside its linears."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.exact.audit.specimen import captured, compile_specimen
from kernels.exact.integer import linear_integer_ref
from kernels.exact.linear import linear_fma_ref
from kernels.exact.slices import digits_ref, quantise_ref, row_exponents_ref
from studies.determinism import contests, presets, traffic
from studies.determinism.questions import questions
from studies.determinism.study import METRICS
from studies.models.operators import Span, operators
from suite.measure import Context

# ---------------------------------------------------------------- contests and traffic


@pytest.fixture
def operands(monkeypatch):
    monkeypatch.setattr(contests, "cache_bytes", lambda device: 1 << 16)
    return lambda rows: contests.make_operands(rows, 160, 1024, "cpu", seed=100)


@pytest.mark.parametrize("rows", [1, 8, 130])
def test_a_contest_finds_a_kernel_that_adds_in_another_order(operands, rows):
    """K reversed is the right product in another order: family A's oracle has other bits. Integer sums have no order."""
    made = operands(rows)
    first = made.weights_NK[0]
    for name, reference in contests.EXACT.items():
        contests.check(name, [reference(made.x_MK, first)], made, {})
    with pytest.raises(AssertionError, match="differs from its CPU oracle"):
        contests.check("fma", [linear_fma_ref(made.x_MK.flip(1), first.flip(1))], made, {})
    contests.check("integer", [linear_integer_ref(made.x_MK.flip(1), first.flip(1))], made, {})
    with pytest.raises(AssertionError, match="differs from its CPU oracle"):
        contests.check("integer-b9", [linear_integer_ref(made.x_MK, first, products="b6")], made, {})


def test_a_contest_s_activations_use_all_three_digits_and_no_two_blocks_of_rows_are_alike(operands):
    x_MK = operands(130).x_MK
    digits_PMK = digits_ref(quantise_ref(x_MK, row_exponents_ref(x_MK)))
    assert all(len(plane.unique()) > 128 for plane in digits_PMK) and (digits_PMK != 0).float().mean(dim=(1, 2)).min() > 0.9
    assert x_MK.shape == (130, 1024) and not torch.equal(x_MK[:64], x_MK[64:128]) and torch.equal(x_MK[:64].roll(7, dims=1), x_MK[64:128])


def test_no_two_sets_of_a_contest_s_weights_are_alike_and_they_exceed_the_cache(operands):
    made = operands(8)
    assert len({w.float().sum(0).numpy().tobytes() for w in made.weights_NK}) == len(made.weights_NK) >= 2
    assert len(made.weights_NK) * (2 * 160 * 1024 + 4 * 8 * 160) >= contests.ROTATED_CACHES * (1 << 16)


def test_every_ratio_and_time_of_a_contest_is_declared():
    asked = {v for c in presets.gpu().contests for v in c.variants} - {"copy"}
    declared = {m.name for m in METRICS}
    assert {f"{v}_us" for v in asked} | {f"log_ratio_{v}" for v in asked - {"fma"}} <= declared


def test_what_is_compiled_upcasts_multiplies_and_writes_its_buffer():
    x_MK, w_NK, out_MN = torch.ones(1, 8), torch.ones(4, 8, dtype=torch.bfloat16), torch.empty(1, 4)
    contests.upcast_and_multiply(x_MK, w_NK, out_MN)
    assert out_MN.tolist() == [[8.0] * 4]


def test_the_profiler_leaves_clocks_and_caches_alone_and_its_bytes_are_summed_over_kernels(monkeypatch):
    lines = ['"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"', '"","","byte","byte"', '"0","a","1,000","10"', '"1","b","500","5"']
    commands = []
    done = type("Done", (), {"stdout": "==PROF== noise\n" + "\n".join(lines), "stderr": "", "returncode": 0})
    monkeypatch.setattr(traffic.subprocess, "run", lambda command, **options: commands.append(command) or done)
    result = traffic.weight_bytes(Context(device="cpu"), rows=1, n=10, k=10, variants=["fma", "layercast"])
    assert result.records["traffic"][0] == {"variant": "fma", "read": 1500.0, "written": 15.0, "kernels": 2, "per_weight": 15.15}
    for command in commands:
        options = dict(zip(command[1::2], command[2::2], strict=False))
        assert options["--clock-control"] == options["--cache-control"] == "none"


# ---------------------------------------------------------------- the presets' cells


def test_few_replicates_are_asked_of_curves_and_five_of_what_stands_behind_a_claim():
    starts: dict[tuple, int] = {}
    for c in questions(presets.gpu()):
        if c.measure.endswith(":linear"):
            at = (c.params["rows"], c.params["n"], "layercast_compiled" in c.params["variants"])
            starts[at] = max(starts.get(at, 0), c.replicate + 1)
            assert ("bf16_padded" in c.params["variants"]) == (c.params["rows"] < 16 and not at[2])
    assert {at[0] for at, count in starts.items() if count == 2} == {16, 64, 512} and {count for count in starts.values()} == {2, 5}


def test_few_sms_are_one_cell_in_a_process_of_its_own():
    (cell,) = (c for c in questions(presets.gpu()) if c.measure.endswith(":stress"))
    assert cell.params["sms"] == [8, 16, 32, 64, 96, 128] and cell.needs.fresh_process


def test_the_capture_declares_the_files_that_it_reads():
    (cell,) = (c for c in questions(presets.smoke()) if c.measure.endswith(":capture"))
    assert set(cell.assets) == {"smollm2-135m-instruct", "smollm2-135m-instruct-bf16", "own-prompts"}


# ---------------------------------------------------------------- what a decode step launches beside its linears


class Dispatched(TorchDispatchMode):
    """Names of torch's operators that compute: views and empty tensors launch nothing."""

    FREE = ("slice", "select", "view", "transpose", "alias", "unsqueeze", "expand", "permute", "empty", "detach", "split", "t.")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if not name.startswith(self.FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["exact", "serving", "torch"])
def test_appending_a_token_is_one_launch_in_every_kind(kind):
    """And the baseline's attention is one call of the library, without a copy before or after it."""
    ops, heads, dim = operators(kind, torch.device("cuda")), 4, 64
    cache = ops.make_cache(batch=8, tokens=64, kv_heads=heads, head_dim=dim, dtype=torch.bfloat16, device=torch.device("cpu"))
    start_B, count_B = torch.full((8,), 63, dtype=torch.int32), torch.ones(8, dtype=torch.int32)
    span = Span(start_B=start_B, count_B=count_B, position_BT=start_B[:, None], extent=64, even=True)
    qkv_BTHD = torch.ones((8, 1, 3 * heads, dim), dtype=torch.bfloat16)
    with Dispatched() as seen:
        launched = captured("append", lambda: ops.append(cache, qkv_BTHD[:, :, heads : 2 * heads], qkv_BTHD[:, :, 2 * heads :], span), family="elementwise", as_gpu=True)
    assert len(launched) == 1 and not seen.names
    if kind != "exact":
        with Dispatched() as seen:
            ops.attention(qkv_BTHD[:, :, :heads], cache, span, torch.bfloat16)
        assert len(seen.names) == 1 and "scaled_dot_product" in seen.names[0]


def test_the_baselines_append_kernel_compiles_and_its_cpu_form_writes_what_span_counts():
    ops = operators("serving", torch.device("cpu"))
    cache = ops.make_cache(batch=2, tokens=8, kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    start_B, count_B = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    span = Span(start_B=start_B, count_B=count_B, position_BT=start_B[:, None] + torch.arange(3), extent=8, even=False)
    k_BTGD = torch.arange(1.0, 25.0).view(2, 3, 1, 4)
    specimen = captured("append", lambda: ops.append(cache, k_BTGD, -k_BTGD, span), family="elementwise", as_gpu=True)[0]
    assert compile_specimen(specimen, "sm_90").metadata.shared == 0 and not cache.k_BGPD.any()
    ops.append(cache, k_BTGD, -k_BTGD, span)
    expected = torch.zeros(2, 1, 8, 4)
    expected[0, 0, 1:3] = k_BTGD[0, :2, 0]
    assert torch.equal(cache.k_BGPD, expected) and torch.equal(cache.v_BGPD, -expected)


def test_plain_torch_makes_its_rotation_once_a_pass_and_anew_for_the_next():
    ops, tables = operators("torch", torch.device("cpu")), (torch.arange(8.0).view(4, 2), torch.ones(4, 2))
    x_BTHD, start_B = torch.ones(1, 1, 1, 4), torch.zeros(1, dtype=torch.int32)
    turned = []
    for _ in range(2):  # as the decoder does: the same buffer moves on, its view is new in each pass
        position_BT = start_B[:, None]
        for gathers in (2, 0):
            with Dispatched() as seen:
                turned.append(ops.rope(x_BTHD, position_BT, *tables).flatten().tolist())
            assert sum(name.startswith("index") for name in seen.names) == gathers
        start_B.add_(1)
    assert turned == [[-1.0, 0.0, 1.0, 2.0]] * 2 + [[1.0, 2.0, 3.0, 4.0]] * 2
