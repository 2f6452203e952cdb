"""What kernels.fp8.bench times: groups of variants over the same inputs, each with its reference, bytes and FLOPs.

    for case in cases(SHAPES): print(case.group, case.name, case.floor_us)

A shape that a dry run wants small is divided by `shrink`. Nothing here touches a GPU until a case's `inputs` are asked for on one; the device
"empty" gives CPU tensors without values, for compiling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.exact.philox import philox_bell
from kernels.fp8.epilogue import Epilogue, activate_ref
from kernels.fp8.gemm import MIN_SQNR_DB, scaled_gemm, scaled_gemm_ref
from kernels.fp8.norm_backward import norm_backward, norm_backward_ref
from kernels.fp8.norm_quantise import Saved, norm_quantise, norm_quantise_ref
from kernels.fp8.quantise import Quantised, quantise, quantise_ref
from kernels.fp8.recipes import OperandRecipe, gemm
from kernels.fp8.scaling import scale_shape

__all__ = ["COPY_TBPS", "FUSED_MK", "GEMM_RSC", "LAYER_MNK", "PEAK_TFLOPS", "ROW", "Case", "cases", "operands", "problem", "sqnr_db"]

COPY_TBPS = 4.19  # measured on an H200, read plus written (kernels/exact/NOTES.md)
PEAK_TFLOPS = {"fp8": 1979.0, "bf16": 989.0}  # datasheet, dense
FUSED_MK = ((8192, 512), (8192, 3456), (2048, 8192), (65536, 1024), (16384, 8192), (6144, 16384))
GEMM_RSC = (
    (2048, 128, 128), (2048, 1024, 1024), (2048, 2048, 2048), (2048, 4096, 4096), (8192, 512, 512), (8192, 512, 3456), (8192, 3456, 512),
    (8192, 1024, 3456), (512, 3456, 8192), (256, 512, 65536), (2048, 1024, 123200), (6144, 8192, 18432),
)  # fmt: skip
LAYER_MNK = ((8192, 3456, 512), (8192, 1024, 1024), (2048, 2048, 2048), (6144, 4096, 8192))
ROW, BLOCK, TENSOR, SQUARE = (OperandRecipe(fmt="e4m3", granularity=g) for g in ("row", "block", "tensor", "square"))
EPILOGUE = Epilogue(norm="blocknorm", activation="hardswish")
REQUANTISED = Epilogue(norm="blocknorm", activation="hardswish", requantise=BLOCK)
_REQUANTISED_DB = 28.0  # e4m3 leaves 31.5 dB


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variant of a group. `inputs(device, i)` gives the i-th set of rotated inputs; `ref` None for baselines that are references themselves."""

    group: str
    name: str
    inputs: Callable[[str, int], tuple]
    run: Callable[..., object]
    ref: Callable[..., object] | None = None
    moved_bytes: float
    flops: float = 0.0
    precision: str = "fp8"
    min_db: float = math.inf  # inf: bit for bit

    @property
    def shares_inputs_with(self) -> object:
        """Equal for cases of a group with equal inputs."""
        return getattr(self.inputs, "args", self.inputs)

    @property
    def floor_us(self) -> float:
        return max(self.moved_bytes / COPY_TBPS / 1e6, self.flops / PEAK_TFLOPS[self.precision] / 1e6)


@functools.cache
def _base(device: str) -> torch.Tensor:
    return philox_bell((1 << 20,), 7).to(device)


