"""Whatever global state a cell may change is found, and a cell that changes nothing is left alone."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from suite import _state
from suite.identity import ROOT

HERE = os.getcwd()


# name as reported -> (change it, put it back)
CHANGES = {
    "torch matmul precision": (lambda: torch.set_float32_matmul_precision("medium"), lambda: _precision_as_after_import()),
    "torch cuda matmul allow_tf32": (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), lambda: _precision_as_after_import()),
    "torch cuda matmul fp16 reduced precision": (lambda: _reduced("fp16", False), lambda: _reduced("fp16", True)),
    "torch cuda matmul bf16 reduced precision": (lambda: _reduced("bf16", False), lambda: _reduced("bf16", True)),
    "torch cudnn allow_tf32": (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), lambda: setattr(torch.backends.cudnn, "allow_tf32", True)),
    "torch cudnn benchmark": (lambda: setattr(torch.backends.cudnn, "benchmark", True), lambda: setattr(torch.backends.cudnn, "benchmark", False)),
    "torch cudnn deterministic": (lambda: setattr(torch.backends.cudnn, "deterministic", True), lambda: setattr(torch.backends.cudnn, "deterministic", False)),
    "torch sdpa backends": (lambda: torch.backends.cuda.enable_flash_sdp(False), lambda: torch.backends.cuda.enable_flash_sdp(True)),
    "torch deterministic algorithms": (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
    "torch default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "torch default device": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    "torch gradients enabled": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "torch random state": (lambda: torch.rand(1), lambda: None),
    "numpy random state": (np.random.rand, lambda: None),
    "numpy error handling": (lambda: np.seterr(over="raise"), lambda: np.seterr(over="warn")),
    "python random state": (random.random, lambda: None),
    "working directory": (lambda: os.chdir("/"), lambda: os.chdir(HERE)),
    "subnormal numbers flushed to zero": (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    "environment variable TOY_NEW": (lambda: os.environ.__setitem__("TOY_NEW", "1"), lambda: os.environ.pop("TOY_NEW")),
}


def _precision_as_after_import():
    torch.set_float32_matmul_precision("highest")  # leaves "ieee" where the import left "none"
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def _reduced(kind, value):
    setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", value)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_by_name_and_putting_it_back_ends_it(name):
    change, put_back = CHANGES[name]
    before = _state.snapshot()
    try:
        change()
        found = _state.changes(before, _state.snapshot())
    finally:
        put_back()
    assert name in found
    same_family = {n for n in found if n.split()[:1] == name.split()[:1]}  # one switch may show in several torch flags
    assert set(found) == same_family
    if "random state" not in name:
        assert _state.changes(before, _state.snapshot()) == []


@pytest.mark.parametrize(("old", "new"), [("1", "2"), ("1", None)])
def test_a_variable_that_is_altered_or_removed_is_found(old, new, monkeypatch):
    monkeypatch.setenv("TOY_THERE", old)
    before = _state.snapshot()
    monkeypatch.setenv("TOY_THERE", new) if new else monkeypatch.delenv("TOY_THERE")
    assert _state.changes(before, _state.snapshot()) == ["environment variable TOY_THERE"]


def test_a_cell_that_changes_nothing_leaves_nothing():
    before = _state.snapshot()
    a = torch.ones(64, 64)
    generator = torch.Generator().manual_seed(3)
    (a @ torch.rand(64, 64, generator=generator)).sum().item()
    np.random.default_rng(0).random(8)
    random.Random(1).random()
    assert _state.changes(before, _state.snapshot()) == []


def test_a_snapshot_holds_no_value_of_the_environment(monkeypatch):
    monkeypatch.setenv("TOY_SECRET", "hunter2-hunter2")
    assert "hunter2" not in repr(_state.snapshot())


def test_precision_set_by_either_interface_is_found_and_never_raises():
    code = """
import torch
from suite import _state
before = _state.snapshot()
torch.backends.cuda.matmul.fp32_precision = "tf32"
print(_state.changes(before, _state.snapshot()))
torch.backends.fp32_precision = "ieee"
print(_state.changes(before, _state.snapshot()))
"""
    lines = run(code)
    assert "torch cuda matmul fp32 precision" in lines[0] and "torch fp32 precision" in lines[1]


def test_threads_are_watched():
    lines = run("""
import torch
from suite import _state
before = _state.snapshot()
torch.set_num_threads(torch.get_num_threads() + 1)
print(_state.changes(before, _state.snapshot()))
torch.set_num_interop_threads(torch.get_num_interop_threads() + 1)
print(_state.changes(before, _state.snapshot()))
""")
    assert lines == ["['torch threads']", "['torch interop threads', 'torch threads']"]


def test_importing_a_library_is_no_change_but_what_is_set_after_the_import_is():
    lines = run("""
import sys
from suite import _state
before = _state.snapshot()
assert "torch" not in sys.modules and "numpy" not in sys.modules
import torch
print(_state.changes(before, _state.snapshot()))
torch.set_default_dtype(torch.float64); torch.use_deterministic_algorithms(True); torch.backends.cudnn.benchmark = True
torch.set_float32_matmul_precision("high"); torch.set_grad_enabled(False)
print(_state.changes(before, _state.snapshot()))
""")
    assert lines[0] == "[]"
    assert lines[1] == str(["torch cudnn benchmark", "torch default dtype", "torch deterministic algorithms", "torch gradients enabled", "torch matmul precision"])


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


# ---------------------------------------------------------------- CUDA, with torch's answers given


def fake_cuda(monkeypatch, allocated_bytes):
    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, memory_allocated=lambda i: allocated_bytes[0],
                           get_rng_state=lambda i: torch.zeros(16, dtype=torch.uint8))  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


def test_device_memory_left_behind_is_found_even_if_the_cell_was_the_first_to_use_cuda(monkeypatch):
    untouched = _state.snapshot()
    allocated_bytes = [0]
    fake_cuda(monkeypatch, allocated_bytes)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # torch sets it at first use
    clean = _state.snapshot()
    assert _state.changes(untouched, clean) == []
    allocated_bytes[0] = 512
    assert _state.changes(untouched, _state.snapshot()) == _state.changes(clean, _state.snapshot()) == ["cuda 0 allocated bytes"]


@pytest.mark.gpu
def test_a_matmul_on_the_gpu_leaves_nothing_and_a_kept_tensor_is_found():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = _state.snapshot()
    a = torch.ones(256, 256, device="cuda")
    (a @ a).sum().item()
    del a
    assert _state.changes(before, _state.snapshot()) == []
    kept = torch.ones(1024, device="cuda")
    assert _state.changes(before, _state.snapshot()) == ["cuda 0 allocated bytes"]
    del kept
    torch.rand(1, device="cuda")
    after = _state.snapshot()
    torch.rand(1, device="cuda")
    assert _state.changes(after, _state.snapshot()) == ["cuda 0 random state"]
