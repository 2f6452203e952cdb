"""Short names of devices, no two alike: what a column or a line of evidence can show.

    names = device_names(view.rows_)        # {"Intel(R) Xeon(R) Processor family 6 ... avx512": "this CPU", "NVIDIA H200": "NVIDIA H200"}

The CPU that measured here is "this CPU"; of two CPUs of one family, or two that measured here, each name has the words that tell them apart.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from suite.machine import short_model

__all__ = ["device_names", "shortened"]


class Measured(Protocol):
    device: str
    origin: str
    environment: Mapping


def device_names(rows: Iterable[Measured]) -> dict[str, str]:
    """Whole name -> short name, for every device of the rows."""
    names: dict[str, str] = {}
    for row in rows:
        here = row.origin == "here" and row.device == row.environment.get("cpu_model")
        if here or row.device not in names:
            names[row.device] = "this CPU" if here else short_model(row.device) or row.device
    return {device: _told_apart(device, name, [d for d, n in names.items() if n == name]) for device, name in sorted(names.items())}


def _told_apart(device: str, name: str, alike: list[str]) -> str:
    """The name with the words that none of the other devices of that name has; the whole name where there are none."""
    if len(alike) < 2:
        return name
    others = {word for other in alike if other != device for word in _words(other)}
    own = [word for word in _words(device) if word not in others]
    return f"{name} ({' '.join(own)})" if own else device


def _words(device: str) -> list[str]:
    """Words, a number together with the word before it: "model 207"."""
    return re.findall(r"[^\s\d]\S*(?:\s+\d+)*|\d+", device)


def shortened(text: str, names: Mapping[str, str]) -> str:
    """A title with the devices' short names in the place of the whole ones."""
    for device in sorted(names, key=len, reverse=True):
        text = text.replace(device, names[device])
    return text
