"""Only bundles that git vouches for are published."""

from dataclasses import replace

import pytest

from suite import identity
from suite.bundle import BundleStore, Draft
from suite.commands.publish import MAX_BYTES, refusal
from suite.measure import Result

MODULE = "tests.toy.cells"


@pytest.fixture
def draft():
    cell = {"study": "toy", "measure": f"{MODULE}:answer", "label": "x", "params": {}, "seed": 0, "replicate": 0, "needs": {}, "inputs": {}, "assets": {}}
    return Draft(cell=cell, point="0" * 64, key="1" * 64, code=identity.code_digest(MODULE), environment={}, commit="c" * 40, dirty=True, started_at="t", duration_s=1.0, status="OK")


def test_a_bundle_of_this_checkouts_code_may_be_published(tmp_path, draft):
    assert refusal(BundleStore(tmp_path).write(draft), clean=True) is None


@pytest.mark.parametrize("change, clean, words", [({}, False, "not committed"), ({"status": "FAILED"}, True, "FAILED"), ({"commit": "unknown"}, True, "SUITE_COMMIT"), ({"code": "f" * 64}, True, "not this checkout's")])
def test_what_git_cannot_vouch_for_is_refused_with_the_reason(tmp_path, draft, change, clean, words):
    assert words in refusal(BundleStore(tmp_path).write(replace(draft, **change)), clean)


def test_a_large_bundle_is_refused(tmp_path, draft):
    import numpy as np

    noise = np.random.Generator(np.random.Philox(0)).integers(0, 256, MAX_BYTES + 1000, dtype=np.uint8)
    assert "the limit is" in refusal(BundleStore(tmp_path).write(draft, Result(arrays={"x": noise})), clean=True)
