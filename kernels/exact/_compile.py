"""Where the exact family's C sources become libraries: one compiler, one set of flags, one cache; and the C that the sources share.

    library, reason = load("linear", PRELUDE + SOURCE)      # (None, why) without a compiler; the caller then has another engine

A source is compiled once per host (`cc -O3 -ffp-contract=off -march=native`) into a user cache folder keyed by its hash, the compiler
and the processor, and loaded by ctypes. It does not try other compilers or flags.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["FLAGS", "FLUSHED", "PRELUDE", "load"]

# what `flushes_subnormals` means, in words
FLUSHED = "subnormals are flushed on a thread of this process: start a new process without torch.set_flush_denormal(True)"

# `vec`: the widest vector of floats that the host has; every lane is an IEEE-754 operation of its own, so the width cannot change bits
PRELUDE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
  #include <immintrin.h>
  typedef __m512 vec;
  #define LANES 16
  #define ZERO() _mm512_setzero_ps()
  #define LOAD(p) _mm512_loadu_ps(p)
  #define STORE(p, v) _mm512_storeu_ps(p, v)
  #define SET1(s) _mm512_set1_ps(s)
  #define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
  #define ADD(a, b) _mm512_add_ps(a, b)
#elif defined(__AVX2__) && defined(__FMA__)
  #include <immintrin.h>
  typedef __m256 vec;
  #define LANES 8
  #define ZERO() _mm256_setzero_ps()
  #define LOAD(p) _mm256_loadu_ps(p)
  #define STORE(p, v) _mm256_storeu_ps(p, v)
  #define SET1(s) _mm256_set1_ps(s)
  #define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
  #define ADD(a, b) _mm256_add_ps(a, b)
#else
  typedef float vec;
  #define LANES 1
  #define ZERO() 0.0f
  #define LOAD(p) (*(p))
  #define STORE(p, v) (*(p) = (v))
  #define SET1(s) (s)
  #define FMA(a, b, c) fmaf(a, b, c)
  #define ADD(a, b) ((a) + (b))
#endif

/* 0 if subnormals are kept on this thread */
int flushes_subnormals(void) {
  volatile float tiny = 1.17549435e-38f, half = 0.5f, kept = tiny * half, back = kept + kept;
  return !(kept != 0.0f && back == tiny);
}
"""
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-march=native", "-shared", "-fPIC")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line for line in lines if line.startswith("flags")), "unknown")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "kernels_exact"


@functools.cache
def load(name: str, source: str) -> tuple[ctypes.CDLL | None, str]:
    """The library built from `source` (about a second at the first call), or None and why there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None, "no C compiler named cc on the path"
    key = hashlib.sha256("\n".join((source, *FLAGS, compiler, _cpu_name())).encode()).hexdigest()[:32]
    path = _cache_folder() / f"{name}_{key}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                text, built = Path(folder) / f"{name}.c", Path(folder) / f"{name}.so"
                text.write_text(source)
                subprocess.run([compiler, *FLAGS, str(text), "-o", str(built), "-lm"], check=True, capture_output=True, text=True)
                os.replace(built, path)
        except (OSError, subprocess.CalledProcessError) as error:
            return None, f"cc failed: {getattr(error, 'stderr', None) or error}"
    try:
        return ctypes.CDLL(str(path)), ""
    except OSError as error:  # built for another system, or a folder from which nothing may be executed
        return None, f"{path} cannot be loaded: {error}"
