"""Products of recipes, differentiable: a linear layer or a batched matmul whose forward, dgrad and wgrad each run in a recipe of their own.

    y = linear(x, w_NK, bias, RECIPES["rowwise"])       # x [..., K] -> y [..., N] in x's dtype
    y.sum().backward()                                  # dgrad and wgrad by the recipe's own products

On a GPU FP8 products are kernels.fp8.quantise and kernels.fp8.gemm.scaled_gemm, others torch's; on a CPU they are emulated: FP8 operands bit for
bit, then one matmul in float32 (kernels.fp8.emulate has sums like the hardware's). Nothing asks for autocast: operands are float32, bf16 or
fp16, a product's recipe alone says how they are rounded, results have x's dtype, gradients that of what they belong to.

What a layer keeps for its backward, in bytes an element (of x beside what its producer keeps, of w for the step only):

    recipe                          x                               w
    tensor scales in both passes    1 (the FP8 x of the forward)    1 (the FP8 w of the forward)
    128 x 128 scales                as x                            1
    rows, 1 x 128, bf16, tf32       0: x itself, as it is           0: the parameter

Scales along K serve no product that contracts M or N: quantising again from x is exact, from FP8 it would round twice. Where they do serve
(`serves`), forward and backward share one quantisation. Weights are quantised in every step that uses them: a cache over steps would be stale
in a replayed CUDA graph, which changes parameters behind Python's back. For serving pass a `Quantised` in w's place; there are no gradients then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from kernels.fp8.emulate import multiply_ref, round_tf32
from kernels.fp8.gemm import BACKENDS, scaled_gemm
from kernels.fp8.quantise import Quantised, quantise, quantise_ref
from kernels.fp8.recipes import GEMMS, GemmRecipe, OperandRecipe, Recipe, gemm
from kernels.fp8.scaling import scale_shape

__all__ = ["Operand", "Wanted", "backends", "linear", "linear_backward", "matmul", "product", "quantised", "serves", "transposed"]

Operand = torch.Tensor | Quantised
Wanted = tuple[str, int, int, int, int]  # a product: recipe's name, batch, r, s, c
_BACKENDS: dict[Wanted | None, str] = {}  # None: of all other products
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def linear(x: torch.Tensor, w_NK: Operand, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """y = x w^T + bias in x's dtype; x [..., K], w [N, K], bias [N]. A `Quantised` w, of the forward's recipe, is for inference.

    Raises ValueError for sizes that do not fit, for dtypes that are no floats, and for recipes that kernels.fp8.recipes.GEMMS does not hold.
    """
    names = _names(recipe)
    frozen = isinstance(w_NK, Quantised)
    w = w_NK.data_RC if frozen else w_NK
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1] or (bias is not None and bias.shape != w.shape[:1]):
        raise ValueError(f"a linear layer has x [..., K], w [N, K] and bias [N] or None, got {tuple(x.shape)=} {tuple(w.shape)=} bias={None if bias is None else tuple(bias.shape)}")
    if x.dtype not in _FLOATS:
        raise ValueError(f"a layer's x is bfloat16, float16 or float32, got {x.dtype}; convert it first")
    x_MK = x.reshape(-1, x.shape[-1])
    y_MN = _frozen_linear(x_MK, w_NK, bias, recipe) if frozen else _Linear.apply(x_MK, w_NK, bias, *names)
    return y_MN.reshape(*x.shape[:-1], w.shape[0])


def matmul(x: torch.Tensor, y: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """x [..., M, K] times y [..., K, N] as torch.matmul has it, batch axes broadcast -> [..., M, N] in x's dtype. y stands where w^T does.

    Raises ValueError for fewer than two axes, and for K that differ.
    """
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise ValueError(f"a matmul has x [..., M, K] and y [..., K, N], got {tuple(x.shape)} and {tuple(y.shape)}; give vectors an axis of 1")
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:])
    return _Linear.apply(x, y.mT, None, *_names(recipe))


def product(
    a_RC: Operand, b_SC: Operand, recipe: GemmRecipe, out_dtype: torch.dtype = torch.float32, *, bias: torch.Tensor | None = None,
    a_transposed: bool = False, b_transposed: bool = False,
) -> torch.Tensor:  # fmt: skip
    """out_RS = a_RC b_SC^T + bias_S in `recipe`, without gradients; batch axes in front. An operand may be a `Quantised` of the recipe's.

    a_transposed, b_transposed: the operand is given as its transpose, [..., C, R]; it is quantised from there without a copy.
    """
    name = _name(recipe)
    if recipe.is_fp8:
        a, b = quantised(a_RC, recipe.a, a_transposed), quantised(b_SC, recipe.b, b_transposed)
        return _multiply(a.data_RC, a.scale, b.data_RC, b.scale, name, out_dtype, bias)
    if isinstance(a_RC, Quantised) or isinstance(b_SC, Quantised):
        raise ValueError(f"a {recipe.dtype} product does not read FP8 operands, got a Quantised; pass the numbers themselves")
    a, b = a_RC.mT if a_transposed else a_RC, b_SC.mT if b_transposed else b_SC
    if recipe.dtype == "bf16" and a.is_cuda:
        return _bf16(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype, bias)
    out_RS = _tf32(a, b) if recipe.dtype == "tf32" else _wide(a, b, recipe.dtype)
    return _as(out_RS if bias is None else out_RS + bias.to(out_RS.dtype), out_dtype)


def linear_backward(dy_MN: torch.Tensor, x_MK: Operand | None, w_NK: Operand | None, dgrad: GemmRecipe, wgrad: GemmRecipe,
                    dx_dtype: torch.dtype | None, dw_dtype: torch.dtype | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx_MK, dw_NK) of y = x w^T; a dtype of None leaves that gradient out. x, w: as the forward had them, or the forward's `Quantised`
    where it `serves`. What both products read of dy is quantised once where the recipes allow."""
    shared = dx_dtype and dw_dtype and dgrad.is_fp8 and wgrad.is_fp8 and serves(dgrad.a, wgrad.a)
    dy_a = quantised(dy_MN, dgrad.a) if shared else dy_MN
    dx = product(dy_a, w_NK, dgrad, dx_dtype, b_transposed=True) if dx_dtype else None
    dw = product(dy_a, x_MK, wgrad, dw_dtype, a_transposed=True, b_transposed=True) if dw_dtype else None
    return dx, dw


