"""Readings: what a probe saw of a model, a sketch for each operand of each site, in one file.

    write_readings(readings, "readings.npz")
    for name, reading in read_readings("readings.npz").sites.items(): ...

Readings of the same sites merge, as those of ranks or of days.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from studies.loka.probing.sketch import Sketch
from studies.loka.site import Site

__all__ = ["OPERANDS", "Readings", "SiteReading", "read_readings", "write_readings"]

VERSION = 1
OPERANDS = ("x", "w", "dy")


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteReading:
    """One site's operands: y = x w^T, and dy where a backward pass was seen."""

    site: Site
    x: Sketch
    w: Sketch
    dy: Sketch | None = None

    @property
    def passes(self) -> tuple[str, ...]:
        """Those of the site's that its operands tell of."""
        return self.site.passes if self.dy is not None else ("forward",)

    def merge(self, other: SiteReading) -> SiteReading:
        if (self.site.name, self.site.n, self.site.k) != (other.site.name, other.site.n, other.site.k):
            raise ValueError(f"readings of one site merge, got {self.site} and {other.site}")
        dy = self.dy.merge(other.dy) if self.dy is not None and other.dy is not None else self.dy or other.dy
        return SiteReading(site=self.site, x=self.x.merge(other.x), w=self.w.merge(other.w), dy=dy)


@dataclass(frozen=True, eq=False, kw_only=True)
class Readings:
    """By the site's name. `unsupported`: products that could not be watched, and why (studies.loka.sites.registry)."""

    sites: Mapping[str, SiteReading]
    unsupported: Mapping[str, str]

    def merge(self, other: Readings) -> Readings:
        """Sites that one of both saw are kept."""
        sites = dict(self.sites)
        for name, reading in other.sites.items():
            sites[name] = sites[name].merge(reading) if name in sites else reading
        return Readings(sites=sites, unsupported={**self.unsupported, **other.unsupported})


def write_readings(readings: Readings, path: Path | str) -> None:
    """One .npz of numbers: no pickle. The sites stand in it as JSON, `meta`."""
    meta = {"version": VERSION, "unsupported": dict(readings.unsupported), "sites": [asdict(r.site) for r in readings.sites.values()]}
    arrays = {"meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)}
    for i, reading in enumerate(readings.sites.values()):
        for operand in OPERANDS:
            if (kept := getattr(reading, operand)) is not None:
                arrays |= {f"{i}/{operand}/{name}": array for name, array in kept.to_arrays().items()}
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def read_readings(path: Path | str) -> Readings:
    """Raises ValueError for what are no readings of this version, naming the file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
        meta = json.loads(arrays.pop("meta").tobytes())
        if meta["version"] != VERSION:
            raise ValueError(f"this code reads readings of version {VERSION}, got {meta['version']}")
        fields: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            place, _, field = name.rpartition("/")
            fields.setdefault(place, {})[field] = array
        sites = [Site(**{**s, "producer": tuple(s["producer"]), "consumer": tuple(s["consumer"])}) for s in meta["sites"]]
        read = [{o: Sketch.from_arrays(fields[f"{i}/{o}"]) for o in OPERANDS if f"{i}/{o}" in fields} for i in range(len(sites))]
        return Readings(sites={s.name: SiteReading(site=s, **r) for s, r in zip(sites, read, strict=True)}, unsupported=meta["unsupported"])
    except (KeyError, TypeError, ValueError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} are no readings that this code reads: {error}; write them with write_readings") from error
