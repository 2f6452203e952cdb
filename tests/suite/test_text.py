"""What is printed holds no password and no control code."""

import os
import sys
from types import SimpleNamespace

import pytest

from suite import cli
from suite.commands import store as commands
from suite.session import Session
from suite.text import clean, masked
from suite.tracking import TrackingError, _line, open_tracker

SECRET = "hunter2"


@pytest.mark.parametrize("text, shown", [
    (f"http://me:{SECRET}@host:5000/x", "http://***@host:5000/x"),
    (f"postgresql+psycopg2://me:{SECRET}@db.example:5432/mlflow", "postgresql+psycopg2://***@db.example:5432/mlflow"),
    (f"postgresql://me:a/{SECRET}@db/mlflow", "postgresql://***@db/mlflow"),  # SQLAlchemy takes these as they are
    (f"postgresql://me:a@{SECRET}@db/mlflow", "postgresql://***@db/mlflow"),
    (f"postgresql://me:a:{SECRET}@db/mlflow", "postgresql://***@db/mlflow"),
    (f"https://{SECRET}@host/x", "https://***@host/x"),  # a token in the place of a user
    (f"a 'http://me:{SECRET}@host' and \"http://u:{SECRET}@other\"", "a 'http://***@host' and \"http://***@other\""),
    (f"mysql://host/db?user=me&password={SECRET}&ssl=1", "mysql://host/db?user=me&password=***&ssl=1"),
    (f"connection to host=db user=me password='{SECRET} x' failed", "connection to host=db user=me password=*** failed"),
    (f"AWS_ACCESS_KEY={SECRET} token={SECRET};", "AWS_ACCESS_KEY=*** token=***;"),
])  # fmt: skip
def test_credentials_are_masked(text, shown):
    assert masked(text) == shown and SECRET not in masked(text)


@pytest.mark.parametrize("text", ["http://host:5000/a", "sqlite:////tmp/a b/mlflow.db", "mail me@host", "5 tokens = 3", "a: b @ c", "file:///x@y/z", "tokens=5", "studies.a.cells:answer"])
def test_ordinary_text_is_left_as_it_is(text):
    assert masked(text) == clean(text) == text


def test_mlflows_own_password_variables_are_masked_wherever_they_appear(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")  # too short to be told from ordinary text
    assert masked(f"401 for me / {SECRET} at t") == "401 for me / *** at t"


def test_control_codes_are_replaced_and_line_breaks_stay():
    assert clean("a\x1b[31m\n\tb\x07\u202e") == "a\N{REPLACEMENT CHARACTER}[31m\n\tb\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.delenv("SUITE_NO_TRACKING", raising=False)
    monkeypatch.setenv("SUITE_STATE", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"postgresql://me:{SECRET}@db.example/mlflow")
    return Session.here()


def test_a_session_names_its_store_without_the_password(session):
    assert session.store_name() == "postgresql://***@db.example/mlflow" and SECRET in session.store_uri()


def test_the_ui_command_shows_no_password_in_what_it_prints_nor_in_its_arguments(session, monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(commands, "_tracker", lambda session: None)
    monkeypatch.setattr(os, "execve", lambda path, argv, env: seen.update(path=path, argv=argv, env=env))
    commands.ui_command(SimpleNamespace(port=5000))
    assert seen["path"] == sys.executable and SECRET not in " ".join(seen["argv"]) and seen["env"]["MLFLOW_BACKEND_STORE_URI"] == session.store_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@host:5000")
    commands.ui_command(SimpleNamespace(port=5000))
    assert SECRET not in capsys.readouterr().out


def test_an_error_that_is_cut_in_the_middle_of_an_address_shows_no_password():
    for padding in range(240, 310):
        assert "hunt" not in _line("http://host", RuntimeError("x" * padding + f" postgresql://me:{SECRET}@db.example/mlflow"))


def test_a_database_whose_driver_is_missing_is_one_line_without_the_password(tmp_path):
    with pytest.raises(TrackingError) as caught:
        open_tracker(f"postgresql+nosuchdriver://me:{SECRET}@db.example/mlflow", tmp_path).rows("demo")
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_command_says_at_the_end_is_cleaned_and_masked(capsys):
    assert cli._say(ValueError(f"got 'postgresql://me:{SECRET}@db/x\x1b[2J'"), 2) == 2
    assert capsys.readouterr().err == "suite: got 'postgresql://***@db/x\N{REPLACEMENT CHARACTER}[2J'\n"


def test_a_run_with_a_password_in_its_store_never_prints_it(checkout):
    del checkout.env["SUITE_NO_TRACKING"]
    done = checkout.suite("run", "toy", "--preset", "smoke", MLFLOW_TRACKING_URI=f"http://me:{SECRET}@127.0.0.1:9")
    claims = checkout.suite("claims", "toy", MLFLOW_TRACKING_URI=f"http://me:{SECRET}@127.0.0.1:9")
    assert done.returncode == 4 and "http://***@127.0.0.1:9" in done.stdout
    assert SECRET not in done.stdout + done.stderr + claims.stdout + claims.stderr
