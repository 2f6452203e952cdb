"""Cells: the functions of studies.loka.measures with the metrics that the study declares (studies.loka.declared)."""
