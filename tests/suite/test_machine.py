"""What a machine says of itself, what it refuses, and that neither needs torch or tells who owns it."""

import getpass
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from suite import machine as machines
from suite.cell import Needs
from suite.identity import ROOT, canonical_json
from suite.machine import Gpu, Machine, commit, doctor, environment, refusal, this_machine, versions

BASE = Machine(cpu_model="Test CPU 9000", cores=8, memory_gib=16.0, python="3.12.1", torch="2.13.0+cu130", triton="3.6.0", numpy="2.3.5", os="Linux 6.1 x86_64")
H200 = Gpu(index=0, name="NVIDIA H200", memory_gib=139.8)
TWO_H200 = replace(BASE, gpus=(H200, replace(H200, index=1)), driver="580.95.05")
MIXED = replace(BASE, gpus=(H200, Gpu(index=1, name="NVIDIA A100-SXM4-40GB", memory_gib=39.5)), driver="580.95.05")
GH200 = Gpu(index=0, name="NVIDIA GH200 480GB", memory_gib=94.0)
KEYS = {"device_model", "cpu_model", "gpu_model", "driver", "python", "torch", "triton", "numpy", "cores", "machine", "os"}

# ---------------------------------------------------------------- environment and key


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_environment_is_the_allow_list_and_names_no_owner(device):
    env = environment(device)
    assert set(env) == KEYS
    text = canonical_json(env).decode()
    secrets = [socket.gethostname(), str(ROOT), os.path.expanduser("~"), getpass.getuser(), platform.release()]
    assert [s for s in secrets if len(s) > 4 and s in text] == []
    assert "GPU-" not in text and "/" not in env["cpu_model"] + env["os"]


def test_an_environment_names_the_device_that_measured():
    assert environment("cpu", TWO_H200)["device_model"] == "Test CPU 9000" and environment("cpu", TWO_H200)["gpu_model"] == environment("cpu", TWO_H200)["driver"] == ""
    on_gpu = environment("cuda", TWO_H200)
    assert (on_gpu["device_model"], on_gpu["gpu_model"], on_gpu["driver"]) == ("NVIDIA H200", "NVIDIA H200", "580.95.05")
    assert on_gpu["machine"] == environment("cpu", TWO_H200)["machine"]  # one machine, whatever measured


@pytest.mark.parametrize("needs, indices, model", [
    (Needs(device="cuda"), (0,), "NVIDIA H200"), (Needs(device="cuda", gpu_model="A100"), (1, 2), "NVIDIA A100-SXM4-40GB"), (Needs(device="cuda", gpus=2), (1, 2), "NVIDIA A100-SXM4-40GB"),
    (Needs(device="cuda", gpu_memory_gib=100), (0,), "NVIDIA H200"), (Needs(device="cuda", gpu_model="B200"), (), "NVIDIA H200"), (Needs(), (), "Test CPU 9000"),
])  # fmt: skip
def test_a_cell_runs_on_gpus_of_one_model_and_its_device_is_named_after_that_one(needs, indices, model):
    machine = replace(MIXED, gpus=(*MIXED.gpus, replace(MIXED.gpus[1], index=2)))
    assert tuple(g.index for g in machines.gpus_for(needs, machine.gpus)) == indices and machines.device_model(needs, machine) == model
    if indices:
        env = environment("cuda", machine, gpu_model=model)
        assert env["device_model"] == env["gpu_model"] == model


def test_the_gpus_of_a_run_are_the_fewest_that_let_each_cell_run():
    four = replace(MIXED, gpus=tuple(replace(g, index=i) for i, g in enumerate((MIXED.gpus[1], H200, H200, MIXED.gpus[1]))))
    asked = [Needs(), Needs(device="cuda"), Needs(device="cuda", gpu_model="H200", gpus=2)]
    assert machines.gpus_wanted(asked, four) == (0, 1, 2) and machines.gpus_wanted(asked[:1], four) == ()
    assert machines.gpus_wanted([Needs(device="cuda", gpus=3)], four) == ()


