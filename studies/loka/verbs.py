"""Verbs: a module that is called by its own name. `loka.apply` may be the function or, once studies.loka.apply was imported, that module:

    callable_module(__name__)                          # at the end of studies/loka/apply.py: calling the module calls its `apply`
"""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["callable_module"]


class _Verb(ModuleType):
    def __call__(self, *args: object, **kwargs: object) -> object:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def callable_module(name: str) -> None:
    sys.modules[name].__class__ = _Verb
