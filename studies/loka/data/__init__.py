"""Data sets of the study: planted truth, real logs, and a user's own copy of Criteo. All give `Batch`es of dense counts, ids and labels.

    from studies.loka.data import Planted, TABLES
    Planted(seed=1).batch(0, 1024)
    TABLES["movielens-100k"](seed=0).batch(0, 1024, part="test")
"""

_EXPORTS = {
    "Batch": "studies.loka.data.batch",
    "Planted": "studies.loka.data.planted",
    "TABLES": "studies.loka.data.real",
    "Table": "studies.loka.data.table",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
