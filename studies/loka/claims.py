"""What the study claims: a sentence, a target, our bar, and the finding that judges it (findings.py).

    suite claims loka --json
"""

from __future__ import annotations

import math
from functools import partial

from studies.loka import findings
from suite.claims import Claim

RUN, RUN_GPU = "make study-loka", "make study-loka PRESET=gpu"
PAPER = "LoKA, arXiv 2605.10886, read second-hand"
_SHARE = partial(Claim, target=1.0, bar=1.0, margin=0.0, unit="share", source="ours", device="", command=RUN)

CLAIMS = (
    _SHARE(id="row_scales_break_tensorwise", statement="Where the rows of an activation differ in scale, FP8 with one scale a tensor is unsafe at every inner site of the models, forward; with one scale a row none is.",
           test=findings.row_scales_break_tensorwise),
    _SHARE(id="head_stays_bf16", statement="No FP8 recipe reaches the logit's 32 dB at a model's last layer, under any distribution.", test=findings.head_stays_bf16),
)  # fmt: skip
assert all(math.isfinite(c.target) for c in CLAIMS if c.target is not None), "a target is a finite number"
