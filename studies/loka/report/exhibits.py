"""What the LoKA report shows, in a reader's order: the safety map, then under the claims what the probe, prices, plans and contests found.

    exhibits(view)          # [suite.exhibit.Table | Curves | Prose, ...]

Each part stands in a module of its own (exhibits_*.py). Devices carry their whole names; the report shortens them.
"""

from __future__ import annotations

from studies.loka.report.exhibits_loss import losses
from studies.loka.report.exhibits_map import picture, real, safety_maps, torchao_filter
from studies.loka.report.exhibits_probe import probes
from studies.loka.report.exhibits_speed import speeds
from suite.claims import View


def exhibits(view: View) -> list:
    return [*picture(view), *safety_maps(view), *real(view), *torchao_filter(view), *probes(view), *losses(view), *speeds(view)]
