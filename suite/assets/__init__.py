"""Data sets and models: one entry each, checked by sha256 at every use, the same bytes on every machine.

    from suite.assets import fetch, load_bf16, load_tokenizer, prompts
    path = fetch("smollm2-135m-instruct")
    ids = load_tokenizer().encode(prompts(1).texts[0])

Sources in order of preference: a folder named by SUITE_DATA, the cache (SUITE_CACHE, else `.state/assets`), a file inside a pinned
package of the Python index, an official address. SUITE_OFFLINE=1 forbids the last two. A missing or different file is one line,
`AssetError`. Needs the standard library and numpy only; it never unpickles and never changes what it is given.
"""

from suite.assets._catalogue import ASSETS, AssetRow, fetch, get_asset, list_assets, load
from suite.assets._sources import AssetError, DataFolder, Derived, InPackage, OfficialUrl, SourceError, WheelMember
from suite.assets._store import Asset, cache_folder, fetch_asset, file_sha256, find_asset
from suite.assets.bpe import ByteBpe
from suite.assets._prompts import Prompts, prompts
from suite.assets.smollm2 import StoredModel, chat_text, load_bf16, load_fp32, load_tokenizer, to_bf16_bits

__all__ = [
    "ASSETS", "Asset", "AssetError", "AssetRow", "ByteBpe", "DataFolder", "Derived", "InPackage", "OfficialUrl", "Prompts", "SourceError",
    "StoredModel", "WheelMember", "cache_folder", "chat_text", "fetch", "fetch_asset", "file_sha256", "find_asset", "get_asset",
    "list_assets", "load", "load_bf16", "load_fp32", "load_tokenizer", "prompts", "to_bf16_bits",
]  # fmt: skip
