"""The checked-in list of cells whose bits must be equal: every exact operator and every whole text of the study's presets.

    python -m studies.determinism.manifest          # writes manifest.json anew; a test holds the file to this

The claim `bitwise_cpu_h200` needs all of them: a cell that leaves the presets leaves this file in a diff that somebody reads.
"""

from __future__ import annotations

import json

from studies.determinism import presets
from studies.determinism.bits import FAMILIES, MANIFEST
from studies.determinism.questions import questions

PRESETS = (presets.cpu, presets.golden, presets.gpu, presets.gpu2)


def exact_cells() -> list[str]:
    """Labels, sorted, each once."""
    cells = [c for preset in PRESETS for c in questions(preset())]
    exact = {c.label for c in cells if c.measure.endswith(":operators") and c.params["impl"] in FAMILIES}
    return sorted(exact | {c.label for c in cells if c.measure.endswith(":generation") and c.params["family"] in FAMILIES})


if __name__ == "__main__":
    MANIFEST.write_text(json.dumps({"exact cells": exact_cells()}, indent=1) + "\n")
    print(f"{MANIFEST.name}: {len(exact_cells())} cells")
