"""What a GPU says of its own execution: on how many SMs it ran, and how many kernels were launched.

    distinct_sms("cuda")                            # every SM of the card; at most 16 under a green context of 16
    kernels_launched(lambda: torch.mm(a, b))        # kernel nodes of the call's CUDA graph, a library's included
    with triton_launches() as names: ...            # of Triton's kernels alone

Facts beside a result, no timing. `kernels_launched` captures the call, so the call must be one that can be captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

PROGRAMS = 8192  # enough to fill every SM of a card many times
_STEPS = 512  # a program stays a while, so that a few SMs cannot take all of them
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


@triton.jit
def sm_id_kernel(sm_ptr, work_ptr, STEPS: tl.constexpr):
    """sm[program] = %smid; work[program] = the end of a chain of integers, stored so that the chain is computed."""
    program = tl.program_id(0)
    x = program + 1
    for _ in range(STEPS):
        x = x * 1664525 + 1013904223
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid; // $1", "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(work_ptr + program, x)
    tl.store(sm_ptr + program, sm)


def distinct_sms(device: str | torch.device) -> int:
    """SMs on which the programs of one grid ran, in the current context."""
    sm = torch.full((PROGRAMS,), -1, dtype=torch.int32, device=device)
    sm_id_kernel[(PROGRAMS,)](sm, torch.empty_like(sm), STEPS=_STEPS, num_warps=1)
    seen = sm.cpu()
    assert int(seen.min()) >= 0, "a program of the witness left no SM number"
    return len(seen.unique())


@contextmanager
def triton_launches() -> Iterator[list[str]]:
    """The names of the Triton kernels that are launched inside, in order."""
    names: list[str] = []
    run = JITFunction.run

    def noted(kernel: JITFunction, *args: object, **kwargs: object) -> object:
        names.append(kernel.fn.__name__)
        return run(kernel, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", noted):
        yield names


def kernels_launched(call: Callable[[], object]) -> int:
    """Kernels of one call, by the nodes of its CUDA graph; the call has run before, so that nothing compiles inside the capture."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    driver, raw, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _checked(driver.cuGraphGetNodes(raw, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _checked(driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)))
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        _checked(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        kinds.append(kind.value)
    return kinds.count(_KERNEL_NODE)


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver did not tell the nodes of a graph; it returned {status}")
