"""What the PLoRA report shows, in a reader's order: under the claims exactness, times, searches and quality, plans, and who else does what.

    exhibits(view)          # [suite.exhibit.Table | Curves | Prose, ...]

Each part stands in a module of its own (exhibits_*.py). Devices carry their whole names; the report shortens them.
"""

from __future__ import annotations

from studies.plora.report.exhibits_peers import peers
from studies.plora.report.exhibits_plans import plans
from studies.plora.report.exhibits_speed import speeds
from studies.plora.report.exhibits_training import exactness, trainings
from suite.claims import View
from suite.exhibit import Prose


def exhibits(view: View) -> list:
    first = exactness(view) or [Prose(heading="Exactness", text="NOT MEASURED HERE: no adapter was compared packed and alone.")]
    return [*first, *speeds(view), *trainings(view), *plans(view), *peers()]
