"""What the determinism report shows, in a reader's order: the matrices, then under the claims the evidence, the flips, the audit, the speed, the peers.

    exhibits(view)          # [suite.exhibit.Matrix | Table | Curves | Prose, ...]

Each part stands in a module of its own (exhibits_*.py, peers.py). Devices carry their whole names; the report shortens them.
"""

from __future__ import annotations

from studies.determinism import peers
from studies.determinism.exhibits_audit import audit
from studies.determinism.exhibits_flips import flips
from studies.determinism.exhibits_matrix import differences, matrices, schedules
from studies.determinism.exhibits_serving import serving
from studies.determinism.exhibits_speed import bytes_moved, compiled, decode, eager, prefill
from studies.determinism.exhibits_texts import evidence, texts
from studies.determinism.exhibits_verify import golden_matrix
from suite.claims import View


def exhibits(view: View) -> list:
    bits = [*matrices(view), *texts(view), *evidence(view), *golden_matrix(view), *differences(view), *schedules(view), *audit(view)]
    speed = [*decode(view), *compiled(view), *eager(view), *prefill(view), *bytes_moved(view), *serving(view)]
    return [*bits, *flips(view), *speed, *peers.tables()]