def _tensor(device: str, shape: tuple[int, ...], i: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Philox's bell, rolled by i and repeated: timing needs values of the right sizes, not new ones."""
    n = math.prod(shape)
    if device == "empty":
        return torch.empty(shape, dtype=dtype)
    return _base(device).roll(1 + 7919 * i).repeat(-(-n // (1 << 20)))[:n].view(shape).to(dtype)


def sqnr_db(out: torch.Tensor, want: torch.Tensor) -> float:
    noise = (out.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise)) if noise > 0 else math.inf


def _plain(out: object) -> torch.Tensor:
    return out.dequantise() if isinstance(out, Quantised) else out


def problem(case: Case, out: object, want: object) -> str:
    """What is wrong with `out`, or ""."""
    if case.min_db == math.inf:
        same = torch.equal(out.data_RC.view(torch.uint8), want.data_RC.view(torch.uint8)) and torch.equal(out.scale, want.scale)
        return "" if same else f"WRONG BITS {case.group} {case.name}"
    outs, wants = (o if isinstance(o, tuple) else (o,) for o in (out, want))
    worst = min(sqnr_db(_plain(o), _plain(w)) for o, w in zip(outs, wants, strict=True) if o is not None)
    return "" if worst >= case.min_db else f"WRONG {case.group} {case.name}: {worst:.1f} dB, at least {case.min_db:.1f}"


# ---- quantising and its fusions ------------------------------------------------------------------------------------------------


def _quantise_cases(m: int, k: int) -> Iterator[Case]:
    group, n = f"quantise {m}x{k}", m * k
    one = lambda device, i: (_tensor(device, (m, k), i),)  # noqa: E731
    yield Case(group=group, name="copy (neg)", inputs=one, run=torch.neg, moved_bytes=4 * n)
    for name, operand, transpose, nbytes in (
        ("row", ROW, False, 3 * n + 4 * m), ("block", BLOCK, False, 3 * n + n / 32), ("square", SQUARE, False, 3 * n), ("tensor", TENSOR, False, 5 * n),
        ("row, transposed", ROW, True, 5 * n + 4 * k), ("block, transposed", BLOCK, True, 3 * n + n / 32),
    ):  # fmt: skip
        run, ref = (functools.partial(f, operand=operand, transpose=transpose) for f in (quantise, quantise_ref))
        yield Case(group=group, name=name, inputs=one, run=run, ref=ref, moved_bytes=nbytes)


def _torch_norm(x: torch.Tensor, norm: str, activation: str, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    if norm == "layernorm":
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)
    else:
        y = torch.nn.functional.rms_norm(x.view(-1, 256), (256,), eps=1e-5).view_as(x) if x.shape[-1] % 256 == 0 else x
    return activate_ref(y, activation)


def _fused_cases(m: int, k: int, compiled: bool) -> Iterator[Case]:
    group, n = f"fused {m}x{k}", m * k
    one = lambda device, i: (_tensor(device, (m, k), i), _tensor(device, (k,), i + 1), _tensor(device, (k,), i + 2))  # noqa: E731
    yield Case(group=group, name="copy (neg)", inputs=one, run=lambda x, w, b: torch.neg(x), moved_bytes=4 * n)
    for norm, activation, operand, keep in (
        ("layernorm", "silu", ROW, False), ("blocknorm", "hardswish", ROW, False), ("blocknorm", "hardswish", BLOCK, False), ("blocknorm", "hardswish", ROW, True),
        ("none", "hardswish", ROW, False),
    ):  # fmt: skip
        parameters = norm == "layernorm"

        def run(x, w, b, f=norm_quantise, norm=norm, activation=activation, operand=operand, keep=keep, parameters=parameters):
            q, saved = f(x, norm, activation, operand, *((w, b) if parameters else ()), keep=keep)
            return (q, saved.y_MK) if keep else q

        name = f"{norm} {activation} {operand.granularity}{' keep' if keep else ''}"
        yield Case(group=group, name=name, inputs=one, run=run, ref=functools.partial(run, f=norm_quantise_ref), moved_bytes=(5 if keep else 3) * n, min_db=_REQUANTISED_DB)
    for norm, activation in (("layernorm", "silu"), ("blocknorm", "hardswish")):

        def apart(x, w, b, norm=norm, activation=activation):
            return quantise(_torch_norm(x, norm, activation, *((w, b) if norm == "layernorm" else (None, None))), ROW)

        yield Case(group=group, name=f"{norm} {activation} apart", inputs=one, run=apart, moved_bytes=11 * n)
        if compiled:
            yield Case(group=group, name=f"{norm} {activation} compiled, quantise apart", inputs=one, run=_compiled(norm, activation, m, k), moved_bytes=7 * n)
    yield from _backward_cases(group, m, k)


def _backward_cases(group: str, m: int, k: int) -> Iterator[Case]:
    for norm, activation in (("layernorm", "silu"), ("blocknorm", "hardswish")):
        parameters = norm == "layernorm"

        def inputs(device, i, norm=norm, activation=activation, parameters=parameters):
            x, dy = _tensor(device, (m, k), i), _tensor(device, (m, k), i + 3)
            w = (_tensor(device, (k,), i + 1), _tensor(device, (k,), i + 2)) if parameters else ()
            if device == "empty":
                saved = Saved(y_MK=x, mean=torch.empty((m, 1)) if parameters else None, rstd=torch.empty((m, 1 if parameters else -(-k // 256))))
            else:
                saved = (norm_quantise if device == "cuda" else norm_quantise_ref)(x, norm, activation, ROW, *w, keep=True)[1]
            return dy, x, saved, norm, activation, *w

        yield Case(group=group, name=f"backward {norm} {activation}", inputs=inputs, run=norm_backward, ref=norm_backward_ref, moved_bytes=6 * m * k, min_db=MIN_SQNR_DB)


def _compiled(norm: str, activation: str, m: int, k: int) -> Callable[..., Quantised]:
    """A compiled function of its own for each shape, so that no recompilation limit is met."""
    made: list = []

    def run(x, w, b):
        if not made:
            made.append(torch.compile(lambda x, w, b: _torch_norm(x, norm, activation, w, b), dynamic=False))
        return quantise(made[0](x, *((w, b) if norm == "layernorm" else (None, None))), ROW)

    return run


# ---- products ------------------------------------------------------------------------------------------------------------------


def _min_db(c: int, fast: bool) -> float:
    """45 dB up to C = 4096; beyond it the accumulator's error grows with C where it is not promoted: 6 dB a doubling."""
    return MIN_SQNR_DB - (20 * math.log10(c / 4096) if fast and c > 4096 else 0.0)


def operands(device: str, i: int, r: int, s: int, c: int, name: str) -> tuple[Quantised, Quantised]:
    recipe, made = gemm(name), []
    for rows, operand, seed in ((r, recipe.a, i), (s, recipe.b, i + 1)):
        if device == "empty":
            scale = torch.empty(scale_shape((rows, c), operand.granularity))
            made.append(Quantised(torch.empty((rows, c), dtype=operand.format.dtype), scale, operand))
        else:
            made.append((quantise if device == "cuda" else quantise_ref)(_tensor(device, (rows, c), seed), operand))
    return made[0], made[1]


def _gemm_cases(r: int, s: int, c: int) -> Iterator[Case]:
    group, flops = f"gemm {r}x{s}x{c}", 2.0 * r * s * c
    out, both = 2 * r * s, (r + s) * c
    two = lambda device, i: (_tensor(device, (r, c), i), _tensor(device, (s, c), i + 1))  # noqa: E731
    of = lambda name, device, i: operands(device, i, r, s, c, name)  # noqa: E731
    yield Case(group=group, name="bf16", inputs=two, run=lambda a, b: a @ b.mT, moved_bytes=2 * both + out, flops=flops, precision="bf16")
    for name, backends in (
        ("tensorwise-fast", ("torch", "triton")), ("rowwise-fast", ("torch", "triton")), ("rowwise", ("torch", "triton")),
        ("blockwise", ("torch", "triton")), ("blockwise-both", ("torch", "triton")),
    ):  # fmt: skip
        recipe = gemm(name)
        inputs = functools.partial(of, name)
        for backend in backends:
            run = functools.partial(scaled_gemm, recipe=recipe, backend=backend)
            yield Case(group=group, name=f"{name} {backend}", inputs=inputs, run=run, ref=functools.partial(scaled_gemm_ref, recipe=recipe), moved_bytes=both + out, flops=flops,
                       min_db=_min_db(c, recipe.fast_accum or recipe.a.granularity == "block" and backend == "torch"))  # fmt: skip
    for label, epilogue, nbytes, db in (("epilogue", EPILOGUE, out, _min_db(c, True)), ("epilogue, requantised", REQUANTISED, out / 2, _REQUANTISED_DB)):
        recipe = gemm("rowwise-fast")
        run, ref = (functools.partial(f, recipe=recipe, epilogue=epilogue) for f in (scaled_gemm, scaled_gemm_ref))
        yield Case(group=group, name=f"rowwise-fast {label}", inputs=functools.partial(of, "rowwise-fast"), run=run, ref=ref,
                   moved_bytes=both + nbytes, flops=flops, min_db=db)  # fmt: skip


def _layer_cases(m: int, n: int, k: int) -> Iterator[Case]:
    """norm + activation + linear from bf16 x and w to bf16 y: what a layer costs with everything in it, weight quantising included."""
    group, flops = f"layer {m}x{n}x{k}", 2.0 * m * n * k
    two = lambda device, i: (_tensor(device, (m, k), i), _tensor(device, (n, k), i + 1))  # noqa: E731
    nbytes = 2 * (m * k + n * k + m * n)
    recipe = gemm("rowwise-fast")

    def bf16(x, w):
        return _torch_norm(x, "blocknorm", "hardswish", None, None) @ w.mT

    def apart(x, w, backend="triton"):
        return scaled_gemm(quantise(_torch_norm(x, "blocknorm", "hardswish", None, None), recipe.a), quantise(w, recipe.b), recipe, backend=backend)

    def fused(x, w, backend="triton"):
        return scaled_gemm(norm_quantise(x, "blocknorm", "hardswish", recipe.a)[0], quantise(w, recipe.b), recipe, backend=backend)

    yield Case(group=group, name="bf16", inputs=two, run=bf16, moved_bytes=nbytes, flops=flops, precision="bf16")
    yield Case(group=group, name="bf16, norm compiled", inputs=two, run=_compiled_layer(), moved_bytes=nbytes, flops=flops, precision="bf16")
    for backend in ("torch", "triton"):
        yield Case(group=group, name=f"fp8 apart {backend}", inputs=two, run=functools.partial(apart, backend=backend), moved_bytes=nbytes, flops=flops)
        yield Case(group=group, name=f"fp8 fused {backend}", inputs=two, run=functools.partial(fused, backend=backend), moved_bytes=nbytes, flops=flops)


def _compiled_layer() -> Callable[..., torch.Tensor]:
    made: list = []

    def run(x, w):
        if not made:
            made.append(torch.compile(lambda x, w: _torch_norm(x, "blocknorm", "hardswish", None, None) @ w.mT, dynamic=False))
        return made[0](x, w)

    return run


def cases(*, only: tuple[str, ...] = (), shrink: int = 1) -> list[Case]:
    """All, or the groups whose first word is in `only`; every length divided by `shrink` (at least 16)."""
    small = lambda shape: tuple(max(v // shrink, 16) for v in shape)  # noqa: E731
    made: list[Case] = []
    for m, k in map(small, FUSED_MK):
        made += [*_quantise_cases(m, k), *_fused_cases(m, k, compiled=(m, k) in map(small, FUSED_MK[3:5]))]
    for shape in map(small, GEMM_RSC):
        made += _gemm_cases(*shape)
    for shape in map(small, LAYER_MNK):
        made += _layer_cases(*shape)
    return [c for c in made if not only or c.group.split()[0] in only]
