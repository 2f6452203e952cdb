"""`suite assets`: the list of data sets and models, and shards that carry one to a host without network.

    python -m suite assets
    python -m suite assets pack smollm2-135m-instruct --max-mib 48 --to shards
    python -m suite assets unpack shards/*.shard

Needs the standard library and numpy only. It never downloads to list, and it judges no licence: it prints it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from suite.text import clean


def assets_command(args) -> int:
    return {"pack": _pack, "unpack": _unpack}.get(getattr(args, "verb", None), _list)(args)


def _list(args) -> int:
    from suite.assets import list_assets
    from suite.commands.look import print_table

    print_table("assets", ("name", "state", "licence", "sha256", "sources"), [(a.name, a.state, a.licence, a.sha256[:12], "; ".join(a.sources)) for a in list_assets()])
    return 0


def _pack(args) -> int:
    from suite.assets import get_asset
    from suite.assets.shards import pack, sources_of

    wanted = list(dict.fromkeys(source for name in args.names for source in sources_of(name)))
    for name in wanted:
        asset = get_asset(name)
        print(f"{name}: licence {asset.licence}; {asset.citation}")
        for path in pack(name, folder=Path(args.to), max_mib=args.max_mib):
            print(f"packed {path} ({path.stat().st_size / 2**20:.1f} MiB)")
    for name in args.names:
        if name not in wanted:
            print(f"{name} is computed from {', '.join(sources_of(name))} where it is unpacked")
    return 0


def _unpack(args) -> int:
    """Every shard that can be taken in is, the others are one line each on standard error."""
    from suite import cli
    from suite.assets import AssetError
    from suite.assets.shards import unpack

    refused, last = 0, {}
    for path in args.shards:
        try:
            done = unpack(Path(path))
        except AssetError as error:
            refused += 1
            print(f"suite: {clean(str(error))}", file=sys.stderr)
            continue
        last[done.asset.name, done.count] = done
    for (name, count), done in last.items():
        if done.installed is None:
            print(f"{name}: {count - len(done.missing)} of {count} shards are here; missing {', '.join(f'{n}-of-{count}' for n in done.missing)}")
        else:
            print(f"{name}: {'was here already' if done.was_here else 'installed'}, sha256 {done.asset.sha256[:12]} checked; licence {done.asset.licence}")
    return cli.EXIT_FAILED if refused else 0
