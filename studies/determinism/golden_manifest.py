"""The golden manifest: questions with the digests of their inputs and of their only right outputs, as one checked-in file.

    manifest = read()                    # studies/determinism/golden.json, checked; raises ManifestError with reason and remedy
    manifest.operators()                 # ["linear", "rmsnorm", ...]

A question is an operator with parameters; its inputs come from the integer Philox, so the file carries no tensor. The file names the
versions of the orders that its digests belong to, and the sha256 of all the rest of itself. That finds accidents and edits by hand;
it is no signature: what vouches for the digests is git. Needs no torch: planning reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernels.exact.order import ORDER_VERSION
from suite.identity import canonical_json, sha256_bytes, sha256_json

MANIFEST = Path(__file__).with_name("golden.json")
# order: kernels.exact.order. definitions: everything else that an answer depends on (a polynomial, a rule for -inf, a rounding); raise it
# when a published answer changes on purpose, so that older manifests are stale and not wrong.
VERSIONS = {"order": ORDER_VERSION, "definitions": 1}
SCHEMA = 1
MAX_BYTES, MAX_QUESTIONS = 2 << 20, 5000
REWRITE = "python -m studies.determinism.golden --write"
RESTORE = "git checkout studies/determinism/golden.json"
_SHA = re.compile(r"[0-9a-f]{64}\Z")


class ManifestError(ValueError):
    """A manifest that nothing may be compared with: why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One operator on one set of inputs. The digests are `kernels.exact.digests.digest`, joined where there are several tensors."""

    operator: str
    case: str
    family: str  # "fma", "integer" or "ieee" (elementwise, norms and the like: IEEE operations in an explicit order)
    params: Mapping[str, Any]
    seed: int
    shape: tuple[int, ...]  # of the (first) output
    dtype: str
    input_digest: str
    output_digest: str

    @property
    def name(self) -> str:
        return f"{self.operator}, {self.case}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The file as checked. `cubins`, which may be empty, is architecture -> compiler -> kernel -> sha256 of each specialisation's binary."""

    versions: Mapping[str, int]
    made_with: Mapping[str, str]
    questions: tuple[Question, ...]
    cubins: Mapping[str, Mapping[str, Mapping[str, list[str]]]] = field(default_factory=dict)

    def operators(self) -> list[str]:
        return list(dict.fromkeys(q.operator for q in self.questions))

    @property
    def digest(self) -> str:
        """Over versions and questions alone: who wrote the file, and which cubins are known, is no part of what is asked."""
        return sha256_json([dict(self.versions), [_plain(q) for q in self.questions]])


def read(path: Path = MANIFEST) -> Manifest:
    """The manifest, or a ManifestError: unreadable, too large, changed, of another order, or malformed."""
    body = _load(path)
    stated = body.pop("sha256", None)
    try:
        actual = sha256_bytes(canonical_json(body))
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest holds what no manifest holds ({error}); restore it: {RESTORE}") from error
    if stated != actual:
        raise ManifestError(f"the manifest was changed: its sha256 is {actual[:12]}, it states {str(stated)[:12]!r}; restore it: {RESTORE}")
    if body.get("schema") != SCHEMA:
        raise ManifestError(f"the manifest is of another format: schema {body.get('schema')!r}, this code reads {SCHEMA}; update the checkout, "
                            f"or write it anew: {REWRITE}")
    manifest = _manifest(body)
    _check_versions(manifest)
    return manifest


def _check_versions(manifest: Manifest) -> None:
    """Refuse digests of another order or definition: they would differ rightly."""
    for name in sorted({*VERSIONS, *manifest.versions}):
        stated, ours = manifest.versions.get(name), VERSIONS.get(name)
        if stated != ours:
            raise ManifestError(f"the manifest is stale: its {name} version is {stated}, this code's is {ours}; update the checkout, or write it anew: {REWRITE}")