@pytest.mark.parametrize("change", [{"cpu_model": "x"}, {"cores": 4}, {"gpus": ()}, {"driver": "1"}, {"python": "3.11.1"}, {"torch": "2.14.0"}, {"triton": ""}, {"numpy": "2.0.0"}, {"os": "x"}])
def test_a_machine_s_id_follows_each_field_of_the_allow_list(change):
    assert replace(TWO_H200, **change).id != TWO_H200.id and len(TWO_H200.id) == 12


def test_a_key_takes_torch_with_its_build_triton_numpy_and_the_driver_for_cuda_only():
    assert versions("cpu", TWO_H200) == {"torch": "2.13.0+cu130", "triton": "3.6.0", "numpy": "2.3.5"}
    assert versions("cuda", TWO_H200) == {"torch": "2.13.0+cu130", "triton": "3.6.0", "numpy": "2.3.5", "driver": "580.95.05"}
    for change in ({"numpy": "2.4.0"}, {"torch": "2.13.0+cu126"}):  # either may give other bits
        assert versions("cpu", replace(TWO_H200, **change)) != versions("cpu", TWO_H200)
    assert environment("cuda", TWO_H200)["torch"] == "2.13.0+cu130"


def test_this_machine_is_looked_at_without_torch_and_agrees_with_it():
    code = "from suite.machine import *; import sys; m = this_machine(); environment('cuda'); versions('cuda'); print([x for x in ('torch', 'numpy') if x in sys.modules]); print(m.torch); import torch; print(torch.__version__)"
    lines = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == "[]" and lines[1] == lines[2]
    here = this_machine()
    assert here is this_machine() and here.cores >= 1 and here.memory_gib > 0 and here.python == platform.python_version() and here.numpy == importlib.metadata.version("numpy")


def test_torch_s_build_is_read_from_its_own_file_and_else_from_metadata(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text("import x\n__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    monkeypatch.setattr(machines.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert machines._torch_version() == "2.11.0+cu130"
    (tmp_path / "version.py").unlink()
    assert machines._torch_version() == importlib.metadata.version("torch")
    monkeypatch.setattr(machines.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machines, "_version", lambda name: "")
    assert machines._torch_version() == ""


# ---------------------------------------------------------------- CPU, GPUs, system


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"model name": "AMD EPYC 9654  96-Core Processor", "cpu family": "25"}, "AMD EPYC 9654 96-Core Processor"),
        ({"model name": "AMD EPYC", "cpu family": "26", "model": "2", "stepping": "1", "flags": "avx2 avx512f"}, "AMD EPYC family 26 model 2 stepping 1 avx512"),
        ({"model name": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cpu family": "6", "model": "79", "stepping": "0", "flags": "avx2"}, "Intel(R) Xeon(R) CPU @ 2.20GHz family 6 model 79 stepping 0 avx2"),
        ({"model name": "Intel(R) Xeon(R) Platinum 8480+", "cpu family": "6"}, "Intel(R) Xeon(R) Platinum 8480+"),
        ({"model name": "QEMU Virtual CPU version 2.5+", "cpu family": "15", "model": "107", "stepping": "1", "flags": "sse2"}, "QEMU Virtual CPU version 2.5+ family 15 model 107 stepping 1"),
        ({}, f"{platform.machine()} CPU"),
    ],
)
def test_a_generic_cpu_name_is_made_specific(info, name):
    assert machines._cpu_model(info) == name


def test_cpuinfo_is_the_first_processor_s(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A: B\nflags\t\t: x y\n\nprocessor\t: 1\nmodel name\t: C\n")
    assert machines._cpuinfo(str(tmp_path / "cpuinfo")) == {"processor": "0", "model name": "A: B", "flags": "x y"}
    assert machines._cpuinfo(str(tmp_path / "absent")) == {}


SMI = "0, NVIDIA H200, 580.95.05, 143771, GPU-aaaa-1\n1, NVIDIA H200, 580.95.05, 143771, GPU-bbbb-2\n2, NVIDIA A100, 580.95.05, [N/A], GPU-bbcc-3\n"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("", []), ("-1", []), ("1", [1]), ("2,0", [2, 0]), ("0,9,1", [0]), ("GPU-bbbb", [1]), ("GPU-bb", []), (" 1 , 0", [1, 0])],
)  # as CUDA reads the variable: it stops at the first entry that names no single device
def test_gpus_are_those_that_cuda_would_show(visible, indices):
    gpus, driver = machines._parse_gpus(SMI, visible)
    assert [g.index for g in gpus] == indices and driver == "580.95.05"


