"""Sites: the linears that carry an adapter, their names in PEFT, and the matrices of all slots at each of them.

    adapters = Adapters.empty(config, ranks=(16, 64), device="cuda", compute_dtype=torch.bfloat16)
    adapters.start(0, AdapterConfig(rank=8, ...))               # A by Philox under (seed, site), B zero, Adam's moments zero
    adapters.factors[3]                                        # (a, b) of site 3, as kernels.lora.autograd takes them
    adapters.weights(0, rank=8)                                # float32 arrays by PEFT's names

Site numbers run over layers, then over studies.plora.adapter.MODULES. A is uniform in +-1/sqrt(K) (kaiming_uniform with a = sqrt(5), PEFT's
default; Hu et al. 2021 leave the law open), the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.lora.autograd import Factor
from kernels.lora.optimizer import AdamState
from studies.models.config import LlamaConfig
from studies.plora.adapter import MODULES, AdapterConfig
from studies.plora.engine.draws import uniform
from studies.plora.planning.memory import site_sizes

__all__ = ["Adapters", "Site", "sites_of"]

_PREFIX = "base_model.model.model.layers"


@dataclass(frozen=True, kw_only=True)
class Site:
    """inputs K and outputs N of the linear."""

    number: int
    layer: int
    module: str
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, str]:
        """PEFT's names of A [rank, K] and B [N, rank] in adapter_model.safetensors."""
        block = "self_attn" if self.module in MODULES[:4] else "mlp"
        at = f"{_PREFIX}.{self.layer}.{block}.{self.module}"
        return f"{at}.lora_A.weight", f"{at}.lora_B.weight"


def sites_of(config: LlamaConfig) -> tuple[Site, ...]:
    sizes = site_sizes(config)
    return tuple(
        Site(number=layer * len(MODULES) + i, layer=layer, module=module, inputs=sizes[module][0], outputs=sizes[module][1])
        for layer in range(config.layers) for i, module in enumerate(MODULES)
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapters:
    """state: all numbers that training changes. factors: (a_TK, b_TN) of each site, views into it."""

    sites: tuple[Site, ...]
    state: AdamState
    factors: tuple[tuple[Factor, Factor], ...]

    @staticmethod
    def empty(config: LlamaConfig, *, ranks: Sequence[int], device: torch.device | str, compute_dtype: torch.dtype) -> Adapters:
        sites = sites_of(config)
        state = AdamState.zeros(widths=[w for s in sites for w in (s.inputs, s.outputs)], ranks=ranks, device=device, compute_dtype=compute_dtype)
        made = [Factor(compute=c, grad=g) for c, g in zip(state.views("compute"), state.views("grad"), strict=True)]
        return Adapters(sites=sites, state=state, factors=tuple(zip(made[::2], made[1::2], strict=True)))

    def start(self, slot: int, adapter: AdapterConfig) -> None:
        """Everything of the slot anew. Rank rows beyond the adapter's rank stay zero for ever."""
        self.state.clear(slot)
        masters, copies = (self.state.slot_views(slot, name)[::2] for name in ("master", "compute"))
        for inputs in sorted({s.inputs for s in self.sites}):
            same = [s.number for s in self.sites if s.inputs == inputs]
            drawn = uniform(streams=same, count=adapter.rank * inputs, seed=adapter.seed, device=self.state.device) * inputs**-0.5  # a product: GPUs divide by a number in another way
            for number, a in zip(same, drawn, strict=True):
                for target in (masters[number], copies[number]):
                    target[: adapter.rank].copy_(a.view(adapter.rank, inputs))

    def weights(self, slot: int, *, rank: int) -> dict[str, np.ndarray]:
        """A [rank, K] and B [N, rank] of every site, float32 on the host."""
        flat = self.state.read(slot, "master").cpu()
        pieces = self.state.split(slot, flat)
        found: dict[str, np.ndarray] = {}
        for site, a, b in zip(self.sites, pieces[::2], pieces[1::2], strict=True):
            name_a, name_b = site.names
            found[name_a], found[name_b] = a[:rank].numpy().copy(), b[:rank].T.contiguous().numpy().copy()
        return found

    def load(self, slot: int, weights: Mapping[str, np.ndarray], *, rank: int) -> None:
        """Set the slot's masters from `weights` (as `weights` gives them); moments and gradients become zero. Raises ValueError."""
        wanted = {name for site in self.sites for name in site.names}
        if set(weights) != wanted:
            raise ValueError(f"an adapter has A and B at all {len(self.sites)} sites, got {len(set(weights) & wanted)} of {len(wanted)} arrays and {sorted(set(weights) - wanted)[:2]} beside; export it from this base")
        for site in self.sites:
            shapes = tuple(weights[name].shape for name in site.names)
            if shapes != ((rank, site.inputs), (site.outputs, rank)):
                raise ValueError(f"A is [{rank}, {site.inputs}] and B [{site.outputs}, {rank}] at {site.names[0]} for the slot's adapter of rank {rank}, got {shapes}; admit an adapter of the weights' rank, on their own base")
        self.state.clear(slot)
        for views in (self.state.slot_views(slot, name) for name in ("master", "compute")):
            for site, a, b in zip(self.sites, views[::2], views[1::2], strict=True):
                name_a, name_b = site.names
                a[:rank].copy_(torch.from_numpy(np.ascontiguousarray(weights[name_a])))
                b[:rank].copy_(torch.from_numpy(np.ascontiguousarray(weights[name_b].T)))
