"""Shards of an asset: lossless, in any order and any number of calls; whatever is not whole and ours is refused in one line.

The toy asset is 2.6 MB of bytes that a seed gives, so that shards of 1 MiB make three.
"""

import hashlib
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from suite import cli
from suite.assets import ASSETS, Asset, AssetError, DataFolder, Derived, fetch, load_bf16, load_fp32
from suite.assets import _store
from suite.assets.shards import MAGIC, MAX_HEADER_BYTES, ShardError, pack, read_header, sources_of, unpack

REPO = Path(__file__).parents[2]
CONTENT = random.Random(7).randbytes(2_600_002)
COUNT = 3


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The toy asset where it is packed, and its three shards; the environment is then that of another host with an empty cache."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "toy.bin").write_bytes(CONTENT)
    (tmp_path / "out").mkdir()
    asset = Asset(name="toy", file="toy.bin", sha256=hashlib.sha256(CONTENT).hexdigest(), size_bytes=len(CONTENT), licence="no redistribution",
                  citation="none", loader="json:load", sources=(DataFolder(path="toy.bin"),))
    monkeypatch.setitem(ASSETS, "toy", asset)
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    monkeypatch.setenv("SUITE_DATA", str(tmp_path / "data"))
    shards = pack("toy", folder=tmp_path / "out", max_mib=1)
    monkeypatch.delenv("SUITE_DATA")
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))
    return shards


def refused(path, words):
    with pytest.raises(AssetError) as error:
        unpack(path)
    text = str(error.value)
    assert "\n" not in text and words in text, text


def rewritten(shard, path, *, body=None, **changes):
    """The shard with other header fields (and another body, with its right sha256 where none is given)."""
    header, offset = read_header(shard)
    body = shard.read_bytes()[offset:] if body is None else body
    fields = {**header.__dict__, "sha256": hashlib.sha256(body).hexdigest(), **changes}
    head = json.dumps({k: v for k, v in fields.items() if v is not Ellipsis}).encode()
    path.write_bytes(MAGIC + len(head).to_bytes(4, "little") + head + body)
    return path


def test_shards_are_no_larger_than_asked_equal_in_size_and_hold_the_file_byte_for_byte(toy):
    assert len(toy) == COUNT and all(p.stat().st_size <= 1 << 20 for p in toy)
    bodies = [p.read_bytes()[read_header(p)[1] :] for p in toy]
    assert b"".join(bodies) == CONTENT and max(map(len, bodies)) - min(map(len, bodies)) <= 1


def test_packing_again_gives_equal_bytes(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_DATA", str(tmp_path / "data"))
    before = [p.read_bytes() for p in toy]
    assert [p.read_bytes() for p in pack("toy", folder=tmp_path / "out", max_mib=1)] == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(COUNT))))
def test_any_order_installs_the_file_with_the_last_shard_and_names_the_missing_ones_before(toy, order):
    for i, n in enumerate(order):
        done = unpack(toy[n])
        assert done.missing == tuple(sorted(k + 1 for k in order[i + 1 :]))
        assert (done.installed is None) == bool(done.missing)
    assert fetch("toy").read_bytes() == CONTENT
    assert sorted(p.name for p in fetch("toy").parent.iterdir()) == [".lock", "toy.bin"]  # nothing staged is left


def test_a_shard_that_came_already_changes_nothing_before_and_after_the_file_is_whole(toy):
    assert not unpack(toy[1]).was_here
    assert unpack(toy[1]).was_here and unpack(toy[1]).missing == (1, 3)
    unpack(toy[0])
    assert not unpack(toy[2]).was_here
    assert all(unpack(p).was_here and unpack(p).installed for p in toy)


