"""Cells on real logs: studies.loka.measures.real with the metrics that the study declares (studies.loka.declared); the change stays in "more"."""

from studies.loka.declared import kept
from studies.loka.measures import real as real_cells

__all__ = ["real_change"]

real_change = kept(real_cells.real_change, "normalised_entropy", "auc")
