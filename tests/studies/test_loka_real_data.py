"""Real logs: sequences become implicit feedback without leaks, Criteo's format is read as its publisher writes it, and the rest is refused."""

import gzip

import numpy as np
import pytest
import torch

from studies.loka.data import Table, criteo, sources
from studies.loka.data.real import TABLES, adult, movielens_1m, movielens_100k, open_bandit, sequences
from studies.loka.data.table import encode, shuffled
from suite.assets import AssetError

RECIPROCAL_LN = 2**-20  # float32 log1p of small counts, then expm1: 24 bits with a factor of 16 to spare


@pytest.fixture
def log(tmp_path):
    """Three users of 10, 5 and 5 events over 12 items, numbers with gaps."""
    path = tmp_path / "sequences.tsv"
    path.write_text("user\titems\n7\t10 20 30 40 50 60 70 80 90 100\n9\t100 90 80 70 60\n4\t10 30 50 110 120\n")
    return path


def test_each_event_comes_with_items_that_its_user_never_saw(log):
    table = sequences(log, seed=1, negatives=2)
    ids, y = np.concatenate([table.train[1], table.test[1]]), np.concatenate([table.train[2], table.test[2]])
    assert len(y) == 20 * 3 and y.sum() == 20 and table.cardinalities == (3, 13, 13, 13, 13)
    catalogue = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]
    seen = {0: {10, 20, 30, 40, 50, 60, 70, 80, 90, 100}, 1: {100, 90, 80, 70, 60}, 2: {10, 30, 50, 110, 120}}
    for (user, item, *_), label in zip(ids, y, strict=True):
        assert (catalogue[item - 1] in seen[user]) == bool(label)
    assert len({int(i) for u, i, *_ in ids[y == 0] if u == 1}) > 3  # drawn from all that is left, not one of them again and again


def test_the_last_fifth_of_each_user_is_the_test_part_with_the_true_history_before_it(log):
    table = sequences(log, seed=1, negatives=1)
    events = table.test[1][table.test[2] == 1]
    assert events.tolist() == [[0, 9, 8, 7, 6], [0, 10, 9, 8, 7], [1, 6, 7, 8, 9], [2, 12, 11, 5, 3]]
    assert table.fields[2:] == ("item-1", "item-2", "item-3")
    first = table.train[1][(table.train[2] == 1) & (table.train[1][:, 0] == 1)]
    assert [10, 0, 0, 0] in first[:, 1:].tolist()  # no item before the first


def test_counts_look_at_the_past_and_at_the_training_part_only(log):
    table = sequences(log, seed=1, negatives=1)
    before, popularity = np.expm1(table.test[0]).T
    assert np.abs(before[table.test[2] == 1] - [8, 9, 4, 4]).max() < RECIPROCAL_LN * 10
    # item 9 (90) is in the training part of user 1 alone, 10 (100) too; 6 (60) in user 0's; 12 (120) in none
    assert np.abs(popularity[table.test[2] == 1] - [1, 1, 1, 0]).max() < RECIPROCAL_LN * 10


def test_the_seed_moves_negatives_and_order_but_no_event(log):
    a, b, again = sequences(log, seed=1), sequences(log, seed=2), sequences(log, seed=1)
    assert np.array_equal(a.train[1], again.train[1]) and not np.array_equal(a.train[1], b.train[1])
    events = [sorted(map(tuple, t.train[1][t.train[2] == 1])) for t in (a, b)]
    assert events[0] == events[1]


def test_a_user_who_saw_everything_and_lines_that_are_none_are_refused(tmp_path):
    path = tmp_path / "s.tsv"
    path.write_text("user\titems\n1\t1 2 3\n")
    with pytest.raises(ValueError, match="never saw"):
        sequences(path, seed=1)
    path.write_text("user\titems\n1\t1 2 3\n2 4 5\n")
    with pytest.raises(ValueError, match="line 3"):
        sequences(path, seed=1)
    path.write_text("user\titems\n")
    with pytest.raises(ValueError, match="got none"):
        sequences(path, seed=1)


def test_a_table_s_training_part_begins_again_and_its_test_part_ends(log):
    table = sequences(log, seed=1)
    rows = table.rows()
    wrapped = table.batch(1, rows - 1)
    assert torch.equal(wrapped.ids[0], table.batch(0, rows).ids[-1]) and torch.equal(wrapped.ids[1:], table.batch(0, rows - 2).ids)
    assert len(table.batch(0, 1000, part="test")) == table.rows("test") and wrapped.p is None
    with pytest.raises(ValueError, match="stop before"):
        table.batch(1, 1000, part="test")
    with pytest.raises(ValueError, match="'train' or 'test'"):
        table.rows("all")
    with pytest.raises(ValueError, match="cardinality"):
        Table(name="x", fields=("a",), counts=("b",), cardinalities=(2,), source="", train=(np.zeros((1, 1)), np.array([[2]]), np.ones(1)), test=(np.zeros((1, 1)), np.array([[0]]), np.ones(1)))