def test_shards_of_another_size_are_a_set_of_their_own(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_DATA", str(tmp_path / "data"))
    (tmp_path / "two").mkdir()
    larger = pack("toy", folder=tmp_path / "two", max_mib=1.5)
    monkeypatch.delenv("SUITE_DATA")
    assert len(larger) == 2
    assert unpack(toy[0]).missing == (2, 3) and unpack(larger[0]).missing == (2,)
    assert unpack(larger[1]).installed.read_bytes() == CONTENT


def test_a_damaged_file_in_the_cache_is_replaced(toy, tmp_path):
    home = tmp_path / "cache" / "toy"
    home.mkdir(parents=True)
    (home / "toy.bin").write_bytes(CONTENT[:-1] + b"?")
    for p in toy:
        unpack(p)
    assert fetch("toy").read_bytes() == CONTENT


def test_every_changed_byte_of_a_shard_is_refused_or_changes_nothing_that_is_installed(toy, tmp_path):
    """All header bytes, and a sample of the body's."""
    whole = toy[0].read_bytes()
    offset = read_header(toy[0])[1]
    unpack(toy[1]), unpack(toy[2])
    bad = tmp_path / "bad.shard"
    for at in [*range(offset), *range(offset, len(whole), 100_003), len(whole) - 1]:
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        try:
            done = unpack(bad)
        except ShardError as error:
            assert "\n" not in str(error)
        else:  # the licence is for people: the catalogue's is the one that counts
            assert at < offset and read_header(bad)[0].licence != ASSETS["toy"].licence and done.installed.read_bytes() == CONTENT
            done.installed.unlink()
            unpack(toy[1]), unpack(toy[2])
    refused(bad, "do not have the sha256 of its header")
    assert not (tmp_path / "cache" / "toy" / "toy.bin").exists()


@pytest.mark.parametrize("kept", [0, 10, len(MAGIC), len(MAGIC) + 4, len(MAGIC) + 50, 500, -1])
def test_a_shard_that_was_cut_short_is_refused(toy, tmp_path, kept):
    cut = tmp_path / "cut.shard"
    cut.write_bytes(toy[0].read_bytes()[:kept])
    refused(cut, "shard cut.shard:")
    assert unpack(toy[1]).missing == (1, 3)


def test_a_shard_with_bytes_behind_it_is_refused(toy, tmp_path):
    (tmp_path / "long.shard").write_bytes(toy[0].read_bytes() + b"!")
    refused(tmp_path / "long.shard", "copy the shard again")


# What a stranger may write: each field wrong in turn, with everything else right.
@pytest.mark.parametrize("changes, words", [
    ({"asset": "../../etc/passwd"}, "does not know"), ({"asset": "/etc/passwd"}, "does not know"), ({"asset": "no-such-asset"}, "does not know"),
    ({"asset": "gsm8k"}, "another version"), ({"file_sha256": "0" * 64}, "another version"), ({"file_bytes": 10**15}, "another version"),
    ({"number": 0}, "number 1 to"), ({"number": 4}, "number 1 to"), ({"number": -1}, "number 1 to"), ({"count": 0}, "number 1 to"), ({"count": 10**9}, "number 1 to"),
    ({"number": True}, "wrong type"), ({"number": 1.0}, "wrong type"), ({"number": "../1"}, "wrong type"), ({"asset": ["toy"]}, "wrong type"),
    ({"sha256": "../../x"}, "no sha256"), ({"sha256": ...}, "not one that"), ({"folder": "../x"}, "not one that"), ({"count": 2}, "number 1 to"), ({"count": 4}, "bytes instead of"),
    ({"number": 2}, "bytes instead of"),
])  # fmt: skip
def test_a_header_that_lies_is_refused_in_one_line_and_nothing_is_written(toy, tmp_path, changes, words):
    # the last piece of this file is one byte longer than the first two, so a wrong number shows in its size
    refused(rewritten(toy[2], tmp_path / "liar.shard", **changes), words)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("head", [b"", b"[]", b"{}", b"null", b"[" * 4000, b"\xff\xfe", b'{"number": 1e999}'])
def test_a_header_that_is_no_shards_header_is_refused(toy, tmp_path, head):
    bad = tmp_path / "bad.shard"
    bad.write_bytes(MAGIC + len(head).to_bytes(4, "little") + head + b"x" * 100)
    refused(bad, "shard bad.shard:")


def test_a_header_over_the_limit_is_refused_unread(toy, tmp_path):
    for length in (MAX_HEADER_BYTES + 1, 2**32 - 1):
        (tmp_path / "bad.shard").write_bytes(MAGIC + length.to_bytes(4, "little") + b" " * 100)
        refused(tmp_path / "bad.shard", f"2 to {MAX_HEADER_BYTES} bytes, got {length}")


def test_files_that_are_no_shards_are_refused(toy, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 4000)
    refused(tmp_path / "x.gguf", "no shard of an asset")
    refused(tmp_path, "not a file")
    refused(tmp_path / "absent", "not a file")


def test_a_forged_shard_with_its_own_sha256_never_becomes_the_file_and_good_shards_then_install_it(toy, tmp_path):
    body = bytearray(toy[1].read_bytes()[read_header(toy[1])[1] :])
    body[1000] ^= 1
    forged = rewritten(toy[1], tmp_path / "forged.shard", body=bytes(body))
    unpack(forged), unpack(toy[0])
    refused(toy[2], "its 3 shards together do not have sha256")
    assert not (tmp_path / "cache" / "toy" / "toy.bin").exists()
    unpack(forged), unpack(toy[0])
    unpack(toy[1])  # the true shard takes the forged one's place
    assert unpack(toy[2]).installed.read_bytes() == CONTENT


def test_a_process_killed_while_it_staged_leaves_nothing_that_counts(toy, tmp_path, monkeypatch):
    unpack(toy[0])
    with monkeypatch.context() as m:
        m.setattr(_store.os, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            unpack(toy[1])
    assert unpack(toy[2]).missing == (2,)
    assert unpack(toy[1]).installed.read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_one_line(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "file"))
    refused(toy[0], "cannot be written")


def test_what_is_computed_travels_as_what_it_is_computed_from():
    assert sources_of("smollm2-135m-instruct-bf16") == ("smollm2-135m-instruct",)
    assert sources_of("gsm8k") == ("gsm8k",)
    for asset in ASSETS.values():  # every computed asset says what it reads
        assert all(source.inputs and set(source.inputs) <= set(ASSETS) for source in asset.sources if isinstance(source, Derived))


@pytest.mark.parametrize("max_mib", [0, -1, 0.9, float("nan"), float("inf")])
def test_a_size_out_of_range_is_refused_before_anything_is_fetched(toy, tmp_path, max_mib):
    with pytest.raises(ValueError, match="got max_mib="):
        pack("toy", folder=tmp_path / "out", max_mib=max_mib)


def test_the_command_packs_prints_the_licence_and_unpacks_in_two_calls(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SUITE_DATA", str(tmp_path / "data"))
    assert cli.main(["assets", "pack", "toy", "--max-mib", "1", "--to", str(tmp_path / "out")]) == 0
    assert "licence no redistribution" in capsys.readouterr().out and read_header(toy[0])[0].licence == "no redistribution"
    monkeypatch.delenv("SUITE_DATA")
    assert cli.main(["assets", "unpack", str(toy[2])]) == 0
    assert "1 of 3 shards are here; missing 1-of-3, 2-of-3" in capsys.readouterr().out
    assert cli.main(["assets", "unpack", str(toy[0]), str(toy[1])]) == 0
    assert "toy: installed" in capsys.readouterr().out and fetch("toy").read_bytes() == CONTENT


def test_the_command_takes_good_shards_beside_a_bad_one_and_exits_1(toy, tmp_path, capsys):
    (tmp_path / "bad.shard").write_bytes(b"\x1b[31mnothing")
    assert cli.main(["assets", "unpack", *map(str, toy), str(tmp_path / "bad.shard")]) == cli.EXIT_FAILED
    out = capsys.readouterr()
    assert "toy: installed" in out.out and out.err.count("\n") == 1 and "shard bad.shard" in out.err


def test_the_command_refuses_unknown_names_and_absent_folders(toy, tmp_path, capsys):
    assert cli.main(["assets", "pack", "tyo"]) == cli.EXIT_USAGE
    assert cli.main(["assets", "pack", "toy", "--to", str(tmp_path / "absent")]) == cli.EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 2


def test_packing_and_unpacking_need_neither_torch_nor_mlflow():
    code = ("import sys; from suite.cli import main\nfor c in (['assets', 'pack', 'own-prompts', '--to', sys.argv[1]], ['assets', 'unpack', sys.argv[1] + '/own-prompts.1-of-1.shard']): assert main(c) == 0\n"
            "print(sorted({'torch', 'mlflow', 'triton', 'scipy', 'transformers'} & set(sys.modules)))")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], cwd=REPO, capture_output=True, text=True, check=True, env={"SUITE_CACHE": folder, "PATH": "/usr/bin:/bin"})
    assert done.stdout.strip().endswith("[]")


def test_weights_that_came_as_shards_equal_the_directly_loaded_ones_bit_for_bit(tmp_path, monkeypatch):
    try:
        fetch("smollm2-135m-instruct")
    except AssetError as error:
        if "differs" in str(error):
            raise
        pytest.skip(f"the model file is on no source that this machine reaches: {error}")
    direct_fp32, direct_bf16 = load_fp32(), load_bf16()
    shards = pack("smollm2-135m-instruct", folder=tmp_path, max_mib=48)
    assert len(shards) == 2 and all(p.stat().st_size <= 48 << 20 for p in shards)
    for name in ("SUITE_DATA", "SUITE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))
    assert [unpack(p).installed is None for p in reversed(shards)] == [True, False]
    for direct, loaded in ((direct_fp32, load_fp32()), (direct_bf16, load_bf16())):
        assert direct.metadata == loaded.metadata and direct.tensors.keys() == loaded.tensors.keys()
        for name, tensor in direct.tensors.items():
            assert tensor.dtype == loaded.tensors[name].dtype and np.array_equal(tensor.view(np.uint8), loaded.tensors[name].view(np.uint8)), name
