"""Machine: what this computer is, what it can run, and what it may say of itself in a bundle.

    machine = this_machine()
    refusal(cell.needs, machine)        # None, or one sentence why the cell cannot run here
    environment("cuda")                 # the allow-list that goes into bundles

Standard library only; torch is never imported: versions come from package files, GPUs from
nvidia-smi, the CPU from /proc/cpuinfo. An environment holds no host or user name, path, uuid or dump.
It measures nothing: clocks and temperatures beside a timing belong to suite.telemetry.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite._state import flushes_subnormals
from suite.cell import Needs, is_model
from suite.identity import ROOT, sha256_json
from suite.text import masked

FIRST_PARTY_PATHS = ("kernels", "suite", "studies", "reports", "tests", "Makefile", "pyproject.toml", "constraints")
INTERPRETER_NUMPY_BELOW = (2, 4)  # triton 3.6.0's interpreter fails on numpy 2.4
NVIDIA_SMI_LIMIT_S = 20.0
MIN_FREE_DISK_GIB = 5.0
_CACHES = ("__pycache__", ".pyc")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible GPU; `index` is nvidia-smi's."""

    index: int
    name: str
    memory_gib: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of a computer. Versions are full strings ("2.13.0+cpu"), "" where a package is absent."""

    cpu_model: str
    cores: int
    memory_gib: float
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    python: str = ""
    torch: str = ""
    triton: str = ""
    numpy: str = ""
    os: str = ""

    @property
    def id(self) -> str:
        """12 hex digits over the allow-list: equal for the CPU and GPU cells of one machine."""
        listed = [self.cpu_model, self.cores, [g.name for g in self.gpus], self.driver, self.python, self.torch, self.triton, self.numpy, self.os]
        return sha256_json(listed)[:12]


@functools.cache
def this_machine() -> Machine:
    """The machine at hand, looked at once a process."""
    gpus, driver = _gpus()
    return Machine(cpu_model=_cpu_model(_cpuinfo()), cores=len(os.sched_getaffinity(0)), memory_gib=_memory_gib(), gpus=gpus, driver=driver,
                   python=platform.python_version(), torch=_torch_version(), triton=_version("triton"), numpy=_version("numpy"), os=_os_name())


def environment(device: str, machine: Machine | None = None, *, gpu_model: str = "") -> dict[str, Any]:
    """What a bundle says of where it was made: an allow-list of models and versions. `gpu_model`: the GPU's that ran it, else the first one's."""
    m = machine or this_machine()
    gpu = gpu_model or m.gpus[0].name if device == "cuda" and m.gpus else ""
    return {"device_model": gpu or m.cpu_model, "cpu_model": m.cpu_model, "gpu_model": gpu, "driver": m.driver if gpu else "", "python": m.python,
            "torch": m.torch, "triton": m.triton, "numpy": m.numpy, "cores": m.cores, "machine": m.id, "os": m.os}


def versions(device: str, machine: Machine | None = None) -> dict[str, str]:
    """The versions that enter a key: torch with its build ("2.11.0+cu130"), triton, numpy, and the driver for a GPU cell."""
    m = machine or this_machine()
    out = {"torch": m.torch, "triton": m.triton.partition("+")[0], "numpy": m.numpy}
    return {**out, "driver": m.driver} if device == "cuda" else out


def gpus_for(needs: Needs, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that a cell may run on: all of one model, the first that has enough of them. () where none has, and for a CPU cell."""
    if needs.device != "cuda":
        return ()
    fitting = [g for g in gpus if (needs.gpu_model is None or is_model(needs.gpu_model, g.name)) and g.memory_gib >= needs.gpu_memory_gib]
    for model in dict.fromkeys(g.name for g in fitting):
        same = tuple(g for g in fitting if g.name == model)
        if len(same) >= needs.gpus:
            return same
    return ()