def serves(first: OperandRecipe | None, second: OperandRecipe | None) -> bool:
    """Whether an operand quantised by `first` is, transposed, the one that `second` asks for: its groups are the same numbers."""
    return first is not None and first == second and first.granularity in ("tensor", "square")


def quantised(x: Operand, operand: OperandRecipe, transpose: bool = False) -> Quantised:
    """x, or with `transpose` its transpose, quantised by `operand` on its device. A `Quantised` is transposed if asked, and must be of that recipe."""
    if isinstance(x, Quantised):
        if x.operand != operand:
            raise ValueError(f"this product reads an operand of {operand}, got one quantised as {x.operand}; quantise it from the numbers")
        return transposed(x) if transpose else x
    return Quantised(*_quantise(x, operand.fmt, operand.granularity, operand.power_of_two, transpose), operand)


def transposed(q: Quantised) -> Quantised:
    """The same numbers with rows and columns exchanged, in memory too: tensor cores read FP8 with the contracted axis last."""
    if not serves(q.operand, q.operand):
        raise ValueError(f"scales of {q.operand.granularity!r} do not follow a transpose; quantise the transpose instead")
    data = q.data_RC.view(torch.uint8).mT.contiguous().view(q.data_RC.dtype)
    return Quantised(data, q.scale.mT.contiguous() if q.scale.ndim else q.scale, q.operand)


