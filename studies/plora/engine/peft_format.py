"""Adapters as PEFT keeps them: a folder with adapter_config.json and adapter_model.safetensors.

    export_adapter(folder, config, pack.release(0), base_name=base.name)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(...), folder)      # the same logits
    found = import_adapter(folder);  pack.admit(0, ...);  pack.load(0, found.weights)               # and back

Written and read are plain LoRAs on all seven linears of a layer: no DoRA, no rank-stabilised scale, no ranks by pattern, no biases. Needs safetensors;
`peft` is asked for nothing (format of peft 0.21).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from studies.plora.adapter import MODULES, AdapterConfig

__all__ = ["Imported", "export_adapter", "import_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN = {
    "peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "use_dora": False, "use_rslora": False, "use_qalora": False, "lora_bias": False,
    "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "layer_replication": None, "modules_to_save": None, "exclude_modules": None,
    "target_parameters": None, "trainable_token_indices": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Imported:
    """weights: float32 by PEFT's names, as EnginePack.release gives them."""

    rank: int
    alpha: float
    dropout: float
    base_name: str
    weights: Mapping[str, np.ndarray] = field(repr=False)


def export_adapter(folder: str | Path, adapter: AdapterConfig, weights: Mapping[str, np.ndarray], *, base_name: str) -> Path:
    """Makes the folder; files of an adapter that lie there are replaced. base_name: what a user loads the base by. Raises ValueError."""
    from safetensors.numpy import save_file

    if wrong := [n for n, w in weights.items() if adapter.rank not in w.shape]:
        raise ValueError(f"weights are of the adapter's rank, got {adapter.rank=} and {tuple(weights[wrong[0]].shape)} at {wrong[0]}; pass the adapter that they belong to")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    config = _PLAIN | {
        "r": adapter.rank, "lora_alpha": alpha, "lora_dropout": adapter.dropout, "target_modules": list(MODULES), "task_type": "CAUSAL_LM", "inference_mode": True,
        "init_lora_weights": True, "base_model_name_or_path": base_name, "revision": None,
    }  # fmt: skip
    save_file({name: np.ascontiguousarray(w, np.float32) for name, w in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder


def import_adapter(folder: str | Path) -> Imported:
    """Raises ValueError for an adapter of another kind, FileNotFoundError where a file is missing."""
    from safetensors.numpy import load_file

    folder = Path(folder)
    config = json.loads((folder / CONFIG).read_text())
    if other := {name: config[name] for name, plain in _PLAIN.items() if config.get(name, plain) != plain and config[name] not in (None, [], {}, False)}:
        raise ValueError(f"an adapter is a plain LoRA, got {other} in {folder / CONFIG}; train it without")
    if set(config["target_modules"]) != set(MODULES):
        raise ValueError(f"an adapter is on all of {MODULES}, got {sorted(config['target_modules'])} in {folder / CONFIG}; train it on all")
    weights = {name: w.astype(np.float32) for name, w in load_file(folder / WEIGHTS).items()}
    return Imported(rank=config["r"], alpha=float(config["lora_alpha"]), dropout=float(config.get("lora_dropout") or 0.0), base_name=config.get("base_model_name_or_path") or "", weights=weights)
