"""A real MLflow server that dies in mid-run: the run goes on, its bundles are kept and taken in later."""

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.suite.test_faults import assert_whole, wait_for
from tests.suite.test_tracked_runs import free_port

pytestmark = pytest.mark.soak


def answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).status == 200
    except OSError:
        return False


def test_a_server_killed_in_mid_run_costs_no_bundle(checkout, tmp_path):
    del checkout.env["SUITE_NO_TRACKING"]
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", f"sqlite:///{tmp_path}/server.db",
               "--artifacts-destination", str(tmp_path / "artifacts")]
    server = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(port), 90)
        (checkout.path / "slow.py").write_text("from studies.toy.study import Config\ndef slow(): return Config(slow=12, slow_s=1.0)\n")
        run = checkout.start("run", "toy", "--preset", "slow.py:slow", MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}")
        wait_for(lambda: len(checkout.bundles(status="OK")) >= 6, 90)
        os.killpg(server.pid, signal.SIGKILL)
        output, _ = run.communicate(timeout=180)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert run.returncode == 4 and "bundles are kept" in output and "Traceback" not in output
    assert_whole(checkout, 16)
    assert "16 new" in checkout.suite("ingest", str(checkout.state / "bundles"), check=True).stdout