def check_operators(manifest: Manifest, known: Mapping[str, Any]) -> None:
    """Refuse questions about operators that this code does not have, and a manifest that leaves some of its cases out."""
    asked = {(q.operator, q.case) for q in manifest.questions}
    there = {(name, case) for name, operator in known.items() for case in operator.cases}
    if unknown := sorted(asked - there):
        raise ManifestError(f"the manifest asks for {', '.join(unknown[0])!r}, which this code does not have; update the checkout, "
                            f"or write it anew: {REWRITE}")
    if missing := sorted(there - asked):
        raise ManifestError(f"the manifest is stale: it leaves out {', '.join(missing[0])!r} ({len(missing)} in all); update the checkout, or write it anew: {REWRITE}")


def dump(manifest: Manifest) -> str:
    """The file's text, its own sha256 included."""
    cubins = {arch: {compiler: dict(kernels) for compiler, kernels in by.items()} for arch, by in manifest.cubins.items()}
    body = {"schema": SCHEMA, "versions": dict(manifest.versions), "made_with": dict(manifest.made_with), "cubins": cubins,
            "questions": [_plain(q) for q in manifest.questions]}
    return sign(body)


def sign(body: Mapping[str, Any]) -> str:
    """JSON text of a body with the sha256 of its canonical form; one question a line, so that a diff can be read."""
    rest = {k: v for k, v in body.items() if k != "sha256"}
    head = {**{k: v for k, v in rest.items() if k != "questions"}, "sha256": sha256_bytes(canonical_json(rest))}
    lines = ",\n".join("  " + json.dumps(q, sort_keys=True) for q in rest.get("questions", []))
    return json.dumps(head, indent=1, sort_keys=True)[:-2] + ',\n "questions": [\n' + lines + "\n ]\n}\n"


def _plain(q: Question) -> dict[str, Any]:
    return {**asdict(q), "params": dict(q.params), "shape": list(q.shape)}


def _load(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ManifestError(f"the manifest has {size} bytes, the limit is {MAX_BYTES}; restore it: {RESTORE}")
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"the manifest cannot be read ({error.strerror or error}: {path.name}); restore it: {RESTORE}") from error
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest is not JSON ({error}); restore it: {RESTORE}") from error
    if not isinstance(body, dict):
        raise ManifestError(f"the manifest is a JSON object, got {type(body).__name__}; restore it: {RESTORE}")
    return body


def _manifest(body: Mapping[str, Any]) -> Manifest:
    """Types are checked here once, so that the rest may trust them."""
    try:
        questions = tuple(_question(q) for q in body["questions"])
        versions = {str(k): int(v) for k, v in body["versions"].items()}
        made_with = {str(k): str(v) for k, v in body["made_with"].items()}
        cubins = {str(a): {str(t): {str(n): [str(s) for s in found] for n, found in k.items()} for t, k in by.items()} for a, by in body["cubins"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(f"the manifest is malformed ({type(error).__name__}: {error}); restore it: {RESTORE}") from error
    if not 0 < len(questions) <= MAX_QUESTIONS or len({(q.operator, q.case) for q in questions}) != len(questions):
        raise ManifestError(f"a manifest has 1 to {MAX_QUESTIONS} questions, each once, got {len(questions)}; restore it: {RESTORE}")
    return Manifest(versions=versions, made_with=made_with, questions=questions, cubins=cubins)


def _question(q: Mapping[str, Any]) -> Question:
    if set(q) != set(Question.__dataclass_fields__):
        raise ValueError(f"a question has the fields {sorted(Question.__dataclass_fields__)}, got {sorted(q)}")
    texts = [q[k] for k in ("operator", "case", "family", "dtype")]
    if not all(isinstance(t, str) and t.isprintable() and len(t) <= 120 for t in texts) or not isinstance(q["params"], dict):
        raise ValueError(f"a question's names are short printable texts, got {texts!r}")
    if not all(isinstance(q[k], str) and _SHA.match(q[k]) for k in ("input_digest", "output_digest")):
        raise ValueError(f"a digest has 64 hex digits, got those of {q['operator']!r}, {q['case']!r}")
    return Question(**{**q, "shape": tuple(int(s) for s in q["shape"]), "seed": int(q["seed"])})