def test_encoding_and_shuffling():
    ids, sizes = encode({"a": np.array(["x", "b", "x"]), "c": np.array([3, 1, 2])})
    assert ids.tolist() == [[1, 2], [0, 0], [1, 1]] and sizes == (2, 3)
    assert sorted(shuffled(1000, 5)) == list(range(1000)) and shuffled(1000, 5)[:4].tolist() != [0, 1, 2, 3]


# ---- logs of the publishers' formats -----------------------------------------------------------------------------------------------


@pytest.fixture
def files(monkeypatch, tmp_path):
    """Puts texts in the place of the data sets' files."""
    monkeypatch.setattr(sources, "path", lambda name: tmp_path / name)
    return lambda **texts: [(tmp_path / name.replace("_", "-")).write_text(text) for name, text in texts.items()]


def test_movielens_1m_has_more_than_half_a_million_test_rows_from_a_million_events(files):
    """Of its 999,611 events: a user's fraction is rounded down, at most one event for each of 6,040 users, and each event has five rows."""
    assert 5 * (0.2 * 999_611 - 6_040) > 500_000
    files(ml_1m_sequences="user\titems\n" + "".join(f"{u}\t" + " ".join(str(u + i) for i in range(20)) + "\n" for u in range(1, 40)))
    table = movielens_1m(0, users=30)
    assert (table.rows(), table.rows("test")) == (30 * 16 * 5, 30 * 4 * 5) and table.cardinalities[0] == 30
    assert table.train[2].mean() == table.test[2].mean() == np.float32(0.2)
    assert np.bincount(table.units("test")).tolist() == [4 * 5] * 30  # a user is what was sampled


def test_movielens_100k_is_split_by_time_and_counts_what_came_before(files):
    times = [50, 10, 40, 20, 30]  # user 1 item 1, ...; the latest of five is the test part
    files(
        ml_100k_inter="user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(f"{u}\t{i}\t{r}\t{t}\n" for (u, i, r), t in zip([(1, 1, 5), (1, 2, 3), (2, 1, 4), (2, 2, 2), (1, 3, 1)], times)),
        ml_100k_item="item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n1\tA\t1995\tComedy Drama\n2\tB\t1990\tDrama\n3\tC\t1995\tDrama\n",
        ml_100k_user="user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n1\t24\tM\twriter\t1\n2\t53\tF\tother\t2\n",
    )
    table = movielens_100k(0)
    assert (table.rows(), table.rows("test")) == (4, 1) and table.cardinalities == (2, 3, 2, 2, 2, 2, 2)
    assert table.test[2].tolist() == [1.0] and sorted(table.train[2]) == [0, 0, 0, 1]
    assert table.test[1].tolist() == [[0, 0, 0, 1, 1, 0, 1]]  # user 1, item 1, in his twenties, M, writer, comedy, 1995
    assert np.expm1(table.test[0][0]) == pytest.approx([2, 1], rel=RECIPROCAL_LN)  # his third rating, the item's second


def test_open_bandit_has_the_affinity_of_the_item_that_was_shown(files):
    head = ",timestamp,item_id,position,click,propensity_score," + ",".join(f"user_feature_{i}" for i in range(4)) + ",user-item_affinity_0,user-item_affinity_1\n"
    rows = "".join(f"{i},2019-11-2{9 - i} 00:00:00+00:00,{i % 2},{i + 1},{int(i == 0)},0.1,a,b,c,d,3.0,7.0\n" for i in range(5))
    files(**{f"open_bandit_{p}_{c}": head + rows for p in sources.POLICIES for c in sources.CAMPAIGNS})
    table = open_bandit(0)
    assert (table.rows(), table.rows("test")) == (24, 6)
    assert table.test[2].tolist() == [1.0] * 6  # row 0 has the latest time in each log
    assert np.expm1(table.test[0]) == pytest.approx(np.array([[3.0, 10.0]] * 6), rel=RECIPROCAL_LN)
    assert table.cardinalities[:3] == (6, 6, 5)  # logs, items of three campaigns, positions


