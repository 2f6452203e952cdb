"""Simulated times of products on an H200, for planning where no measured ones are at hand. Never to be shown beside measured ones unlabelled.

    time_us(site.gemm("wgrad"), gemm("rowwise"))              # product, and quantising both operands, one after the other
    time_us(site.gemm("forward"), gemm("rowwise"), fused=True)  # x is quantised by the operator in front of it

A product takes the longer of its flops at 70% of the tensor cores' peak (989 TFLOP/s in bf16, 1,979 in FP8, half of bf16's in TF32, 67 in fp32) and its
bytes at 92% of 4.8 TB/s, and 2 us to launch. Quantising an operand reads 2 bytes an element and writes 1, twice the reading where one scale serves the
whole tensor, and 2 us a launch. Peaks are NVIDIA's data sheet's; 70%, 92% and 2 us are assumptions. No wave quantisation, no fast accumulation, no tiles:
recipes that differ only there have one time.
"""

from __future__ import annotations

from kernels.fp8.recipes import GemmRecipe, OperandRecipe
from studies.loka.site import Gemm

__all__ = ["quantise_us", "time_us"]

PEAK_TFLOPS = {"fp8": 1979.0, "bf16": 989.0, "tf32": 494.5, "fp32": 67.0}
BYTES = {"fp8": 1, "bf16": 2, "tf32": 4, "fp32": 4}
COMPUTE_SHARE, MEMORY_SHARE = 0.70, 0.92
MEMORY_TBPS = 4.8
LAUNCH_US = 2.0


def time_us(product: Gemm, recipe: GemmRecipe, *, fused: bool = False) -> float:
    """Simulated microseconds of one product with what its recipe needs. `fused`: operand a arrives quantised."""
    a, b, out = (product.batch * n for n in (product.r * product.c, product.s * product.c, product.r * product.s))
    compute_us = product.flops / (PEAK_TFLOPS[recipe.dtype] * COMPUTE_SHARE) * 1e-6
    memory_us = ((a + b) * BYTES[recipe.dtype] + out * max(BYTES[recipe.dtype], 2)) / (MEMORY_TBPS * MEMORY_SHARE) * 1e-6
    total_us = LAUNCH_US + max(compute_us, memory_us)
    if recipe.is_fp8:
        total_us += quantise_us(b, recipe.b) + (0.0 if fused else quantise_us(a, recipe.a))
    return total_us


def quantise_us(elements: int, operand: OperandRecipe) -> float:
    passes = 2 if operand.granularity == "tensor" else 1
    return passes * LAUNCH_US + elements * (2 * passes + 1) / (MEMORY_TBPS * MEMORY_SHARE) * 1e-6
