"""The prompts of the studies: GSM8K's test questions where that file is at hand, else 64 of our own.

    from suite.assets import prompts
    chosen = prompts(4)
    print(chosen.source, chosen.sha256[:8], chosen.texts[0])

`prompts` never downloads: what a study measured must not hang on whether a network answered. Put the GSM8K file below SUITE_DATA, or
fetch("gsm8k") once. Results name `source` and `sha256`, so numbers of the two sets are not mixed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from suite.assets._catalogue import fetch, get_asset
from suite.assets._sources import AssetError
from suite.assets._store import find_asset


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """`texts` in file order, the name of the asset they come from and the sha256 of its file."""

    source: str
    sha256: str
    texts: tuple[str, ...]


def prompts(count: int | None = None, *, source: str | None = None, cache_dir: str | os.PathLike[str] | None = None) -> Prompts:
    """The first `count` prompts (None: all) of `source`: "gsm8k", "own-prompts", or None for GSM8K if its file is here, else our own.

    Raises ValueError for another source or more prompts than there are, AssetError for a file that is missing or differs.
    """
    if source not in (None, "gsm8k", "own-prompts"):
        raise ValueError(f"source must be 'gsm8k', 'own-prompts' or None, got {source=}; leave it out for the best that is here")
    if source is None:
        source = "gsm8k" if find_asset(get_asset("gsm8k"), cache_dir=cache_dir) else "own-prompts"
    texts = load_gsm8k(cache_dir=cache_dir) if source == "gsm8k" else load_own_prompts(cache_dir=cache_dir)
    if count is not None and not 0 < count <= len(texts):
        raise ValueError(f"{source} has {len(texts)} prompts, got {count=}; ask for fewer")
    return Prompts(source=source, sha256=get_asset(source).sha256, texts=texts[:count])


def load_gsm8k(*, cache_dir: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """GSM8K's 1,319 test questions in file order (Cobbe et al. 2021). Raises AssetError."""
    path = fetch("gsm8k", cache_dir=cache_dir)
    return tuple(_question(path, line) for line in path.read_text("utf-8").splitlines())


def load_own_prompts(*, cache_dir: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """The 64 prompts written for this project (CC0). Raises AssetError."""
    return tuple(json.loads(fetch("own-prompts", cache_dir=cache_dir).read_text("utf-8"))["prompts"])


def load_sst2(*, cache_dir: str | os.PathLike[str] | None = None) -> tuple[tuple[str, int], ...]:
    """(sentence, 1 where it is positive) of SST-2's 872 development sentences, in file order (Socher et al. 2013). Raises AssetError."""
    path = fetch("sst2-dev", cache_dir=cache_dir)
    rows = [line.rsplit("\t", 1) for line in path.read_text("utf-8").splitlines()]
    if not rows or not all(len(row) == 2 and row[1] in "01" for row in rows):
        raise AssetError(f"asset sst2-dev: a line of {path} is not a sentence, a tab and 0 or 1; fetch the file again")
    return tuple((text, int(label)) for text, label in rows)


def _question(path: Path, line: str) -> str:
    try:
        return json.loads(line)["question"]
    except (ValueError, KeyError, TypeError) as error:
        raise AssetError(f"asset gsm8k: a line of {path} is no question ({error}); fetch the file again") from error