def test_adult_keeps_every_fifth_row_for_the_test(monkeypatch, tmp_path):
    import pandas as pd

    numbers = {"age": range(10), "fnlwgt": range(10), "educational-num": range(10), "capital-gain": [0] * 10, "capital-loss": [0] * 10, "hours-per-week": [40] * 10}
    pd.DataFrame({"workclass": ["a", "b"] * 5, **numbers, "income": ["<=50K", ">50K"] * 5}).to_parquet(tmp_path / "adult")
    monkeypatch.setattr(sources, "path", lambda name: tmp_path / name)
    table = adult(0)
    assert table.fields == ("workclass",) and (table.rows(), table.rows("test")) == (8, 2)
    assert table.test[2].tolist() == [0.0, 1.0] and np.expm1(table.test[0][:, 0]) == pytest.approx([4, 9], rel=RECIPROCAL_LN)


def test_an_asset_that_is_nowhere_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("SUITE_DATA", str(tmp_path))
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    for load in (movielens_1m, *TABLES.values()):
        with pytest.raises(AssetError, match="SUITE_DATA"):
            load(0)
    with pytest.raises(ValueError, match="one of"):
        sources.path("criteo")


def test_a_log_that_lies_compressed_is_checked_by_what_is_inside(monkeypatch, tmp_path):
    folder = tmp_path / "ctr/open-bandit"
    folder.mkdir(parents=True)
    monkeypatch.setenv("SUITE_DATA", str(tmp_path))
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    (folder / "random.all.csv.gz").write_bytes(gzip.compress(b"not the log"))
    with pytest.raises(AssetError, match="open-bandit-random-all"):
        open_bandit(0)
    (folder / "random.all.csv.gz").write_bytes(gzip.compress(b"not the log" * 1000)[:-9])
    with pytest.raises(AssetError, match="open-bandit-random-all"):
        open_bandit(0)


# ---- Criteo -----------------------------------------------------------------------------------------------------------------------


def line(label="1", counts=None, ids=None) -> str:
    return "\t".join([label, *(counts or ["5"] * 13), *(ids or ["68fd1e64"] * 26)]) + "\n"


def test_criteo_s_lines_give_counts_ids_and_labels(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(line("0", ["1", "-2", "", "999", *["0"] * 9], ["68fd1e64", "", *["0000000a"] * 24]) + line())
    (batch,) = batches_of(path, size=4)
    assert batch.y.tolist() == [0.0, 1.0] and batch.p is None
    assert batch.dense[0, :4].tolist() == pytest.approx([np.log(2), 0.0, 0.0, np.log(1000)], rel=1e-6)
    assert batch.ids[0, :3].tolist() == [1 + 0x68FD1E64 % 999, 0, 11] and batch.ids.shape == (2, 26)


def batches_of(path, size, buckets=1000):
    return list(criteo.batches(path, size=size, buckets=buckets))


def test_criteo_is_read_compressed_in_batches_and_as_a_table(tmp_path):
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress("".join(line(str(i % 2), [str(i)] * 13) for i in range(70)).encode()))
    assert [len(b) for b in batches_of(path, 32)] == [32, 32, 6]
    table = criteo.criteo(path, rows=70, seed=1, buckets=1000)
    assert (table.rows(), table.rows("test")) == (60, 10)
    assert np.rint(np.expm1(table.test[0][:, 0])).tolist() == list(range(60, 70))
    assert sorted(np.rint(np.expm1(table.train[0][:, 0])).tolist()) == list(range(60))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("\t".join(line().split("\t")[1:]), "the test file has no labels"),
        (line().replace("\t", ","), "tab-separated"),
        (line() + line("2"), "line 2"),
        (line(counts=["1.5"] * 13), "whole numbers"),
        (line(ids=["68fd1e6"] * 26), "'68fd1e6' is no id"),
        (line(ids=["0x8fd1e6"] * 26), "is no id"),
        ("", "is empty"),
        ("é" * 99, "damaged or no text"),
    ],
)
def test_files_of_another_format_are_refused(tmp_path, text, rule):
    path = tmp_path / "train.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=rule):
        batches_of(path, size=8)


def test_a_missing_copy_a_cut_one_and_too_many_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="your own copy"):
        batches_of(tmp_path / "none", size=8)
    path = tmp_path / "day_1.gz"
    path.write_bytes(gzip.compress(line().encode() * 500)[:-12])
    with pytest.raises(ValueError, match="damaged"):
        batches_of(path, size=8)
    whole = tmp_path / "train.txt"
    whole.write_text(line() * 9)
    with pytest.raises(ValueError, match="has 9 lines"):
        criteo.criteo(whole, rows=10, seed=0)
    with pytest.raises(ValueError, match="7 or more"):
        criteo.criteo(whole, rows=6, seed=0)
    with pytest.raises(ValueError, match="two buckets"):
        batches_of(whole, size=8, buckets=1)
