"""The tasks of `suite warm loka`: each launches what a cell launches, on operands that nobody looks at.

    crossover("cuda", m=2048, k=256, n=768, which="forward", recipes=["rowwise-fast"], fused=["rowwise-fast"])

Where a cell's own function is cheap with one step it is called; else the same calls are made once. Nothing is timed, checked or kept. Kernels are
found in the compilers' caches by the cells, because types, constants, options and the divisibility of sizes are theirs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from studies.loka.measures.assembler import one_assembler
from suite.measure import Context

TEST_ROWS = 4096  # one test batch of `quality`
STEP_GIB = {True: 40, False: 12}  # free before a step starts, by training: what Wukong-5.6 at a batch of 6144 needs, with room
ROOM_S = 200.0  # of waiting for memory that other tasks hold


# ---- single products -----------------------------------------------------------------------------------------------------------


@one_assembler()
def crossover(device: str, *, m: int, k: int, n: int, which: str, recipes: Sequence[str], fused: Sequence[str]) -> None:
    """contests:crossover: quantising and product of every recipe, the fused kernel, and the norm that torch compiles."""
    from studies.loka.site import Site

    torch.compiler.reset()
    _run(device, Site(name="shape", op="linear", batch=1, m=m, n=n, k=k), which, recipes, fused if which == "forward" else (), norm="blocknorm")


@one_assembler()
def products(device: str, *, model: str, size: str, batch: int, which: str, recipe: str, dtype: str) -> None:
    """One recipe of one pass at every site of a model."""
    from studies.loka.measures.site_times import distinct
    from studies.loka.sites.model_sites import model_sites

    for site, found in distinct(model_sites(model, size, batch)):
        if found == which:
            _run(device, site, which, [recipe], (), norm="none", dtype=getattr(torch, dtype))


def _run(device: str, site: object, which: str, recipes: Sequence[str], fused: Sequence[str], *, norm: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Triton's variants of a contest, and what it compares fused ones with, once on one set of operands. The other backend has the same quantising."""
    from studies.loka.measures.contests import Operands, entered, make_operands, program

    made = make_operands(site, which, device, seed=1, sets=1)
    operands = Operands(sets=tuple(tuple(x.to(dtype) for x in pair) for pair in made.sets), transposed=made.transposed, size=made.size, which=which)
    entries, _ = entered(operands, recipes, ["triton"], fused, device, works=("whole",), norm=norm)
    for entry in entries:
        program(entry, operands, norm, "hardswish")(0)


@one_assembler()
def safety(device: str, *, which: str, op: str, products: int, rows: int, contracted: int) -> None:
    """measures.safety_map:safety with one draw."""
    from studies.loka.measures.safety_map import INNER_DB, judged, operands

    a, b = next(operands(1, which=which, op=op, products=products, rows=rows, contracted=contracted, distribution="gaussian"))
    judged([(a.to(device), b.to(device))], INNER_DB, device)


@one_assembler()
def fused_quantise(device: str, *, m: int, k: int, norm: str, activation: str, granularity: str, keep: bool) -> None:
    """contests:fused_quantise: the kernel, and what torch compiles beside it."""
    from kernels.fp8.autograd import quantised
    from kernels.fp8.norm_quantise import norm_quantise
    from kernels.fp8.recipes import OperandRecipe
    from studies.loka.measures.contest_inputs import compiled_norm

    torch.compiler.reset()
    operand, x = OperandRecipe(fmt="e4m3", granularity=granularity), torch.ones((m, k), dtype=torch.bfloat16, device=device)
    norm_quantise(x, norm, activation, operand, keep=keep)
    compiled_norm(norm, activation, operand)(x)
    quantised(compiled_norm(norm, activation)(x), operand)


# ---- whole models --------------------------------------------------------------------------------------------------------------


@one_assembler()
def step(device: str, *, model: str, size: str, mods: str, batch: int, training: bool, variant: str) -> None:
    """model_speed:dense_step: one variant, compiled and run once."""
    from studies.loka.measures.model_speed import planned, step_of, subject_of, torchao_absent

    if variant == "torchao" and torchao_absent():
        return
    _wait_for_room(device, STEP_GIB[training])
    torch.compiler.reset()
    subject = subject_of(Context(device=device), model, size, mods, batch, training)
    step_of(subject, variant, None if variant in ("bf16", "torchao") else planned(subject, variant))()


def _wait_for_room(device: str, gib: int) -> None:
    """Until other tasks have left so much of the device's memory, or ROOM_S are over."""
    began = time.monotonic()
    while device == "cuda" and torch.cuda.mem_get_info()[0] < gib << 30 and time.monotonic() - began < ROOM_S:
        time.sleep(1.0)


@one_assembler()
def mods_layer(device: str, *, size: str, batch: int, training: bool, mods: str) -> None:
    """model_speed:mods_latency: a layer with these Mods, compiled and run once."""
    from studies.loka.learning.training import mods_named
    from studies.loka.measures.model_speed import run_layer
    from studies.models.recommenders import PUBLISHED
    from studies.models.recommenders.inputs import example_inputs
    from studies.models.recommenders.mods import build
    from studies.models.recommenders.wukong import WUKONG_SIZES, Layer

    torch.compiler.reset()
    config = WUKONG_SIZES[size]
    _, x_BND = example_inputs(batch=batch, dense=1, fields=config.inputs[1], dim=config.dim, seed=0, device=device, dtype=torch.bfloat16)
    layer = build(partial(Layer, config.inputs[1], config, mods_named(mods, PUBLISHED["wukong"])), seed=0, device=device).to(torch.bfloat16)
    run_layer(layer, torch.compile(layer, dynamic=False), x_BND.requires_grad_(training), training)


@one_assembler()
def arm(device: str, *, arm: str, model: str, size: str, mods: str, data: str, batch: int) -> None:
    """learning.quality:quality: one training step and one test batch."""
    from studies.loka.learning.quality import quality

    quality(Context(device=device, seed=1), arm=arm, model=model, size=size, mods=mods, data=data, steps=1, batch=batch, test_rows=TEST_ROWS)


@one_assembler()
def captured(device: str, *, model: str, size: str, mods: str, batch: int, examples: int) -> None:
    """probing.captured:captured after one training step."""
    from studies.loka.probing.captured import captured as whole

    whole(Context(device=device, seed=1), model=model, size=size, mods=mods, steps=1, batch=batch, examples=examples)
