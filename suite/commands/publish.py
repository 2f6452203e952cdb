"""`suite publish`: copy bundles into reports/published/, where a reader with a laptop finds them.

    python -m suite publish results.tar --only "fma cuda*"

A published bundle must be reproducible from git. Its commit is known, and its code digest is that of the
clean checkout at hand: the digest covers every module that the cell ran, so it vouches for the code even
where the measuring host had no git to say that the tree was clean.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import tempfile
from pathlib import Path

from suite import cli, identity
from suite.bundle import Bundle, BundleStore
from suite.machine import commit
from suite.session import PUBLISHED
from suite.study import load_study, study_names
from suite.text import clean

MAX_BYTES = 2 << 20  # of one bundle: published results travel with the source


def refusal(bundle: Bundle, clean: bool) -> str | None:
    """Why a bundle cannot be published; None if it can."""
    data = bundle.data
    module = data["cell"]["measure"].partition(":")[0]
    size = sum(f["bytes"] for f in data["files"].values())
    if bundle.status != "OK":
        return f"its status is {bundle.status}"
    if data["commit"] == "unknown":
        return "its commit is unknown; set SUITE_COMMIT where there is no git"
    if not clean:
        return "this checkout has changes that are not committed, so its code digests vouch for nothing"
    if identity.module_path(module, identity.ROOT) is None or identity.code_digest(module) != data["code"]:
        return f"its code is not this checkout's; check out {data['commit'][:12]}, or measure again"
    if size > MAX_BYTES:
        return f"its payload has {size} bytes, the limit is {MAX_BYTES}"
    return None


def newest(bundles: list[Bundle]) -> list[Bundle]:
    """One bundle a question, code and device: the last."""
    found = {(b.point, b.data["code"], b.data["environment"].get("device_model")): b for b in sorted(bundles, key=lambda b: b.started_at)}
    return list(found.values())


def publish_command(args) -> int:
    from suite.ingest import ingest_paths

    _, dirty = commit(identity.ROOT)
    taken, refused = 0, []
    with tempfile.TemporaryDirectory() as folder:
        store = BundleStore(Path(folder))
        report = ingest_paths([Path(p) for p in args.paths], store, None, {name: load_study(name).metric_names() for name in study_names()})
        bundles, _ = store.load_all()
        chosen = newest([b for b in bundles if not args.only or fnmatch.fnmatch(b.data["cell"]["label"], args.only)])
        if not chosen and not report.skipped:
            raise ValueError(f"--only must name at least one cell, got {args.only!r}; labels are, e.g., {sorted({b.data['cell']['label'] for b in bundles})[:3]}")
        for bundle in chosen:
            why = refusal(bundle, not dirty)
            if why:
                refused.append((bundle.data["cell"]["label"], why))
                continue
            taken += _copy(bundle)
    print(f"{taken} published under {PUBLISHED.relative_to(identity.ROOT)}, {len(refused)} refused")
    for why, labels in _by_reason([*refused, *report.skipped]).items():
        print(clean(f"  {len(labels)} ({', '.join(map(str, labels[:3]))}{', ...' if len(labels) > 3 else ''}): {why}"))
    return cli.EXIT_FAILED if refused or report.skipped else 0


def _by_reason(refused: list[tuple]) -> dict[str, list]:
    out: dict[str, list] = {}
    for label, why in refused:
        out.setdefault(why, []).append(label)
    return out


def _copy(bundle: Bundle) -> bool:
    """Into reports/published/<study>/<device>/<id>; False where it lies there already."""
    device = re.sub(r"[^a-z0-9]+", "-", bundle.data["environment"]["device_model"].lower()).strip("-")
    home = PUBLISHED / bundle.data["cell"]["study"] / device / bundle.id[:16]
    if home.is_dir():
        return False
    home.mkdir(parents=True)
    for name in ("bundle.json", *bundle.data["files"]):
        shutil.copyfile(bundle.path / name, home / name)
    return True
