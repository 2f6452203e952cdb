"""The rest of a training step beside the dense part: embeddings looked up, both optimizers. The same for every arm, so timed once.

    rest = rest_of(module, example, table_rows=10_000, seed=0)
    embedded = rest()                  # one step's lookups, table updates and Adam; returns the looked-up rows

Tables: one row of fp32 an id (Zipf ids), read as bf16, updated by rowwise Adagrad (Wukong, arXiv 2403.02545, section 5.1) with the gradients' rows
scattered by index_add. Dense parameters: fp32 masters, torch's fused Adam, copied back to bf16. Rates are 0, so that a step can be timed again and
again: the memory moved is the same, and no parameter changes. One GPU: no communication.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from studies.models.recommenders.inputs import embeddings, power_law_ids

__all__ = ["rest_of"]

EPS = 1e-8


def rest_of(module: nn.Module, example: tuple[torch.Tensor, ...], *, table_rows: int, seed: int) -> Callable[[], torch.Tensor]:
    """A call that does a step's rest for `module`, whose largest input [B, N, D] is what embeddings give."""
    embedded_BND = max(example, key=torch.numel).detach()
    batch, fields, dim = embedded_BND.shape
    device = embedded_BND.device
    tables = embeddings(fields=fields, rows=table_rows, dim=dim, seed=seed, device=device)
    slots = tables.slots(power_law_ids(batch, fields, rows=1 << 30, generator=torch.Generator(device=device).manual_seed(seed))).flatten()
    table, squares = tables.table.detach(), torch.zeros(fields * table_rows, device=device)
    gradient = (embedded_BND * 1e-3).flatten(0, 1)
    dense = list(module.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in dense]
    for p in masters:
        p.grad = torch.full_like(p, 1e-3)
    adam = torch.optim.Adam(masters, lr=torch.tensor(0.0, device=device), fused=True, capturable=device.type == "cuda")

    def rest() -> torch.Tensor:
        looked_up = table[slots].to(embedded_BND.dtype).view(batch, fields, dim)
        rows = gradient.float()
        squares.index_add_(0, slots, rows.square().mean(1))
        table.index_add_(0, slots, rows / (squares[slots, None].sqrt() + EPS), alpha=0.0)
        adam.step()
        torch._foreach_copy_([p.detach() for p in dense], masters)
        return looked_up

    return rest
