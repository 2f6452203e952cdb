"""More of tests/suite/test_faults.py: SIGKILL of driver and worker at twenty random moments each, and the harness's own speed."""

import json
import time

import pytest

from tests.suite.test_faults import assert_whole, kill_driver_episodes, kill_worker_episodes

pytestmark = pytest.mark.soak
KILLS = 20
TRIVIAL_CELLS = 1000
MEASURING_S = 120.0


def test_twenty_kills_of_the_driver(checkout):
    kill_driver_episodes(checkout, KILLS, seed=11)


def test_twenty_kills_of_workers(checkout):
    kill_worker_episodes(checkout, KILLS, seed=12)


def test_a_thousand_trivial_cells_take_under_two_minutes(checkout):
    (checkout.path / "many.py").write_text(f"from studies.toy.study import Config\ndef many(): return Config(answers={TRIVIAL_CELLS})\n")
    start = time.monotonic()
    checkout.suite("run", "toy", "--preset", "many.py:many", check=True, timeout_s=600)
    took_s = time.monotonic() - start
    assert_whole(checkout, TRIVIAL_CELLS + 1)
    print(json.dumps({"cells": TRIVIAL_CELLS, "took_s": round(took_s, 1)}))
    assert took_s < MEASURING_S
