"""Data sets of the study: planted truth, real logs, and a user's own copy of Criteo. Each gives `Batch`es (studies.loka.data.batch)."""

from studies.loka.data.batch import Batch
from studies.loka.data.planted import Planted

__all__ = ["Batch", "Planted"]