def test_gpu_memory_is_in_gib_and_unknown_is_zero():
    gpus, _ = machines._parse_gpus(SMI, None)
    assert [g.memory_gib for g in gpus] == [140.4, 140.4, 0.0]
    assert "GPU-" not in repr(gpus)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Failed to initialize NVML: Driver/library version mismatch\n"])
def test_an_nvidia_smi_without_gpus_gives_none(text):
    assert machines._parse_gpus(text, None) == ((), "")


def test_a_tool_that_fails_hangs_or_is_missing_is_no_answer():
    assert machines._output(["false"]) is machines._output(["no-such-tool-here"]) is machines._output(["sleep", "5"], limit_s=0.1) is None
    assert machines._output(["echo", "hi"]) == "hi\n"


# ---------------------------------------------------------------- refusal


@pytest.mark.parametrize(
    ("needs", "machine", "words"),
    [
        (Needs(device="cuda"), BASE, "needs a CUDA device, and this machine has none"),
        (Needs(device="cuda"), replace(TWO_H200, torch="2.13.0+cpu"), "torch 2.13.0+cpu cannot use one"),
        (Needs(device="cuda", gpus=3), TWO_H200, "wants 3 GPUs, and this machine has 2"),
        (Needs(device="cuda", gpus=2, gpu_model="H200"), MIXED, "wants 2 GPUs, and this machine has 1"),
        (Needs(device="cuda", gpu_model="B200"), TWO_H200, "wants a GPU of model B200, and this machine has NVIDIA H200"),
        (Needs(device="cuda", gpu_model="H200"), replace(BASE, gpus=(GH200,), driver="580"), "wants a GPU of model H200, and this machine has NVIDIA GH200 480GB"),
        (Needs(device="cuda", gpus=2), MIXED, "wants 2 GPUs of one model, and this machine has NVIDIA A100-SXM4-40GB, NVIDIA H200"),
        (Needs(device="cuda", gpu_memory_gib=160), TWO_H200, "wants 160 GiB of GPU memory, and this machine has 139.8 GiB"),
        (Needs(memory_gib=64), BASE, "wants 64 GiB of memory, and this machine has 16.0 GiB"),
        (Needs(packages=("json", "no_such_package_x")), BASE, "needs the package no_such_package_x, not importable"),
    ],
)
def test_a_cell_is_refused_in_one_plain_sentence(needs, machine, words):
    why = refusal(needs, machine)
    assert words in why and "\n" not in why


@pytest.mark.parametrize(
    ("needs", "machine"),
    [
        (Needs(), BASE),
        (Needs(memory_gib=16), BASE),
        (Needs(packages=("numpy", "json")), BASE),
        (Needs(device="cuda", gpus=2, gpu_model="h200", gpu_memory_gib=100), TWO_H200),
        (Needs(device="cuda", gpu_model="A100"), MIXED),
    ],
)
def test_a_cell_that_fits_is_not_refused(needs, machine):
    assert refusal(needs, machine) is None


# ---------------------------------------------------------------- commit


def git(root, *arguments):
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True, env={**os.environ, **identity}).stdout


@pytest.fixture
def checkout_dir(tmp_path, monkeypatch):
    monkeypatch.delenv("SUITE_COMMIT", raising=False)
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "a.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_a_clean_checkout_is_its_head(checkout_dir):
    assert commit(checkout_dir) == (git(checkout_dir, "rev-parse", "HEAD").strip(), False)


@pytest.mark.parametrize(
    ("path", "dirty"),
    [("suite/a.py", True), ("suite/new.py", True), ("kernels/new.py", True), ("notes.txt", False), ("suite/__pycache__/a.cpython-311.pyc", False)],
)  # tracked, untracked, a new room, no code, no source
def test_dirty_means_a_first_party_file_that_head_does_not_hold(path, dirty, checkout_dir):
    (checkout_dir / path).parent.mkdir(exist_ok=True, parents=True)
    (checkout_dir / path).write_text("b = 2\n")
    assert commit(checkout_dir)[1] is dirty


