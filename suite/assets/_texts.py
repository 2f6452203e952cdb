"""Readers of the text sets that adapters are tuned on: rows as their authors give them, in file order, nothing dropped.

    from suite.assets import load
    load("banking77-train")[0]                      # ("I am still waiting on my card?", "card_arrival")

A reader checks that each row has the fields it should and raises AssetError where one has not; prompts, labels and splits are the
studies' affair.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable
from typing import Any

from suite.assets._catalogue import fetch
from suite.assets._sources import AssetError

Rows = tuple[tuple[str, ...], ...]
_Cache = str | os.PathLike[str] | None


def _read(name: str, cache_dir: _Cache, parse: Callable[[str], list[tuple[str, ...]]]) -> Rows:
    path = fetch(name, cache_dir=cache_dir)
    try:
        rows = parse(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, KeyError, TypeError, IndexError, csv.Error) as error:
        raise AssetError(f"asset {name}: {path} does not have the rows it should ({error}); fetch the file again") from error
    return tuple(rows)


def _tsv(text: str, *columns: int, width: int, header: bool = False) -> list[tuple[str, ...]]:
    """Tab-separated without quoting: lines end at \\n alone, since other line breaks of Unicode may stand in a sentence."""
    rows = [line.split("\t") for line in text.removesuffix("\n").split("\n")[header:]]
    if any(len(row) != width for row in rows):
        raise ValueError(f"a line has other than {width} columns")
    return [tuple(row[c] for c in columns) for row in rows]


def _csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def load_banking77_train(*, cache_dir: _Cache = None) -> Rows:
    """10,003 of (query, one of 77 intents)."""
    return _read("banking77-train", cache_dir, lambda text: [(row["text"], row["category"]) for row in _csv(text)])


def load_banking77_test(*, cache_dir: _Cache = None) -> Rows:
    """3,080 of (query, intent)."""
    return _read("banking77-test", cache_dir, lambda text: [(row["text"], row["category"]) for row in _csv(text)])


def load_clinc150(*, cache_dir: _Cache = None) -> dict[str, Rows]:
    """Per part (train, val, test, oos_train, oos_val, oos_test) rows of (query, intent): 15,000, 3,000 and 4,500 over 150 intents."""
    parts: dict[str, Any] = {}

    def parse(text: str) -> list[tuple[str, ...]]:
        parts.update({part: tuple((query, intent) for query, intent in rows) for part, rows in json.loads(text).items()})
        return []

    _read("clinc150", cache_dir, parse)
    return parts


def load_svamp(*, cache_dir: _Cache = None) -> Rows:
    """1,000 of (body, question, answer as a plain number)."""
    return _read("svamp", cache_dir, lambda text: [(row["Body"], row["Question"], _number(row["Answer"])) for row in json.loads(text)])


def load_mawps_asdiv(*, cache_dir: _Cache = None) -> Rows:
    """3,138 of (question, answer): MAWPS and ASDiv-A, SVAMP's own training rows, with the placeholders number0, number1, ... filled in."""
    return _read("mawps-asdiv", cache_dir, lambda text: [(_filled(row["Question"], row["Numbers"]), _number(row["Answer"])) for row in _csv(text)])


def load_gsm8k_train(*, cache_dir: _Cache = None) -> Rows:
    """7,473 of (question, worked answer that ends with "#### number")."""
    return _read("gsm8k-train", cache_dir, _problems)


def load_gsm8k_test(*, cache_dir: _Cache = None) -> Rows:
    """1,319 of (question, worked answer), where the asset's own loader gives questions alone."""
    return _read("gsm8k", cache_dir, _problems)


def load_cola_train(*, cache_dir: _Cache = None) -> Rows:
    """8,551 of (sentence, "1" where it is acceptable)."""
    return _read("cola-train", cache_dir, lambda text: _tsv(text, 3, 1, width=4))


def load_cola_dev(*, cache_dir: _Cache = None) -> Rows:
    """527 of (sentence, label); CoLA's test labels are not public."""
    return _read("cola-dev", cache_dir, lambda text: _tsv(text, 3, 1, width=4))


def load_mrpc_train(*, cache_dir: _Cache = None) -> Rows:
    """4,076 of (sentence, sentence, "1" where they are paraphrases)."""
    return _read("mrpc-train", cache_dir, lambda text: _tsv(text, 3, 4, 0, width=5, header=True))


def load_mrpc_test(*, cache_dir: _Cache = None) -> Rows:
    """1,725 of (sentence, sentence, label)."""
    return _read("mrpc-test", cache_dir, lambda text: _tsv(text, 3, 4, 0, width=5, header=True))


def load_sst2_train(*, cache_dir: _Cache = None) -> Rows:
    """6,920 of (sentence, "1" where it is positive)."""
    return _read("sst2-train", cache_dir, lambda text: _tsv(text, 0, 1, width=2))


def load_sst2_dev(*, cache_dir: _Cache = None) -> Rows:
    """872 of (sentence, label), where the asset's own loader gives labels as numbers."""
    return _read("sst2-dev", cache_dir, lambda text: _tsv(text, 0, 1, width=2))


def load_sst2_test(*, cache_dir: _Cache = None) -> Rows:
    """1,821 of (sentence, label)."""
    return _read("sst2-test", cache_dir, lambda text: _tsv(text, 0, 1, width=2))


def _problems(text: str) -> list[tuple[str, ...]]:
    rows = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
    return [(row["question"], row["answer"]) for row in rows]


def _number(value: float | str) -> str:
    """51.0 -> "51", 5.25 -> "5.25"."""
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)


def _filled(question: str, numbers: str) -> str:
    """The question with number0, number1, ... replaced by its numbers."""
    values = [_number(n) for n in numbers.split()]
    return re.sub(r"number(\d+)", lambda match: values[int(match[1])], question)
