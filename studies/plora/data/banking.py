"""Banking77: 77 intents of bank customers (Casanueva et al. 2020, arXiv 2003.04807; CC BY 4.0). 10,003 training and 3,080 test queries.

    read(seed=0).validation[0]                     # 10 rows a class, held out of the training rows
"""

from __future__ import annotations

import numpy as np

from studies.plora.data.sources import Source, intent_prompt
from studies.plora.data.split import held_out
from suite.assets import get_asset
from suite.assets.texts import load_banking77_test, load_banking77_train

__all__ = ["read"]

VALIDATION_ROWS = 770


def read(seed: int) -> Source:
    """Raises suite.assets.AssetError."""
    rows, test = load_banking77_train(), load_banking77_test()
    names = tuple(sorted({intent for _, intent in rows}))
    labels = np.array([names.index(intent) for _, intent in rows])
    train, validation = held_out(labels, VALIDATION_ROWS, seed=seed)
    shown = [(intent_prompt(query), intent) for query, intent in rows]
    return Source(name="banking77", citation=get_asset("banking77-train").citation, classes=names, train=[shown[i] for i in train],
                  validation=[shown[i] for i in validation], test=[(intent_prompt(query), intent) for query, intent in test])
