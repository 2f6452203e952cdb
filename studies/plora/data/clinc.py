"""CLINC150: 150 intents of ten domains (Larson et al. 2019, arXiv 1909.02027; CC BY 3.0). 15,000, 3,000 and 4,500 queries.

    read(seed=0).train[0]

The out-of-scope queries of the set are left out: they have no intent to learn.
"""

from __future__ import annotations

from studies.plora.data.sources import Source, intent_prompt
from suite.assets import get_asset
from suite.assets.texts import load_clinc150

__all__ = ["read"]


def read(seed: int) -> Source:
    """The authors' own split; `seed` changes nothing. Raises suite.assets.AssetError."""
    parts = {part: [(intent_prompt(query), intent) for query, intent in rows] for part, rows in load_clinc150().items()}
    names = tuple(sorted({intent for _, intent in parts["train"]}))
    return Source(name="clinc150", citation=get_asset("clinc150").citation, classes=names,
                  train=parts["train"], validation=parts["val"], test=parts["test"])
