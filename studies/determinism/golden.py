"""Asking golden questions, and writing the manifest.

    python -m studies.determinism.golden --write                 # every output by the exact CPU references -> golden.json
    python -m studies.determinism.golden --check                 # derives all of it again and compares
    python -m studies.determinism.golden --update-cubins FILE    # takes kernel digests out of a GPU's contribution file

The questions are listed in golden_operators.py, the file's format in golden_manifest.py. A changed output digest under an unchanged order
version is a broken kernel or a changed definition: `--write` refuses it unless `--changed` says that it is meant.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.exact.digests import digest
from studies.determinism.golden_entry import Operator
from studies.determinism.golden_manifest import MANIFEST, VERSIONS, Manifest, ManifestError, Question, dump, read
from studies.determinism.golden_operators import OPERATORS
from studies.determinism.golden_values import seed_of


def joined(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """The digest of one tensor, or one over the digests of several in their order."""
    if isinstance(tensors, torch.Tensor):
        return digest(tensors)
    parts = [digest(t) for t in tensors]
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def outputs(operator: Operator, inputs: Sequence[torch.Tensor], params: Mapping[str, Any], device: str = "cpu", *, second: bool = False) -> list[torch.Tensor]:
    """What the operator gives on a device ("cpu", "cuda:0"), as CPU tensors; `second`: by its other CPU engine."""
    function = operator.second if second else operator.cpu if device == "cpu" else operator.gpu
    options = {k: params[k] for k in operator.options if k in params}
    found = function(*(t.to(device) for t in inputs), **options)
    return [t.cpu() for t in ([found] if isinstance(found, torch.Tensor) else found)]


def answer(operator: Operator, case: str) -> Question:
    """A question with its digests, derived from scratch on the CPU."""
    params, seed = dict(operator.cases[case]), seed_of(operator.name, case)
    inputs = operator.inputs(seed, **params)
    y = outputs(operator, inputs, params)
    return Question(operator=operator.name, case=case, family=operator.family, params=params, seed=seed, shape=tuple(y[0].shape),
                    dtype=str(y[0].dtype).removeprefix("torch."), input_digest=joined(inputs), output_digest=joined(y))


def derive() -> Manifest:
    """The whole manifest, from the operators alone."""
    from suite.machine import environment

    here = environment("cpu")
    made_with = {"kind": "measured", "device": "cpu", **{k: str(here[k]) for k in ("cpu_model", "python", "torch", "triton", "numpy")}}
    return Manifest(versions=VERSIONS, made_with=made_with, questions=tuple(answer(op, case) for op in OPERATORS.values() for case in op.cases))


def differing(old: Manifest, new: Manifest) -> list[str]:
    """Names of questions that both ask and answer differently."""
    known = {q.name: q for q in old.questions}
    return [q.name for q in new.questions if q.name in known and (q.input_digest, q.output_digest) != (known[q.name].input_digest, known[q.name].output_digest)]


def write(path: Path = MANIFEST, changed: bool = False) -> Manifest:
    """Derive and store. Raises ManifestError where an answer changed and `changed` does not say so."""
    new = derive()
    try:
        old = read(path)
    except ManifestError:  # none yet, or one that cannot be trusted: nothing to keep
        old = None
    if old is not None and old.versions == new.versions:
        moved = differing(old, new)
        if moved and not changed:
            raise ManifestError(f"the answer to {moved[0]!r} changed ({len(moved)} in all) and no version did; raise the version, "
                                "or say --changed if the question itself is new")
        if not moved:
            new = replace(new, cubins=old.cubins)
    path.write_text(dump(new))
    return new


def update_cubins(path: Path, archive: Path) -> Manifest:
    """Take the kernel digests of a contribution file into the manifest. Raises ValueError where it holds none."""
    from studies.determinism.contribution import cubins_of

    manifest = read(path)
    found = cubins_of(archive)
    merged = {arch: {tool: dict(kernels) for tool, kernels in by.items()} for arch, by in manifest.cubins.items()}
    for arch, by in found.items():
        for toolchain, kernels in by.items():
            merged.setdefault(arch, {})[toolchain] = dict(sorted(kernels.items()))
    new = replace(manifest, cubins=merged)
    path.write_text(dump(new))
    return new


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.determinism.golden", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="derive every answer on this CPU and store it")
    what.add_argument("--check", action="store_true", help="derive every answer and compare")
    what.add_argument("--update-cubins", metavar="FILE", help="a contribution file from a GPU")
    parser.add_argument("--changed", action="store_true", help="with --write: answers may change under an unchanged version")
    args = parser.parse_args(argv)
    try:
        if args.check:
            old, new = read(), derive()
            wrong = differing(old, new) + (["the list of questions"] if {q.name for q in old.questions} != {q.name for q in new.questions} else [])
            print(f"{len(new.questions) - len(wrong)} of {len(new.questions)} equal" + "".join(f"\n  differs: {name}" for name in wrong))
            return bool(wrong)
        manifest = update_cubins(MANIFEST, Path(args.update_cubins)) if args.update_cubins else write(changed=args.changed)
    except ValueError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 2
    print(f"{MANIFEST.name}: {len(manifest.questions)} questions on {len(manifest.operators())} operators, digest {manifest.digest[:12]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
