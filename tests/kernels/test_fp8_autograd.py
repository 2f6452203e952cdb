"""Claims about differentiable products: gradients are those of the recipes, bit for bit; what is kept; compiled and eager are one."""

import pytest
import torch

from kernels.exact.philox import philox_bell
from kernels.fp8 import autograd
from kernels.fp8.autograd import backends, linear, linear_backward, matmul, product, quantised, serves, transposed
from kernels.fp8.emulate import round_tf32
from kernels.fp8.quantise import Quantised, quantise_ref
from kernels.fp8.recipes import GEMMS, RECIPES, GemmRecipe, OperandRecipe, Recipe, gemm

BF16, FP32 = torch.bfloat16, torch.float32
M, N, K = 150, 40, 136  # ragged against 128 in M and K


def operands(m: int = M, n: int = N, k: int = K, dtype: torch.dtype = FP32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x_MK, w_NK, bias_N, dy_MN."""
    return philox_bell((m, k), 1, dtype), philox_bell((n, k), 2), philox_bell((n,), 3), philox_bell((m, n), 4, dtype)


def by_hand(a_RC: torch.Tensor, b_SC: torch.Tensor, g: GemmRecipe) -> torch.Tensor:
    """The product of one pass, from its definition; operands written out as the pass reads them."""
    if g.is_fp8:
        return quantise_ref(a_RC.contiguous(), g.a).dequantise() @ quantise_ref(b_SC.contiguous(), g.b).dequantise().T
    rounded = {"fp32": torch.Tensor.float, "tf32": lambda x: round_tf32(x), "bf16": lambda x: x.to(BF16).float()}[g.dtype]
    return rounded(a_RC) @ rounded(b_SC).T


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("x_dtype", [FP32, BF16])  # what layers compute in; weights stay float32
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_layers_three_products_are_those_of_its_recipe_bit_for_bit(name: str, x_dtype: torch.dtype) -> None:
    recipe, (x, w, bias, dy) = RECIPES[name], operands(dtype=x_dtype)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    y = linear(leaves[0].view(3, 50, K), leaves[1], leaves[2], recipe)
    y.backward(dy.view(3, 50, N))
    assert y.dtype == x_dtype and torch.equal(y.view(M, N), (by_hand(x, w, recipe.forward) + bias).to(x_dtype))
    dx, dw, dbias = (t.grad for t in leaves)
    assert torch.equal(dx, by_hand(dy, w.T, recipe.dgrad).to(x_dtype))
    assert dw.dtype == FP32 and torch.equal(dw, by_hand(dy.T, x.T, recipe.wgrad))
    assert torch.equal(dbias, dy.float().sum(0))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "bf16"])
def test_a_batched_matmul_has_the_same_three_products(name: str) -> None:
    recipe, x, y, dout = RECIPES[name], philox_bell((4, 9, 130), 5), philox_bell((4, 130, 7), 6), philox_bell((4, 9, 7), 7)
    x.requires_grad_(), y.requires_grad_()
    out = matmul(x, y, recipe)
    dx, dy = torch.autograd.grad(out, (x, y), dout)
    q = (lambda t, o: quantise_ref(t.detach().contiguous(), o).dequantise()) if recipe.forward.is_fp8 else lambda t, o: t.detach().to(BF16).float()
    assert torch.equal(out, q(x, recipe.forward.a) @ q(y.mT, recipe.forward.b).mT)
    assert torch.equal(dx, q(dout, recipe.dgrad.a) @ q(y, recipe.dgrad.b).mT)
    assert torch.equal(dy.mT, q(dout.mT, recipe.wgrad.a) @ q(x.mT, recipe.wgrad.b).mT)


def test_in_float64_without_rounding_gradients_are_those_of_finite_differences() -> None:
    x, w, b = (t.double().requires_grad_() for t in (philox_bell((2, 3, 5), 8), philox_bell((4, 5), 9), philox_bell((4,), 10)))
    assert torch.autograd.gradcheck(lambda x, w, b: linear(x, w, b, RECIPES["fp32"]), (x, w, b))
    y = philox_bell((2, 1, 5, 6), 11).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: matmul(x, y, RECIPES["fp32"]), (x, y))  # batches [2] and [2, 1] broadcast
    assert matmul(x, y, RECIPES["fp32"]).shape == (2, 2, 3, 6)


def test_only_gradients_that_are_asked_for_are_computed(monkeypatch) -> None:
    """Counted: quantisations. A layer at a model's entrance has no dgrad, a frozen weight no wgrad."""
    x, w, _, dy = operands()
    counted = []
    monkeypatch.setattr(autograd, "quantise_ref", lambda *args, **options: counted.append(1) or quantise_ref(*args, **options))

    def quantisations(recipe: str, needs_x: bool, needs_w: bool) -> int:
        counted.clear()
        linear(x.detach().requires_grad_(needs_x), w.detach().requires_grad_(needs_w), None, RECIPES[recipe]).backward(dy)
        return len(counted)

    assert [quantisations("rowwise", *needs) for needs in ((True, True), (False, True), (True, False))] == [6, 4, 4]
    assert [quantisations("tensorwise", *needs) for needs in ((True, True), (False, True), (True, False))] == [3, 3, 3]
    assert [quantisations("blockwise", *needs) for needs in ((True, True), (False, True), (True, False))] == [5, 4, 3]
    assert quantisations("forward-only", True, True) == 2 and quantisations("bf16", True, True) == 0


@pytest.mark.parametrize("name, x_bytes, w_bytes", [("tensorwise", 1, 1), ("rowwise", 2, 4), ("blockwise", 2, 1), ("rowwise-hp-wgrad", 2, 4), ("bf16", 2, 4)])
def test_a_layer_keeps_what_the_table_says(name: str, x_bytes: int, w_bytes: int) -> None:
    """x is bf16 and w float32: their own bytes, where the tensor itself is kept, cost nothing more."""
    x, w, _, _ = operands(dtype=BF16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x.requires_grad_(), w.requires_grad_(), None, RECIPES[name])
    large = [t for t in kept if t.shape in (x.shape, w.shape)]
    assert sorted(t.nbytes for t in large) == sorted([x_bytes * M * K, w_bytes * N * K])
    assert sum(t.nbytes for t in kept) - sum(t.nbytes for t in large) <= 4 * (M + N + K)  # scales
    own = {t.data_ptr() for t in large}
    assert (x.data_ptr() in own) == (x_bytes == 2) and (w.data_ptr() in own) == (w_bytes == 4)


# ---------------------------------------------------------------- operands that are quantised already


@pytest.mark.parametrize("granularity", ["tensor", "square"])
def test_a_quantised_operand_transposes_into_the_quantised_transpose(granularity: str) -> None:
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    x = philox_bell((2, 130, 260), 12)
    q, want = transposed(quantise_ref(x, operand)), quantise_ref(x.mT.contiguous(), operand)
    assert torch.equal(q.data_RC.view(torch.uint8), want.data_RC.view(torch.uint8)) and torch.equal(q.scale, want.scale) and q.data_RC.is_contiguous()


def test_only_groups_that_survive_a_transpose_serve_two_passes() -> None:
    operand = {(f, g, p): OperandRecipe(fmt=f, granularity=g, power_of_two=p) for f in ("e4m3", "e5m2") for g in ("tensor", "row", "block", "square") for p in (False, True)}
    for first in operand.values():
        for second in operand.values():
            assert serves(first, second) == (first == second and first.granularity in ("tensor", "square"))
    assert not serves(None, None)
    with pytest.raises(ValueError, match="do not follow a transpose"):
        transposed(quantise_ref(torch.ones(2, 3), operand["e4m3", "row", False]))


def test_a_frozen_weight_gives_the_same_numbers_and_is_for_inference_only() -> None:
    x, w, bias, _ = operands()
    for name in ("tensorwise", "rowwise", "blockwise"):
        q = quantised(w, RECIPES[name].forward.b)
        assert torch.equal(linear(x, q, bias, RECIPES[name]), linear(x, w, bias, RECIPES[name]))
    with pytest.raises(ValueError, match="is for inference"):
        linear(x.requires_grad_(), q, bias, RECIPES["blockwise"])
    with torch.no_grad():
        linear(x, q, bias, RECIPES["blockwise"])
    with pytest.raises(ValueError, match="quantise it from the numbers"):
        linear(x.detach(), q, bias, RECIPES["rowwise"])
    with pytest.raises(ValueError, match="does not read FP8 operands"):
        linear(x.detach(), q, bias, RECIPES["bf16"])


def test_backward_products_alone_are_those_of_the_layer() -> None:
    x, w, _, dy = operands()
    r = RECIPES["tensorwise"]
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    linear(*leaves, None, r).backward(dy)
    dx, dw = linear_backward(dy, quantised(x, r.forward.a), w, r.dgrad, r.wgrad, FP32, FP32)
    assert torch.equal(dx, leaves[0].grad) and torch.equal(dw, leaves[1].grad)
    assert linear_backward(dy, x, None, r.dgrad, r.wgrad, None, FP32)[0] is None


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("name", ["tensorwise", "rowwise-hp-wgrad", "blockwise", "tf32"])
def test_compiled_whole_a_layer_gives_the_same_bits(name: str) -> None:
    def step(x, w, bias):
        return linear(torch.nn.functional.relu(x), w, bias, RECIPES[name])

    x, w, bias, dy = operands(m=20)
    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row", "block", "square"])
def test_operators_keep_the_rules_of_torch_library(granularity: str, transpose: bool) -> None:
    torch.library.opcheck(torch.ops.kernels_fp8.quantise, (philox_bell((2, 5, 140), 13), "e4m3", granularity, False, transpose))


def test_products_keep_the_rules_of_torch_library() -> None:
    g = gemm("rowwise")
    a, b = quantise_ref(philox_bell((6, 33), 14), g.a), quantise_ref(philox_bell((5, 33), 15), g.b)
    arguments = (a.data_RC, a.scale, b.data_RC, b.scale, "rowwise", BF16, torch.ones(5))
    torch.library.opcheck(torch.ops.kernels_fp8.multiply, arguments, test_utils=("test_faketensor", "test_autograd_registration"))  # others multiply FP8
    torch.library.opcheck(torch.ops.kernels_fp8.tf32, (torch.ones(3, 4), torch.ones(2, 4)))


# ---------------------------------------------------------------- hard inputs


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_one_row_and_no_rows(name: str) -> None:
    for m in (1, 0):
        x, w, bias, dy = operands(m=m)
        leaves = [t.requires_grad_() for t in (x, w, bias)]
        y = linear(*leaves, RECIPES[name])
        y.backward(dy)
        assert y.shape == (m, N) and x.grad.shape == x.shape and bool(w.grad.isfinite().all())
    assert not bool(w.grad.any()) and not bool(bias.grad.any())  # of no rows


def test_rows_of_zeros_give_zeros_and_a_nan_stays_in_its_row() -> None:
    x, w, _, _ = operands()
    x[3], x[5, 7], x[6, 1] = 0.0, float("nan"), float("inf")
    for name in ("rowwise", "blockwise"):
        y = linear(x, w, None, RECIPES[name])
        assert not bool(y[3].any()) and bool(y[5].isnan().all())
        others = [i for i in range(M) if i != 5]
        assert bool(y[others].isfinite().all())  # an infinity is clamped


def test_strides_do_not_matter() -> None:
    x, w, bias, _ = operands()
    for name in ("tensorwise", "rowwise", "bf16"):
        want = linear(x, w, bias, RECIPES[name])
        assert torch.equal(linear(x.T.contiguous().T, w.T.contiguous().T, bias, RECIPES[name]), want)
        assert torch.equal(linear(torch.cat([x, x], 1)[:, :K], w, bias, RECIPES[name]), want)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w, b: linear(x, w[:, :-1], b, RECIPES["bf16"]), "a linear layer has x"),
        (lambda x, w, b: linear(x, w, b[:-1], RECIPES["bf16"]), "a linear layer has x"),
        (lambda x, w, b: linear(x.int(), w, b, RECIPES["bf16"]), "a layer's x is bfloat16"),
        (lambda x, w, b: linear(x.double(), w, b, RECIPES["rowwise"]), "is bfloat16, float16 or float32"),
        (lambda x, w, b: matmul(x, w, RECIPES["bf16"]), "a matmul has x"),
        (lambda x, w, b: product(x, w, GemmRecipe(name="mine", dtype="bf16")), "an entry of kernels.fp8.recipes.GEMMS"),
        (lambda x, w, b: linear(x, w, b, Recipe(name="r", forward=gemm("bf16"), dgrad=gemm("bf16"), wgrad=GemmRecipe(name="rowwise", dtype="bf16"))), "GEMMS"),
    ],
)
def test_bad_input_is_one_clear_line(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*operands()[:3])