@pytest.mark.parametrize(
    ("told", "expected"),
    [(None, ("unknown", True)), ("a" * 40, ("a" * 40, False)), ("a" * 40 + "-dirty", ("a" * 40, True)), ("$(rm -rf)", ("unknown", True))],
)
def test_without_git_the_commit_is_what_the_environment_says(told, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("SUITE_COMMIT", raising=False)
    if told is not None:
        monkeypatch.setenv("SUITE_COMMIT", told)
    assert commit(tmp_path) == expected


def test_a_checkout_that_git_cannot_read_is_unknown_unless_the_environment_vouches_for_it(tmp_path, monkeypatch):
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    monkeypatch.delenv("SUITE_COMMIT", raising=False)
    assert commit(tmp_path) == ("unknown", True)
    monkeypatch.setenv("SUITE_COMMIT", "b" * 40)
    assert commit(tmp_path) == ("b" * 40, False)


# ---------------------------------------------------------------- doctor


def found(machine):
    return {topic: (ok, text) for topic, ok, text in doctor(machine)}


def test_the_doctor_looks_at_every_topic_in_plain_sentences():
    findings = doctor(this_machine())
    topics = [topic for topic, _, _ in findings]
    for topic in ("CPU bits", "GPU cells", "timing", "C compiler", "mlflow", "jinja2", "typst", "optuna", "triton", "disk", "loopback", "MLFLOW_TRACKING_URI", "SUITE_DATA", "code"):
        assert topics.count(topic) == 1
    assert all(ok in (True, False, None) and text and "\n" not in text for _, ok, text in findings)


def test_the_doctor_names_what_is_missing():
    assert found(BASE)["GPU cells"] == (False, "UNAVAILABLE: this machine has none")
    assert found(TWO_H200)["GPU cells"] == (True, "2 x NVIDIA H200, driver 580.95.05")
    assert "mixed GPUs" in found(MIXED) and "mixed GPUs" not in found(TWO_H200)
    assert found(replace(BASE, numpy="2.4.1"))["triton"][0] is False and found(replace(BASE, triton="3.7.1", numpy="2.4.1"))["triton"][0] is True
    assert found(replace(BASE, triton=""))["triton"][0] is False and found(replace(BASE, numpy=""))["CPU bits"][0] is False


def test_the_doctor_warns_of_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0, 0))
    assert found(BASE)["timing"][0] is False
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0, 0))
    assert found(BASE)["timing"][0] is True and found(replace(BASE, cores=2))["timing"][0] is None


def test_the_doctor_warns_of_the_other_package_called_kernels(monkeypatch):
    version = machines._version
    monkeypatch.setattr(machines, "_version", lambda p: "0.11.0" if p == "kernels" else version(p))
    assert found(BASE)["kernels"][0] is False and "Hugging Face" in found(BASE)["kernels"][1]
    monkeypatch.setattr(machines, "_version", lambda p: "" if p == "kernels" else version(p))
    assert "kernels" not in found(BASE)


def test_the_doctor_sees_flushed_subnormals(monkeypatch):
    monkeypatch.setattr(machines, "flushes_subnormals", lambda: True)
    assert found(BASE)["CPU bits"][0] is False


def test_the_doctor_shows_no_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@mlflow.example:5000")
    assert found(BASE)["MLFLOW_TRACKING_URI"][1] == "http://***@mlflow.example:5000"


@pytest.mark.parametrize(("value", "ok"), [("/no/such/folder", False), ("", None)])
def test_the_doctor_says_whether_suite_data_is_a_folder(value, ok, monkeypatch, tmp_path):
    monkeypatch.setenv("SUITE_DATA", value)
    assert found(BASE)["SUITE_DATA"][0] is ok
    monkeypatch.setenv("SUITE_DATA", str(tmp_path))
    assert found(BASE)["SUITE_DATA"][0] is True
