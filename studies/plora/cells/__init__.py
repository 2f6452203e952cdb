"""Cells: the functions of studies.plora.measures with the metrics that the study declares (studies.plora.declared)."""
