"""Real logs, split by time where they have one, as `Table`s with fields and counts like those of click-through data.

    movielens_1m(seed=0)        # implicit feedback: each event and 4 items that the user never saw; 1.0 M test rows: enough to see 0.02%
    movielens_100k(seed=0)      # a rating of 4 or 5 against a lower one; from a package, so a fresh machine has it
    open_bandit(seed=0)         # impressions and clicks (0.5%) of a fashion shop
    adult(seed=0)               # census rows, income above 50K

The last three are too small to decide a relative change of 0.02% (studies.loka.pricing.metrics.detectable_change says what they can): they show
distributions. `seed` shuffles the training part and draws the negatives, by Philox. Nothing here scales or drops a feature; counts are log1p.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kernels.exact.philox import philox_integers
from studies.loka.data import sources
from studies.loka.data.table import Table, encode, shuffled

__all__ = ["TABLES", "adult", "movielens_100k", "movielens_1m", "open_bandit"]

NEGATIVES = 4
TEST_SHARE = 0.2


def movielens_1m(seed: int, *, users: int | None = None) -> Table:
    """MovieLens-1M as implicit feedback: the last fifth of each user's events is the test part; `users` takes the first so many only.

    Fields: user, item, the three items before; counts: events before, the item's events in the training part. Raises AssetError.
    """
    return sequences(sources.path("ml-1m-sequences"), seed, users=users, source=sources.sha256("ml-1m-sequences"))


def sequences(path: Path, seed: int, *, users: int | None = None, source: str = "", negatives: int = NEGATIVES) -> Table:
    """Lines of `user TAB items in time order` under a title line, as `movielens_1m` has it. Raises ValueError for other lines."""
    items_of = _read_sequences(path)[:users]
    length = np.array([len(s) for s in items_of])
    catalogue, item = np.unique(np.concatenate(items_of), return_inverse=True)
    item = item.astype(np.int64) + 1  # 0 is no item
    user = np.repeat(np.arange(len(length)), length)
    position = np.arange(len(item)) - np.repeat(np.cumsum(length) - length, length)
    is_test = position >= np.ceil((1 - TEST_SHARE) * np.repeat(length, length))
    before = np.stack([np.where(position >= k, np.roll(item, k), 0) for k in (1, 2, 3)], axis=1)
    shown = np.concatenate([item[:, None], _never_seen(user, item, len(catalogue), negatives, seed)], axis=1)  # [events, 1 + negatives]
    events = np.bincount(item[~is_test], minlength=len(catalogue) + 1)
    wide = shown.shape[1]
    repeat = np.repeat(np.arange(len(item)), wide)
    ids = np.concatenate([user[repeat, None], shown.reshape(-1, 1), before[repeat]], axis=1).astype(np.int32)
    dense = np.log1p(np.stack([position[repeat], events[shown.reshape(-1)]], axis=1)).astype(np.float32)
    y = np.tile(np.eye(1, wide, dtype=np.float32)[0], len(item))
    return _split(
        "movielens-1m", ("user", "item", "item-1", "item-2", "item-3"), ("events before", "item's events"), (len(length), *[len(catalogue) + 1] * 4),
        dense, ids, y, is_test[repeat], seed, source,
    )  # fmt: skip


def movielens_100k(seed: int) -> Table:
    """MovieLens-100K: is a rating 4 or 5? The latest fifth of all ratings is the test part. Raises AssetError."""
    names = ("ml-100k-inter", "ml-100k-item", "ml-100k-user")
    inter, item, user = (_read_tokens(sources.path(n)) for n in names)
    of_item = {v: i for i, v in enumerate(item["item_id"])}
    of_user = {v: i for i, v in enumerate(user["user_id"])}
    at_item, at_user = (np.array([of[v] for v in inter[c]]) for of, c in ((of_item, "item_id"), (of_user, "user_id")))
    time = inter["timestamp"].astype(np.float64).astype(np.int64)
    order = np.lexsort((at_item, at_user, time))
    at_item, at_user, rating = at_item[order], at_user[order], inter["rating"].astype(np.float32)[order]
    genre = np.array([c.split(" ")[0] for c in item["class"]])
    decade = np.array([a[:1] + "0s" for a in user["age"]])
    ids, sizes = encode({
        "user": at_user, "item": at_item, "age": decade[at_user], "gender": user["gender"][at_user], "occupation": user["occupation"][at_user],
        "genre": genre[at_item], "year": item["release_year"][at_item],
    })  # fmt: skip
    dense = np.log1p(np.stack([_seen_before(at_user), _seen_before(at_item)], axis=1)).astype(np.float32)
    return _split(
        "movielens-100k", ("user", "item", "age", "gender", "occupation", "genre", "year"), ("user's ratings before", "item's ratings before"), sizes,
        dense, ids, (rating >= 4).astype(np.float32), _latest(len(rating)), seed, sources.sha256(*names),
    )  # fmt: skip


def open_bandit(seed: int) -> Table:
    """Open Bandit: was the item that was shown clicked? Six logs of 10,000 impressions; the latest fifth of each is the test part. Raises AssetError."""
    import pandas as pd

    names = [f"open-bandit-{p}-{c}" for c in sources.CAMPAIGNS for p in sources.POLICIES]
    logs = []
    for name in names:
        log = pd.read_csv(sources.path(name), index_col=0).sort_values("timestamp", kind="stable").reset_index(drop=True)
        affinity = log.filter(like="user-item_affinity_").to_numpy(np.float32)
        logs.append(log[["item_id", "position", "click", *(f"user_feature_{i}" for i in range(4))]].assign(
            log=name, campaign=name.rsplit("-", 1)[1], test=_latest(len(log)),
            affinity=affinity[np.arange(len(log)), log["item_id"]], total=affinity.sum(1),
        ))  # fmt: skip
    rows = pd.concat(logs, ignore_index=True)
    item = rows["campaign"] + ":" + rows["item_id"].astype(str)
    columns = {"log": rows["log"], "item": item, "position": rows["position"], **{f"user {i}": rows[f"user_feature_{i}"] for i in range(4)}}
    ids, sizes = encode({k: v.to_numpy(str) for k, v in columns.items()})
    dense = np.log1p(np.stack([rows["affinity"], rows["total"]], axis=1)).astype(np.float32)
    return _split("open-bandit", tuple(columns), ("affinity", "affinity to all items"), sizes, dense, ids, rows["click"].to_numpy(np.float32), rows["test"].to_numpy(), seed, sources.sha256(*names))


def adult(seed: int) -> Table:
    """Adult (census income): is the income above 50K? It has no time; every fifth row is the test part. Raises AssetError; needs pandas with pyarrow."""
    import pandas as pd

    rows = pd.read_parquet(sources.path("adult"))
    numbers = ("age", "fnlwgt", "educational-num", "capital-gain", "capital-loss", "hours-per-week")
    fields = tuple(c for c in rows.columns if c not in (*numbers, "income"))
    ids, sizes = encode({c: rows[c].to_numpy(str) for c in fields})
    dense = np.log1p(rows[list(numbers)].to_numpy(np.float64)).astype(np.float32)
    y = (rows["income"] == ">50K").to_numpy(np.float32)
    return _split("adult", fields, numbers, sizes, dense, ids, y, np.arange(len(rows)) % 5 == 4, seed, sources.sha256("adult"))


TABLES: dict[str, Callable[[int], Table]] = {
    "movielens-1m": movielens_1m, "movielens-100k": movielens_100k, "open-bandit": open_bandit, "adult": adult,
}  # fmt: skip


def _split(name, fields, counts, cardinalities, dense, ids, y, is_test, seed, source) -> Table:
    """Where there is a field "user", users were sampled."""
    order = np.flatnonzero(~is_test)
    order = order[shuffled(len(order), seed)]
    return Table(
        name=name, fields=tuple(fields), counts=tuple(counts), cardinalities=tuple(cardinalities), source=source, unit="user" if "user" in fields else "",
        train=(dense[order], ids[order], y[order]), test=(dense[is_test], ids[is_test], y[is_test]),
    )  # fmt: skip


def _never_seen(user: np.ndarray, item: np.ndarray, items: int, wanted: int, seed: int) -> np.ndarray:
    """[events, wanted] items from 1 to `items` that the event's user has nowhere; uniform, drawn again until it fits."""
    seen = np.unique(user * (items + 1) + item)
    if np.bincount(seen // (items + 1)).max() >= items:
        raise ValueError(f"a negative is an item that its user never saw, got a user who saw all {items} items; leave the user out")
    drawn = np.zeros((len(user), wanted), dtype=np.int64)
    open_rows, stream = np.arange(drawn.size), 1
    while len(open_rows):
        flat = drawn.reshape(-1)
        flat[open_rows] = (philox_integers(len(open_rows), seed, stream).astype(np.uint64) * np.uint64(items) >> np.uint64(32)).astype(np.int64) + 1
        key = user[open_rows // wanted] * (items + 1) + flat[open_rows]
        at = np.minimum(np.searchsorted(seen, key), len(seen) - 1)
        open_rows, stream = open_rows[seen[at] == key], stream + 1
    return drawn


def _read_sequences(path: Path) -> list[np.ndarray]:
    lines = path.read_text("utf-8").splitlines()[1:]
    found = []
    for number, line in enumerate(lines, start=2):
        parts = line.split("\t")
        if len(parts) != 2 or not all(p.isdecimal() for p in parts[1].split(" ")):
            raise ValueError(f"a line is a user, a tab and item numbers with blanks between them, got line {number} of {path}: {line[:60]!r}")
        found.append(np.array(parts[1].split(" "), dtype=np.int64))
    if not found:
        raise ValueError(f"a log has users, got none in {path}")
    return found


def _read_tokens(path: Path) -> dict[str, np.ndarray]:
    """Columns of a RecBole file: tab-separated, with `name:type` titles."""
    title, *lines = path.read_text("utf-8").splitlines()
    columns = zip(*(line.split("\t") for line in lines), strict=True)
    return {name.split(":")[0]: np.array(column) for name, column in zip(title.split("\t"), columns, strict=True)}


def _seen_before(value: np.ndarray) -> np.ndarray:
    """How often each entry's value stands in front of it."""
    order = np.argsort(value, kind="stable")
    sizes = np.bincount(value)
    rank = np.arange(len(value)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    out = np.empty(len(value), dtype=np.int64)
    out[order] = rank
    return out


def _latest(rows: int) -> np.ndarray:
    return np.arange(rows) >= int((1 - TEST_SHARE) * rows)