@contextmanager
def backends(table: Mapping[Wanted | None, str]) -> Iterator[None]:
    """On a GPU, inside: FP8 products run by the backend of kernels.fp8.gemm that `table` names, those it does not name by table[None], or by the
    first of BACKENDS. Read when a product runs: a CUDA graph keeps what it was captured with. Raises ValueError for an unknown backend."""
    if unknown := sorted(set(table.values()) - set(BACKENDS)):
        raise ValueError(f"a backend is one of {BACKENDS}, got {unknown}")
    before = dict(_BACKENDS)
    _BACKENDS.clear()
    _BACKENDS.update(table)
    try:
        yield
    finally:
        _BACKENDS.clear()
        _BACKENDS.update(before)


# ---- the layer -----------------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """y_MN = x_MK w_NK^T + bias_N; batch axes in front of both. Recipes travel as names, which torch.compile reads as constants."""

    @staticmethod
    def forward(ctx, x_MK, w_NK, bias_N, forward, dgrad, wgrad):
        f, d, g = gemm(forward), gemm(dgrad), gemm(wgrad)
        x, w = x_MK, w_NK
        if f.is_fp8:
            x, w = quantised(x_MK, f.a), quantised(w_NK, f.b)
        needs_x, needs_w, _ = ctx.needs_input_grad[:3]
        ctx.kept_x = f.is_fp8 and g.is_fp8 and serves(f.a, g.b)
        ctx.kept_w = f.is_fp8 and d.is_fp8 and serves(f.b, d.b)
        kept = (_parts(x if ctx.kept_x else x_MK) if needs_w else (None, None)) + (_parts(w if ctx.kept_w else w_NK) if needs_x else (None, None))
        ctx.save_for_backward(*kept)
        ctx.recipes, ctx.dtypes = (forward, dgrad, wgrad), (x_MK.dtype, w_NK.dtype, None if bias_N is None else bias_N.dtype)
        return product(x, w, f, x_MK.dtype, bias=bias_N)

    @staticmethod
    def backward(ctx, dy_MN):
        forward, d, g = (gemm(name) for name in ctx.recipes)
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        x, x_scale, w, w_scale = ctx.saved_tensors
        if ctx.kept_x and needs_w:
            x = Quantised(x, x_scale, forward.a)
        if ctx.kept_w and needs_x:
            w = Quantised(w, w_scale, forward.b)
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dx, dw = linear_backward(dy_MN, x, w, d, g, x_dtype if needs_x else None, w_dtype if needs_w else None)
        dbias = dy_MN.sum(0, dtype=torch.promote_types(dy_MN.dtype, torch.float32)).to(bias_dtype) if needs_bias else None
        return dx, dw, dbias, None, None, None


