"""Set-up: one clear line before any download, a stamp that knows what it stands for."""

import subprocess
import sys

from suite import setup_env
from suite.identity import ROOT


def test_a_machine_that_will_not_do_is_told_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["setup_env", "--venv", str(tmp_path / "venv"), "--torch", "torch", "--triton", "triton"])
    for change, words in (({"platform": "darwin"}, "Linux x86-64"), ({"version_info": (3, 9, 0)}, "Python 3.11")):
        with monkeypatch.context() as m:
            for name, value in change.items():
                m.setattr(setup_env.sys, name, value)
            assert setup_env.main() == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    monkeypatch.setattr(setup_env, "MIN_FREE_GIB", 1e9)
    assert setup_env.main() == 2 and "GiB of free disk" in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()


def test_the_stamp_changes_with_what_is_asked_for():
    assert len({setup_env.wanted("torch==2.13.0", "triton==3.6.0"), setup_env.wanted("torch==2.11.0", "triton==3.6.0"), setup_env.wanted("torch==2.13.0", "triton==3.7.1")}) == 3


def test_an_environment_without_its_stamp_is_not_ready(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert not setup_env.is_ready(tmp_path, "abc")
    (tmp_path / ".ok-abc").touch()
    assert setup_env.is_ready(tmp_path, "abc") and not setup_env.is_ready(tmp_path, "other")


def test_constraints_name_neither_torch_nor_triton_nor_an_address():
    lines = setup_env.CONSTRAINTS.read_text().splitlines()
    assert all("==" in line and "://" not in line and "@" not in line for line in lines)
    assert not {line.partition("==")[0] for line in lines} & {"torch", "triton"}


def test_help_lists_every_target_with_one_line():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("study-demo", "study-%", "test", "soak", "ui", "report", "help"):
        assert any(line.split()[:2] == ["make", target] and len(line.split()) > 3 for line in shown.splitlines()), target
