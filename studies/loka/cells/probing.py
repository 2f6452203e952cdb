"""Cells of the probe: studies.loka.measures.probing with the metrics that the study declares (studies.loka.declared)."""

from studies.loka.declared import kept
from studies.loka.measures import probing as probe_cells

__all__ = ["overhead", "stopping", "surrogate_failures", "validation"]

validation = kept(probe_cells.validation, "prediction_error_db", "p01_db_tensorwise", "p01_db_rowwise")
stopping = kept(probe_cells.stopping, "stop_error_share", "stop_rows")
surrogate_failures = kept(probe_cells.surrogate_failures, "surrogate_gap_db", "mere_spread")
overhead = kept(probe_cells.overhead, "log_probe_overhead", "log_control", "step_us")
