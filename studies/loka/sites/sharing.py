"""A module that shares its numbers with another: the same classes and paths, the same parameters and buffers, attributes of its own.

    twin = shared_copy(model)
    twin.state_dict().keys() == model.state_dict().keys()      # and each value is the same tensor
    with_forward(twin, graph)                                  # runs the graph in place of the forward of its class
"""

from __future__ import annotations

from torch import fx, nn

__all__ = ["Regraphed", "shared_copy", "with_forward"]

_OWN = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class Regraphed:
    """In front of a module's class where `with_forward` has changed its forward. It deep-copies; to store one, store its state_dict."""



def shared_copy(model: nn.Module) -> nn.Module:
    """Every module of the tree anew, with copies of the containers that name its parameters, and the forward of its own class."""
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            kind = type(module).__mro__[2] if isinstance(module, Regraphed) else type(module)
            twin = copies[id(module)] = object.__new__(kind)
            twin.__dict__ = {k: v.copy() if k in _OWN else v for k, v in module.__dict__.items()}
            for name, child in twin._modules.items():
                twin._modules[name] = child if child is None else copy(child)
        return copies[id(module)]

    return copy(model)


def with_forward(module: nn.Module, graph: fx.Graph) -> nn.Module:
    """`module` with `graph` in its forward's place: of a class of the same name, derived from its own."""
    kind = type(module)
    forward = type(fx.GraphModule(module, graph)).forward
    regraphed = object.__new__(type(kind.__name__, (Regraphed, kind), {"forward": forward, "__module__": kind.__module__}))
    regraphed.__dict__ = module.__dict__
    return regraphed
