"""The commands behind `python -m suite`, one function each: they take parsed arguments and return an exit code."""

_EXPORTS = {
    "list_command": "suite.commands.look",
    "plan_command": "suite.commands.look",
    "status_command": "suite.commands.look",
    "show_command": "suite.commands.look",
    "doctor_command": "suite.commands.look",
    "assets_command": "suite.commands.assets",
    "run_command": "suite.commands.run",
    "warm_command": "suite.commands.warm",
    "ingest_command": "suite.commands.store",
    "archive_command": "suite.commands.archive",
    "publish_command": "suite.commands.publish",
    "claims_command": "suite.commands.store",
    "export_command": "suite.commands.store",
    "ui_command": "suite.commands.store",
    "clean_command": "suite.commands.store",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