def test_a_backend_is_chosen_by_product_and_only_inside(monkeypatch) -> None:
    """The choice, on a CPU: operands are taken for a GPU's, and the kernel for a recorder."""
    asked = []
    monkeypatch.setattr(autograd.Quantised, "device", torch.device("cuda"))
    monkeypatch.setattr(autograd, "scaled_gemm", lambda a, b, how, *, out_dtype, bias, backend: asked.append(backend) or torch.zeros(a.data_RC.shape[0], b.data_RC.shape[0], dtype=out_dtype))
    x, w, _, _ = operands()
    for table in ({}, {("rowwise", 1, M, N, K): "torch"}, {None: "torch"}, {None: "torch", ("rowwise", 1, M, N, K): "triton"}, {("rowwise", 1, M, N, 1): "torch"}):
        with backends(table):
            product(x, w, gemm("rowwise"))
    product(x, w, gemm("rowwise"))
    assert asked == ["triton", "torch", "torch", "triton", "triton", "triton"]
    with pytest.raises(ValueError, match="a backend is one of"), backends({None: "cutlass"}):
        pass


def test_every_recipe_of_a_product_runs() -> None:
    x, w, bias, _ = operands()
    for name, g in GEMMS.items():
        assert torch.equal(product(x, w, g, bias=bias), by_hand(x, w, g) + bias), name
        assert torch.equal(product(x.T, w.T, g, a_transposed=True, b_transposed=True), by_hand(x, w, g)), name
    assert isinstance(quantised(x, gemm("rowwise").a, transpose=True), Quantised)
