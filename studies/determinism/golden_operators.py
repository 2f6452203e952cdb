"""The table of golden operators.

    OPERATORS["linear"].cases["decode, 1 token, bf16"]        # its parameters

Adding an operator is adding one entry to golden_forward.py, golden_training.py or golden_decoder.py, then
`python -m studies.determinism.golden --write`. An operator whose definition changes raises a version (golden_manifest.py).
"""

from __future__ import annotations

from studies.determinism.golden_decoder import DECODER
from studies.determinism.golden_entry import Operator
from studies.determinism.golden_forward import FORWARD
from studies.determinism.golden_training import TRAINING

_TABLE = (*FORWARD, *DECODER, *TRAINING)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _TABLE}
assert len(OPERATORS) == len(_TABLE), "an operator is listed once"