def gpus_wanted(needs: Iterable[Needs], machine: Machine) -> tuple[int, ...]:
    """Indices of the fewest GPUs that let each of these cells run, one after another, in nvidia-smi's order of the machine."""
    wanted = {g.index for n in needs for g in gpus_for(n, machine.gpus)[: n.gpus]}
    return tuple(g.index for g in machine.gpus if g.index in wanted)


def device_model(needs: Needs, machine: Machine) -> str:
    """The model of the device that a cell with these needs runs on here, or would if it could."""
    chosen = gpus_for(needs, machine.gpus) or machine.gpus
    return chosen[0].name if needs.device == "cuda" and chosen else machine.cpu_model


def short_model(name: str) -> str:
    """A device model as a narrow column can show it: 'AMD EPYC', 'Intel Xeon', 'NVIDIA H200'."""
    return re.sub(r"\((R|TM)\)|\s+Processor\b|\s+CPU\b.*| family \d+.*", "", name).strip()


def refusal(needs: Needs, machine: Machine) -> str | None:
    """None if the machine can run a cell with these needs, else one sentence why not."""
    if needs.device == "cuda":
        if not machine.gpus:
            return "it needs a CUDA device, and this machine has none"
        if not machine.torch or machine.torch.endswith("+cpu"):
            return f"it needs a CUDA device, and torch {machine.torch or '(absent)'} cannot use one; install a CUDA build"
        fitting = [g for g in machine.gpus if needs.gpu_model is None or is_model(needs.gpu_model, g.name)]
        if not fitting:
            return f"it wants a GPU of model {needs.gpu_model}, and this machine has {_gpu_names(machine)}"
        if len(fitting) < needs.gpus:
            return f"it wants {needs.gpus} GPUs, and this machine has {len(fitting)}"
        if sum(g.memory_gib >= needs.gpu_memory_gib for g in fitting) < needs.gpus:
            return f"it wants {needs.gpu_memory_gib:g} GiB of GPU memory, and this machine has {max(g.memory_gib for g in fitting):.1f} GiB"
        if not gpus_for(needs, machine.gpus):
            return f"it wants {needs.gpus} GPUs of one model, and this machine has {_gpu_names(machine)}"
    if needs.memory_gib > machine.memory_gib:
        return f"it wants {needs.memory_gib:g} GiB of memory, and this machine has {machine.memory_gib:.1f} GiB"
    missing = [p for p in needs.packages if importlib.util.find_spec(p) is None]
    if missing:
        return f"it needs the package{'s' * (len(missing) > 1)} {', '.join(missing)}, not importable here; install with pip"
    absent = [p for p in needs.programs if shutil.which(p) is None]
    if absent:
        return f"it needs the program{'s' * (len(absent) > 1)} {', '.join(absent)}, not on the path here"
    return None


def commit(root: Path) -> tuple[str, bool]:
    """(sha or 'unknown', dirty?) of the checkout; without .git the sha is SUITE_COMMIT ("<sha>" or "<sha>-dirty").

    Dirty means a first-party file that is changed or not tracked: what HEAD's sha does not vouch for.
    """
    told = re.fullmatch(r"([0-9a-f]{7,64})(-dirty)?", os.environ.get("SUITE_COMMIT", "").strip())
    if not (Path(root) / ".git").exists():
        return (told[1], told[2] is not None) if told else ("unknown", True)
    git = ["git", "--no-optional-locks", "-C", str(root)]
    head = _output([*git, "rev-parse", "HEAD"])
    if head is None:
        return (told[1], told[2] is not None) if told else ("unknown", True)  # git is absent or cannot read: SUITE_COMMIT's word counts
    status = _output([*git, "status", "--porcelain", "--untracked-files=all", "--", *FIRST_PARTY_PATHS, ":(exclude)reports/published"])
    if status is None:
        return head.strip(), True
    return head.strip(), any(not any(c in line for c in _CACHES) for line in status.splitlines())


# ---------------------------------------------------------------- looking


