"""LoKA: where in a recommender FP8 is safe and fast, what it costs in log-loss, and the plan that follows.

    from studies import loka

    readings = loka.probe(model, batches)                 # what each product's operands look like
    plan = loka.plan(readings, speedups=times)            # in which recipe each may run
    fast = loka.apply(model, plan, *example)              # the same parameters, those recipes

Works on any PyTorch model that torch.fx can trace, in parts where not in whole: README.md has a complete example. Importing this is light; each name
below is loaded when it is first used.
"""

_EXPORTS = {
    "Dispatch": "studies.loka.sites.dispatch",
    "Plan": "studies.loka.site",
    "Probe": "studies.loka.probing.probe",
    "Reading": "studies.loka.sites.dispatch",
    "Registry": "studies.loka.sites.registry",
    "Rules": "studies.loka.sites.dispatch",
    "Site": "studies.loka.site",
    "allocate": "studies.loka.pricing.allocate",
    "apply": "studies.loka.sites.apply",
    "frozen": "studies.loka.sites.frozen",
    "fused": "studies.loka.sites.fuse",
    "judged": "studies.loka.sites.planning",
    "plan": "studies.loka.sites.planning",
    "probe": "studies.loka.probing.probe",
    "read_plan": "studies.loka.site",
    "read_readings": "studies.loka.probing.readings",
    "speedups_from": "studies.loka.sites.planning",
    "trace": "studies.loka.sites.registry",
    "write_plan": "studies.loka.site",
    "write_readings": "studies.loka.probing.readings",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
