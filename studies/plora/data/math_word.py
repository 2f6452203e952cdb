"""Grade-school mathematics: GSM8K (Cobbe et al. 2021, arXiv 2110.14168) and SVAMP (Patel et al. 2021, arXiv 2103.07191); both MIT.

    read_gsm8k(seed=0).train[0]                   # (question, the worked answer that ends with "#### number")
    read_svamp(seed=0).test[0]                    # (story and question, the number)

A model of 135M parameters cannot solve these: accuracy would be near zero whatever the adapter, so both are judged by the loss of the
answer's tokens, and no number here says that a problem was solved. SVAMP is a test set: as its authors do, adapters are trained, and here
also selected, on MAWPS and ASDiv-A and tested on SVAMP's 1,000 problems, which differ from them by design.
"""

from __future__ import annotations

import numpy as np

from studies.plora.data.sources import Source
from studies.plora.data.split import held_out
from suite.assets import get_asset
from suite.assets.texts import load_gsm8k_test, load_gsm8k_train, load_mawps_asdiv, load_svamp

__all__ = ["read_gsm8k", "read_svamp"]

VALIDATION_ROWS = {"gsm8k": 500, "svamp": 300}


def read_gsm8k(seed: int) -> Source:
    """7,473 training rows, of which 500 are held out, and 1,319 test rows. Raises suite.assets.AssetError."""
    return _source("gsm8k", get_asset("gsm8k-train").citation, list(load_gsm8k_train()), list(load_gsm8k_test()), seed)


def read_svamp(seed: int) -> Source:
    """3,138 training rows of MAWPS and ASDiv-A, of which 300 are held out, and SVAMP's 1,000 rows. Raises suite.assets.AssetError."""
    test = [(f"{body} {question}", answer) for body, question, answer in load_svamp()]
    return _source("svamp", get_asset("svamp").citation, list(load_mawps_asdiv()), test, seed)


def _source(name: str, citation: str, rows: list[tuple[str, ...]], test: list[tuple[str, ...]], seed: int) -> Source:
    train, validation = held_out(np.zeros(len(rows), np.int64), VALIDATION_ROWS[name], seed=seed)
    shown = [(_prompt(question), answer) for question, answer in rows]
    return Source(name=name, citation=citation, classes=(), train=[shown[i] for i in train], validation=[shown[i] for i in validation],
                  test=[(_prompt(question), answer) for question, answer in test])


def _prompt(question: str) -> str:
    return f"Question: {question}\nAnswer:"
