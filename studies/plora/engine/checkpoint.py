"""A pack's state: everything that training depends on, as numpy arrays, numbers and strings, to continue as if nothing had happened.

    state = pack.state()                                         # studies.plora.search.saved writes it
    other = EnginePack(base, shape, task, ...);  other.restore(state)

Of every slot: the adapter and where its course is, masters, both moments, gradients of a batch that is not full, its losses. Compute copies are
masters rounded. The base and the task are the caller's: a state names them, and another one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from studies.plora.engine.courses import Course

if TYPE_CHECKING:
    from studies.plora.engine.pack import EnginePack

__all__ = ["restore", "state_of"]

_VERSION = 1
_ARRAYS = ("master", "m", "v", "grad")


def _identity(pack: EnginePack) -> dict[str, Any]:
    """What a state can only be continued with."""
    config = pack.base.config
    return {
        "version": _VERSION, "base": [pack.base.name, config.layers, config.hidden, config.intermediate, config.vocabulary], "dtype": str(pack.base.dtype),
        "task": [pack.task.name, len(pack.task.train)], "tokens": pack.shape.tokens, "slots": [[s.rank, s.rows] for s in pack.shape.slots],
    }  # fmt: skip


def state_of(pack: EnginePack) -> dict[str, Any]:
    open_losses, losses = pack._open_loss_S.tolist(), pack._loss_S.tolist()
    slots = {
        str(slot): {
            "course": course.to_json(), "open_loss": open_losses[slot], "loss": losses[slot],
            **{name: pack.adapters.state.read(slot, name).cpu().numpy() for name in _ARRAYS},
        }
        for slot, course in sorted(pack._courses.items())
    }  # fmt: skip
    return {"identity": _identity(pack), "slots": slots}


def restore(pack: EnginePack, state: Mapping[str, Any]) -> None:
    """What the pack held is gone. Raises ValueError for a state of another base, task, shape or type."""
    if state["identity"] != (mine := _identity(pack)):
        other = [f"{name}: {state['identity'].get(name)} is not {value}" for name, value in mine.items() if state["identity"].get(name) != value]
        raise ValueError(f"a pack continues a state of its own base, task and shape, got {'; '.join(other)}; make the pack as it was")
    for slot in list(pack._courses):
        pack.release(slot)
    for name, held in state["slots"].items():
        slot = int(name)
        pack._settle(slot, Course.from_json(held["course"]))
        for array in _ARRAYS:
            pack.adapters.state.write(slot, array, torch.from_numpy(held[array]))
        pack._open_loss_S[slot], pack._loss_S[slot] = held["open_loss"], held["loss"]