def _frozen_linear(x_MK: torch.Tensor, w: Quantised, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """Inference with a weight quantised beforehand."""
    if torch.is_grad_enabled() and (x_MK.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("a weight quantised beforehand is for inference, got inputs that need gradients; use torch.no_grad, or pass the parameter")
    return product(x_MK, w, recipe.forward, x_MK.dtype, bias=bias)


def _parts(x: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (x.data_RC, x.scale) if isinstance(x, Quantised) else (x, None)


def _name(recipe: GemmRecipe) -> str:
    if GEMMS.get(recipe.name) != recipe:
        raise ValueError(f"a product's recipe is an entry of kernels.fp8.recipes.GEMMS, got {recipe}; add it there")
    return recipe.name


def _names(recipe: Recipe) -> tuple[str, str, str]:
    return _name(recipe.forward), _name(recipe.dgrad), _name(recipe.wgrad)


# ---- operators that torch.compile sees whole -------------------------------------------------------------------------------------


@torch.library.custom_op("kernels_fp8::quantise", mutates_args=())
def _quantise(x_RC: torch.Tensor, fmt: str, granularity: str, power_of_two: bool, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    operand = OperandRecipe(fmt=fmt, granularity=granularity, power_of_two=power_of_two)
    q = (quantise if x_RC.is_cuda else quantise_ref)(x_RC, operand, transpose=transpose)
    return q.data_RC, q.scale


@_quantise.register_fake
def _(x_RC, fmt, granularity, power_of_two, transpose):
    operand = OperandRecipe(fmt=fmt, granularity=granularity, power_of_two=power_of_two)
    shape = x_RC.mT.shape if transpose else x_RC.shape
    return x_RC.new_empty(shape, dtype=operand.format.dtype), x_RC.new_empty(scale_shape(tuple(shape), granularity), dtype=torch.float32)


@torch.library.custom_op("kernels_fp8::multiply", mutates_args=())
def _multiply(a_RC: torch.Tensor, a_scale: torch.Tensor, b_SC: torch.Tensor, b_scale: torch.Tensor, recipe: str, out_dtype: torch.dtype,
              bias_S: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    how = gemm(recipe)
    a, b = Quantised(a_RC, a_scale, how.a), Quantised(b_SC, b_scale, how.b)
    *lead, r, c = a_RC.shape
    if a.device.type == "cuda" and c:
        wanted = (recipe, torch.Size(lead).numel(), r, b_SC.shape[-2], c)
        return scaled_gemm(a, b, how, out_dtype=out_dtype, bias=bias_S, backend=_BACKENDS.get(wanted, _BACKENDS.get(None, BACKENDS[0])))
    out_RS = multiply_ref(a, b, how, accumulate="float32")
    return (out_RS if bias_S is None else out_RS + bias_S.float()).to(out_dtype)


@_multiply.register_fake
def _(a_RC, a_scale, b_SC, b_scale, recipe, out_dtype, bias_S):
    return a_RC.new_empty((*a_RC.shape[:-1], b_SC.shape[-2]), dtype=out_dtype)


@torch.library.custom_op("kernels_fp8::tf32", mutates_args=())
def _tf32(a_RC: torch.Tensor, b_SC: torch.Tensor) -> torch.Tensor:
    a, b = a_RC.float(), b_SC.float()
    if a.is_cuda:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a @ b.mT
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    return round_tf32(a) @ round_tf32(b).mT


@_tf32.register_fake
def _(a_RC, b_SC):
    return a_RC.new_empty((*a_RC.shape[:-1], b_SC.shape[-2]), dtype=torch.float32)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in dtype, without a call where it has it: torch.compile of 2.11 gives an autograd.Function whose result has two names zeros for gradients."""
    return x if x.dtype == dtype else x.to(dtype)


def _wide(a_RC: torch.Tensor, b_SC: torch.Tensor, dtype: str) -> torch.Tensor:
    """A product of fp32 or bf16 operands with sums in float32; fp32 takes float64 as it is."""
    if dtype == "bf16":
        return a_RC.to(torch.bfloat16).float() @ b_SC.to(torch.bfloat16).float().mT
    wide = torch.promote_types(torch.promote_types(a_RC.dtype, b_SC.dtype), torch.float32)
    return a_RC.to(wide) @ b_SC.to(wide).mT


def _bf16(a_RC: torch.Tensor, b_SC: torch.Tensor, out_dtype: torch.dtype, bias_S: torch.Tensor | None) -> torch.Tensor:
    """On a GPU: torch's own, with the bias in its epilogue where it has one, and float32 sums kept where float32 is asked for."""
    if out_dtype == torch.bfloat16 and a_RC.ndim == 2:
        return torch.nn.functional.linear(a_RC, b_SC, None if bias_S is None else bias_S.to(torch.bfloat16))
    if out_dtype == torch.bfloat16:
        out_RS = a_RC @ b_SC.mT
    elif a_RC.ndim == 2:
        out_RS = torch.mm(a_RC, b_SC.mT, out_dtype=torch.float32)
    else:
        out_RS = torch.bmm(a_RC.flatten(0, -3), b_SC.flatten(0, -3).mT, out_dtype=torch.float32).unflatten(0, a_RC.shape[:-2])
    return _as(out_RS if bias_S is None else out_RS + bias_S.to(out_RS.dtype), out_dtype)
