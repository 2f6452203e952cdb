"""Cells of whole models' times: studies.loka.measures.model_speed and site_times with the metrics that the study declares (studies.loka.declared)."""

from studies.loka.declared import kept
from studies.loka.measures import model_speed
from studies.loka.measures import site_times as of_sites

__all__ = ["dense_step", "mods_latency", "site_times"]

CONDITIONS = ("log_control", "noise_floor")
dense_step = kept(model_speed.dense_step, "step_us", "log_speedup_single", "log_speedup_dispatch", "log_speedup_torchao", "log_dispatch_over_single", "amdahl_cap", *CONDITIONS)
mods_latency = kept(model_speed.mods_latency, "log_speedup_mods", *CONDITIONS)
site_times = kept(of_sites.site_times, *CONDITIONS)
