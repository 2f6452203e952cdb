"""The table of golden operators, and the versions that their answers belong to.

    OPERATORS["linear"].cases["decode, 1 token, bf16"]        # its parameters

Adding an operator is adding one entry to golden_forward.py, golden_training.py or golden_decoder.py, then
`python -m studies.determinism.golden --write`.
"""

from __future__ import annotations

from kernels.exact.order import ORDER_VERSION
from studies.determinism.golden_decoder import DECODER
from studies.determinism.golden_entry import Operator
from studies.determinism.golden_forward import FORWARD

# order: kernels.exact.order. definitions: everything else that an answer depends on (a polynomial, a rule for -inf, a rounding); raise it
# when a published answer changes on purpose, so that older manifests and contributions are stale and not wrong.
VERSIONS = {"order": ORDER_VERSION, "definitions": 1}
_TABLE = (*FORWARD, *DECODER)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _TABLE}
assert len(OPERATORS) == len(_TABLE), "an operator is listed once"
