"""Contribution files: the bundle of one `suite verify-determinism`, as an archive that `suite ingest` takes on any machine.

    path = pack_bundle(bundle, Path("contributions"))        # determinism-nvidia-h200-0123abcd.tar
    cubins_of(path)                                          # {"sm_90": {"triton 3.6.0": {"kernels.exact.decode:decode_kernel": [...]}}}

The file holds the bundle and nothing else of the store. What it says is data of strangers for whoever reads it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.archive import extract, pack, parts_of
from suite.bundle import Bundle, BundleError, BundleStore, load_record, read_bundle
from suite.text import clean

MEASURE = "studies.determinism.verify_cells:verify"
_SHA = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[\w.]+:[\w.]+\Z")


def pack_bundle(bundle: Bundle, folder: Path) -> Path:
    """Write the bundle's archive into a folder, under a name that its device and its id decide. Raises OSError."""
    device = re.sub(r"[^a-z0-9]+", "-", str(bundle.data["environment"].get("device_model", "unknown")).lower()).strip("-")[:60]
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"determinism-{device}-{bundle.id[:8]}.tar"
    with tempfile.TemporaryDirectory() as temp:
        store = BundleStore(Path(temp))
        home = store.bundles_dir / bundle.key[:2] / bundle.key / bundle.path.name
        home.mkdir(parents=True)
        for name in ("bundle.json", *bundle.data["files"]):
            shutil.copyfile(bundle.path / name, home / name)
        paths = pack(store, None, out)
    assert paths == [out], f"a contribution is one file, got {len(paths)} parts"
    return out


def bundles_in(archive: Path) -> list[tuple[Bundle, list[dict[str, Any]]]]:
    """The verified bundles of an archive with their kernel records. Raises ValueError where there is none."""
    with tempfile.TemporaryDirectory() as temp:
        extract(parts_of(archive), Path(temp))
        found = []
        for header in sorted(Path(temp).glob("bundles/*/*/*/bundle.json")):
            try:
                bundle = read_bundle(header.parent)
            except BundleError as error:
                raise ValueError(f"a contribution holds whole bundles, got {archive.name}: {error.reason}") from error
            if bundle.data["cell"]["measure"] == MEASURE and bundle.status == "OK":
                found.append((bundle, load_record(header.parent, "kernels")))
    if not found:
        raise ValueError(f"a contribution file holds a finished verify-determinism, got {archive.name}; make one with `python -m suite verify-determinism`")
    return found


def cubins_of(archive: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    """The kernel binaries that a GPU launched: architecture -> compiler -> kernel -> sha256s. Raises ValueError where it holds none."""
    out: dict[str, dict[str, dict[str, list[str]]]] = {}
    for _, kernels in bundles_in(archive):
        for arch, compiler, kernel, sha in map(binary, kernels):
            known = out.setdefault(arch, {}).setdefault(compiler, {}).setdefault(kernel, [])
            known += [sha] if sha not in known else []
    if not out:
        raise ValueError(f"kernel digests come from a GPU's contribution, got {archive.name} of a CPU; run verify-determinism --device cuda")
    return {a: {t: {n: sorted(s) for n, s in sorted(k.items())} for t, k in by.items()} for a, by in out.items()}


def binary(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """(architecture, compiler, kernel, sha256) of one entry of `kernels.exact.audit.record_compiles`. Raises ValueError for odd shapes."""
    try:
        backend, arch, _ = entry["target"]
        sha, kernel = entry["cubin_sha256" if backend == "cuda" else "hsaco_sha256"], entry["kernel"]
        name = f"sm_{arch}" if backend == "cuda" else str(arch)
        good = _SHA.match(sha) and _NAME.match(kernel)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a kernel record has target, kernel and the binary's sha256, got {clean(repr(entry)[:80])}") from error
    if not good:
        raise ValueError(f"a kernel record names a kernel and 64 hex digits, got {clean(repr((kernel, sha))[:120])}")
    return name[:20], f"triton {entry.get('triton', '?')}"[:40], kernel[:120], sha


def known_binaries(kernels: Sequence[Mapping[str, Any]], cubins: Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]) -> tuple[int, int] | None:
    """(binaries that the manifest lists, binaries launched) for this architecture and compiler; None where the manifest knows neither."""
    found = [binary(k) for k in kernels]
    listed = [(a, t, n, s) for a, t, n, s in found if t in cubins.get(a, {})]
    if not listed:
        return None
    return sum(s in cubins[a][t].get(n, ()) for a, t, n, s in listed), len(found)
