"""Sets of the paper that GLUE has too: CoLA (Warstadt et al. 2018), MRPC (Dolan and Brockett 2005), SST-2 (Socher et al. 2013).

    read_mrpc(seed=0).train[0]

They are for parity with the paper and never redistributed: research use, licences in the catalogue. CoLA's test labels are not public, so
its in-domain development rows (527) are the test part here, and validation rows are held out of the training rows; MRPC likewise has its
own 1,725 test rows. WNLI and RTE, which the paper also used, are no assets of this project. CoLA is scored by accuracy as in the paper,
not by Matthews' correlation as in GLUE.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from studies.plora.data.sources import Source
from studies.plora.data.split import held_out
from suite.assets import get_asset
from suite.assets.texts import load_cola_dev, load_cola_train, load_mrpc_test, load_mrpc_train, load_sst2_dev, load_sst2_test, load_sst2_train

__all__ = ["read_cola", "read_mrpc", "read_sst2"]

VALIDATION_ROWS = 400


def read_cola(seed: int) -> Source:
    """8,551 training rows, 400 of them held out; 527 test rows. Raises suite.assets.AssetError."""
    return _held_out("cola", load_cola_train(), load_cola_dev(), seed,
                     lambda row: f"Sentence: {row[0]}\nIs this sentence acceptable English?")


def read_mrpc(seed: int) -> Source:
    """4,076 training rows, 400 of them held out; 1,725 test rows. Raises suite.assets.AssetError."""
    return _held_out("mrpc", load_mrpc_train(), load_mrpc_test(), seed,
                     lambda row: f"First: {row[0]}\nSecond: {row[1]}\nDo both say the same?")


def read_sst2(seed: int) -> Source:
    """6,920, 872 and 1,821 rows, the authors' split; `seed` changes nothing. Raises suite.assets.AssetError."""
    train, validation, test = (_yes_no(rows, lambda row: f"Review: {row[0]}\nIs it positive?") for rows in (load_sst2_train(), load_sst2_dev(), load_sst2_test()))
    return Source(name="sst2", citation=get_asset("sst2-train").citation, classes=("no", "yes"), train=train, validation=validation, test=test)


def _held_out(name: str, rows, test, seed: int, prompt: Callable[[tuple[str, ...]], str]) -> Source:
    train, validation = held_out(np.array([int(row[-1]) for row in rows]), VALIDATION_ROWS, seed=seed)
    shown = _yes_no(rows, prompt)
    return Source(name=name, citation=get_asset(f"{name}-train").citation, classes=("no", "yes"), train=[shown[i] for i in train],
                  validation=[shown[i] for i in validation], test=_yes_no(test, prompt))


def _yes_no(rows, prompt: Callable[[tuple[str, ...]], str]) -> list[tuple[str, str]]:
    return [(prompt(row), "yes" if int(row[-1]) else "no") for row in rows]
