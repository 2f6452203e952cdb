"""Cells of LoRA's products alone: studies.plora.measures.kernels with the metrics that the study declares (studies.plora.declared)."""

from studies.plora.declared import kept
from studies.plora.measures import kernels as of_kernels

__all__ = ["kernels"]

kernels = kept(of_kernels.kernels, "kernel_us", "log_kernel_speedup", "log_kernel_cap_share", "log_kernel_roofline_share", "log_kernel_over_eager", "log_control", "noise_floor")
