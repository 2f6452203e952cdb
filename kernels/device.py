"""On which GPU an operator runs: the one that holds its tensors, whichever torch calls the current one.

    @on_gpu("rmsnorm")
    def rmsnorm(x_MK, w_K, ...): ...

Triton launches on torch's current device and reads the pointers it is given, so a tensor of another GPU would be read through the wrong
context, and one of the CPU not at all. It moves no tensor: operands on different devices are refused.
"""

import functools
from collections.abc import Callable

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

__all__ = ["on_gpu"]

_RUN = JITFunction.run


def _launches_nothing() -> bool:
    """The interpreter runs kernels on the CPU, and the audit collects launches instead of making them: both pass CPU tensors."""
    return knobs.runtime.interpret or JITFunction.run is not _RUN


def on_gpu(op: str) -> Callable[[Callable], Callable]:
    """Decorates what launches kernels for operator `op`: runs it with the device of its operands as the current one.

    Operands are tensors and prepared weights: what has a `device`. Raises ValueError where they lie on different devices, or not on a GPU.
    Where that device is current it costs 0.8 us of a CPU core and torch.cuda.current_device().
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            device = None
            for operand in (*args, *kwargs.values()) if kwargs else args:
                place = getattr(operand, "device", None)
                if place is None or place == device:
                    continue
                if device is not None:
                    raise ValueError(f"{op} takes operands on one device; got {device} and {place}; move one")
                device = place
            if device is None or device.type != "cuda":
                if not _launches_nothing():
                    raise ValueError(f"{op} runs on a GPU; got {device}; call {op}_ref")
            elif device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    return decorate
