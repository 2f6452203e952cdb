"""What the PLoRA report shows, in a reader's order: exactness, then under the claims searches, plans, and times.

    exhibits(view)          # [suite.exhibit.Table | Curves | Prose, ...]

Each part stands in a module of its own (exhibits_*.py). Devices carry their whole names; the report shortens them.
"""

from __future__ import annotations

from studies.plora.report.exhibits_speed import speeds
from suite.claims import View


def exhibits(view: View) -> list:
    return [*speeds(view)]