def _output(command: list[str], limit_s: float = NVIDIA_SMI_LIMIT_S) -> str | None:
    """A command's standard output, or None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_version() -> str:
    """With the build it is of ("2.11.0+cu130"): some wheels say that in torch/version.py only. Read, not imported."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    found = re.search(r"^__version__ = ['\"]([\w.+-]+)['\"]", file.read_text(), re.MULTILINE) if file and file.is_file() else None
    return found[1] if found else _version("torch")


def _cpuinfo(path: str = "/proc/cpuinfo") -> dict[str, str]:
    """The first processor's entries, {} where there is no such file."""
    try:
        first = Path(path).read_text().partition("\n\n")[0]
    except OSError:
        return {}
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in first.splitlines())}


def _cpu_model(info: Mapping[str, str]) -> str:
    """The CPU's name; a name that many models share gets family, model, stepping and vector extension."""
    name = " ".join(info.get("model name", "").split()) or f"{platform.machine()} CPU"
    without_clock = re.sub(r"@.*|\b[\d.]+ ?GHz", "", name)
    if re.search(r"\d", without_clock) and not re.search(r"qemu|virtual|kvm", name, re.IGNORECASE):
        return name
    flags = info.get("flags", info.get("Features", "")).split()
    isa = next((short for flag, short in (("avx512f", "avx512"), ("avx2", "avx2"), ("sve", "sve"), ("asimd", "neon")) if flag in flags), "")
    fields = [f"{word} {info[key]}" for word, key in (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"), ("part", "CPU part")) if key in info]
    return " ".join([name, *fields, isa]).strip()


def _memory_gib() -> float:
    """Physical memory, or the container's limit where that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
    return round(min(limits) / 2**30, 2)


def _os_name() -> str:
    """Kernel's major.minor, architecture and C library; the rest of a release string may name a host's owner."""
    release = re.match(r"\d+\.\d+", platform.release())
    return " ".join(word for word in (platform.system(), release.group() if release else "", platform.machine(), *platform.libc_ver()) if word)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Visible GPUs in nvidia-smi's order, and the driver's version."""
    if shutil.which("nvidia-smi") is None:
        return (), ""
    text = _output(["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,uuid", "--format=csv,noheader,nounits"])
    return _parse_gpus(text or "", os.environ.get("CUDA_VISIBLE_DEVICES"))


def _parse_gpus(text: str, visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """nvidia-smi's table, cut down to CUDA_VISIBLE_DEVICES; CUDA stops at the first entry that names no device."""
    found: list[tuple[Gpu, str]] = []
    driver = ""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 5 or not row[0].strip().isdigit():
            continue
        index, name, driver, memory_mib, uuid = (field.strip() for field in row)
        memory_gib = float(memory_mib) / 1024 if re.fullmatch(r"[\d.]+", memory_mib) else 0.0
        found.append((Gpu(index=int(index), name=name, memory_gib=round(memory_gib, 2)), uuid))
    if visible is None:
        return tuple(g for g, _ in found), driver
    chosen: list[Gpu] = []
    for wanted in (v.strip() for v in visible.split(",")):
        match = [g for g, uuid in found if wanted and (wanted == str(g.index) or (wanted.startswith("GPU-") and uuid.startswith(wanted)))]
        if len(match) != 1:
            break
        chosen += match
    return tuple(chosen), driver


def _gpu_names(machine: Machine) -> str:
    return ", ".join(sorted({g.name for g in machine.gpus}))


# ---------------------------------------------------------------- doctor

Finding = tuple[str, bool | None, str]  # topic, yes / NO / note, sentence


def doctor(machine: Machine) -> list[Finding]:
    """What this machine can and cannot measure, and what may surprise; True is fine, False is a lack, None is a note."""
    return [_bits(machine), *_gpu_cells(machine), _timing(machine), *_tools(), _triton(machine), *_environment_notes(), _code()]


def _bits(machine: Machine) -> Finding:
    if flushes_subnormals():
        return "CPU bits", False, "this process flushes subnormal numbers to zero, so CPU results would differ from IEEE-754"
    if not machine.torch or not machine.numpy:
        return "CPU bits", False, "torch or numpy is not installed"
    return "CPU bits", True, f"{machine.cpu_model}, {machine.cores} cores, {machine.memory_gib:.1f} GiB; subnormal numbers are kept"


def _gpu_cells(machine: Machine) -> list[Finding]:
    why = refusal(Needs(device="cuda"), machine)
    if why:
        return [("GPU cells", False, f"UNAVAILABLE: {why.removeprefix('it needs a CUDA device, and ')}")]
    found: list[Finding] = [("GPU cells", True, f"{len(machine.gpus)} x {_gpu_names(machine)}, driver {machine.driver}")]
    if len({g.name for g in machine.gpus}) > 1:
        found.append(("mixed GPUs", None, "a cell that names no model runs on the first that has enough GPUs; set CUDA_VISIBLE_DEVICES to choose another"))
    return found


def _timing(machine: Machine) -> Finding:
    load = os.getloadavg()[0]
    if load > 0.5:
        return "timing", False, f"the load average is {load:.1f} on {machine.cores} cores: something else runs, and CPU times would be noisy"
    if machine.cores < 4:
        return "timing", None, f"{machine.cores} cores: the harness and the measured code share them, so CPU times are rough"
    return "timing", True, f"{machine.cores} cores, load average {load:.1f}"


def _tools() -> list[Finding]:
    compiler = next((c for c in (os.environ.get("CC", ""), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    compiler_text = f"{compiler}: the fast exact oracle is built with it" if compiler else "none: the exact oracle uses its slower path"
    found: list[Finding] = [("C compiler", True if compiler else None, compiler_text)]
    for package, use in (("mlflow", "tracking; without it there are bundles only"), ("jinja2", "the HTML report"), ("typst", "the PDF report"), ("optuna", "searches")):
        there = importlib.util.find_spec(package) is not None
        found.append((package, there, f"{_version(package)}, for {use}" if there else f"not importable; needed for {use}"))
    return found


def _triton(machine: Machine) -> Finding:
    if not machine.triton:
        return "triton", False, "not installed: no kernel cell runs here, not even interpreted"
    numpy_version = tuple(int(n) for n in re.findall(r"\d+", machine.numpy)[:2])
    if machine.triton.startswith("3.6.") and numpy_version >= INTERPRETER_NUMPY_BELOW:
        return "triton", False, f"the interpreter of triton {machine.triton} fails on numpy {machine.numpy}; install numpy<2.4"
    return "triton", True, f"{machine.triton} with numpy {machine.numpy}"


def _environment_notes() -> list[Finding]:
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    place = masked(uri) if uri else "not set: the embedded store beside the bundles"
    data = os.environ.get("SUITE_DATA")
    found: list[Finding] = [
        ("disk", free_gib >= MIN_FREE_DISK_GIB, f"{free_gib:.1f} GiB free where the bundles go"),
        ("loopback", *_loopback()),
        ("MLFLOW_TRACKING_URI", None, place),
        ("SUITE_DATA", bool(data and Path(data).is_dir()) if data else None,
         ("a folder" if Path(data).is_dir() else "set, but no such folder") if data else "not set: assets come from packages and official URLs"),
    ]
    if _version("kernels"):
        found.append(("kernels", False, f"Hugging Face's package of that name ({_version('kernels')}) is installed and may hide ours; use a .venv of our own"))
    return found


def _loopback() -> tuple[bool, str]:
    import socket

    try:
        with socket.create_server(("127.0.0.1", 0)):
            return True, "a server can listen on 127.0.0.1"
    except OSError as error:
        return False, f"no server can listen on 127.0.0.1 ({error.strerror}): `make ui` will not work"


def _code() -> Finding:
    sha, dirty = commit(ROOT)
    if sha == "unknown":
        return "code", None, "the commit is unknown (no .git and no SUITE_COMMIT): bundles cannot be published"
    if dirty:
        return "code", None, f"commit {sha[:12]} with changes: bundles are marked dirty and cannot be published"
    return "code", True, f"commit {sha[:12]}, clean"
