"""A time model of an H200 that nobody measured, for plans where no step times are at hand. Kind: simulated, and to be shown as that.

    model = assumed(QWEN25_7B)

A token takes four times its weights in operations through the frozen linears (forward and the gradient of the input, no gradient of the weights), six times
its rank rows through adapters, and attention of half a square, twice and a half as much backward. The peak is 989 TFLOP/s in bf16 and 4.8 TB/s (NVIDIA's
data sheet); the shares that are reached, the rank that a slot's optimizer is charged for and the time of a captured kernel are assumptions. The
floor reads all weights forward and backward, and runs its kernels one after another.
"""

from __future__ import annotations

from studies.models.config import LlamaConfig
from studies.plora.planning.memory import rank_row_elements, site_sizes
from studies.plora.planning.time_model import TimeModel

__all__ = ["assumed"]

PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 4.8e12
LINEAR_SHARE, ADAPTER_SHARE, ATTENTION_SHARE, MEMORY_SHARE = 0.6, 0.15, 0.3, 0.8
KERNELS, KERNEL_S = 45, 2e-6  # of a layer, forward and backward, in a graph
OPTIMIZER_BYTES, OPTIMIZER_RANK = 34, 32  # read and written a parameter; of the slot that is charged


def assumed(config: LlamaConfig) -> TimeModel:
    weights = config.layers * sum(k * n for k, n in site_sizes(config).values())
    attention = 3.5 * 2 * 2 * config.qkv_rows[0] * config.layers / 2  # scores and values, causal, a token and position
    return TimeModel(
        fixed_s=config.layers * KERNELS * KERNEL_S,
        token_s=4 * weights / (PEAK_FLOPS * LINEAR_SHARE),
        token_rank_s=6 * rank_row_elements(config) / (PEAK_FLOPS * ADAPTER_SHARE),
        token_position_s=attention / (PEAK_FLOPS * ATTENTION_SHARE),
        slot_s=OPTIMIZER_BYTES * OPTIMIZER_RANK * rank_row_elements(config) / (PEAK_BYTES_PER_S * MEMORY_SHARE),
        floor_s=config.layers * KERNELS * KERNEL_S + 2 * 2 * weights / (PEAK_BYTES_PER_S * MEMORY_SHARE),
    )
