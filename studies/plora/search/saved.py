"""What a search leaves on disk beside its journal: a log of events, and the newest checkpoint of the pack.

    log = EventLog(home / "events.jsonl")
    log.append({"event": "filled", "at": 3, "slots": {"0": 17}})            # on the disk when it returns
    save_state(home / "pack.npz", {"at": 3, "pack": pack.state()})
    load_state(home / "pack.npz")                                           # the same dicts, arrays, numbers, strings; None where there is none

A state is written beside the old one and takes its name when it is whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["EventLog", "load_state", "save_state"]

_TREE, _ARRAY = "tree", "array:"


class EventLog:
    """JSON objects, one a line. A line that a kill cut short is as good as never written."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = path.read_bytes() if path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            os.truncate(path, len(whole))
        try:
            self.events: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise ValueError(f"each line of a search's log is a JSON object, got another in {path} ({error}); move the folder {path.parent.name!r} away to search anew") from error

    def append(self, event: dict[str, Any], *, durable: bool = True) -> None:
        """A kill of the process loses nothing that was appended; a power cut may lose what is not durable, and nothing before that."""
        with open(self.path, "ab") as f:
            f.write(json.dumps(event).encode() + b"\n")
            f.flush()
            if durable:
                os.fsync(f.fileno())
        self.events.append(event)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested dicts of numpy arrays, numbers, strings, booleans and None; keys are strings without '/'."""
    arrays: dict[str, np.ndarray] = {}
    tree = json.dumps(_split(state, "", arrays)).encode()
    temp = path.with_suffix(".new")
    with open(temp, "wb") as f:
        np.savez(f, **{_TREE: np.frombuffer(tree, dtype=np.uint8)}, **{_ARRAY + name: array for name, array in arrays.items()})
        f.flush()
        os.fsync(f.fileno())
    os.replace(temp, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_state(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as data:
        return _joined(json.loads(data[_TREE].tobytes()), "", data)


def _split(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """The value with `{"array": place}` where an array was."""
    if isinstance(value, Mapping):
        assert all(isinstance(k, str) and "/" not in k for k in value), f"keys of a state are strings without '/', got {list(value)} at {place!r}"
        return {"dict": {k: _split(v, f"{place}/{k}", arrays) for k, v in value.items()}}
    if isinstance(value, np.ndarray):
        assert not value.dtype.hasobject, f"arrays of a state hold numbers, got objects at {place!r}"
        arrays[place] = value
        return {"array": place}
    if isinstance(value, (list, tuple)):
        return {"list": [_split(v, f"{place}/{i}", arrays) for i, v in enumerate(value)]}
    return value.item() if isinstance(value, np.generic) else value


def _joined(node: Any, place: str, data: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if "array" in node:
        return data[_ARRAY + node["array"]]
    if "list" in node:
        return [_joined(v, place, data) for v in node["list"]]
    return {k: _joined(v, place, data) for k, v in node["dict"].items()}
