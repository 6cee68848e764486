"""Finds out whether Triton can compile and launch a kernel here, and why not; imports Triton.

An installed Triton may still fail at its first launch: it builds its driver module with a C compiler, which
needs Python's headers, and its kernels with ptxas, which must know the GPU. The first quantisation of a run
would then end with Triton's stack. So a kernel of one line is launched first, and a failure is explained in
one clause. It takes milliseconds once Triton's cache (`TRITON_CACHE_DIR`) has both.

Triton loads libraries from its cache. If the cache belongs to another user, nothing is launched.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

CACHE_VARIABLE = "TRITON_CACHE_DIR"
SOURCE = "#include <Python.h>\nint megalowbit_probe(void) { return PY_MAJOR_VERSION; }\n"
SECONDS_TO_COMPILE = 60.0
WRITTEN = 7


@triton.jit
def probe_kernel(out, VALUE: tl.constexpr):
    """Write one number."""
    tl.store(out, VALUE)


def why_unusable(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a device, with the remedy; None if they can."""
    reason = why_cache_is_unsafe()
    if reason is not None:
        return reason
    out = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        if device.type == "cuda":
            with torch.cuda.device(device):
                probe_kernel[(1,)](out, VALUE=WRITTEN)
        else:
            probe_kernel[(1,)](out, VALUE=WRITTEN)
        found = int(out.item())
    except Exception as error:  # of Triton, its compilers or the driver: there is no common class
        reason = why_no_extension() or " ".join(str(error).split())[:200] or type(error).__name__
        return f"Triton {triton.__version__} cannot compile a kernel: {reason}"
    if found != WRITTEN:
        return f"Triton {triton.__version__} computes {found} instead of {WRITTEN}: install another version"
    return None


def why_no_extension() -> str | None:
    """Why a C file that includes Python's headers cannot be compiled as Triton does; None if it can."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler found: install gcc, or set CC"
    include = sysconfig.get_paths(scheme=_scheme())["include"]
    with tempfile.TemporaryDirectory(prefix="megalowbit-") as folder:
        source = Path(folder, "probe.c")
        source.write_text(SOURCE)
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/probe.so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE)
        except OSError as error:
            return f"the C compiler {compiler} cannot be run ({error.strerror}): set CC"
        except subprocess.TimeoutExpired:
            return f"the C compiler {compiler} took over {SECONDS_TO_COMPILE:g} s: set CC"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
    first = (lines or [f"exit code {done.returncode}"])[0].replace(f"{folder}/", "")
    remedy = "install Python's headers (python3-dev)" if "Python.h" in first else "set CC to a C compiler"
    return f"the C compiler {compiler} failed ({first}): {remedy}"


def why_cache_is_unsafe() -> str | None:
    """Why kernels must not be loaded from `TRITON_CACHE_DIR`; None if they can. It is created if missing."""
    named = os.environ.get(CACHE_VARIABLE)
    if not named:
        return None
    try:
        Path(named).mkdir(mode=0o700, parents=True, exist_ok=True)
        status = Path(named).stat()
    except OSError as error:
        return f"{CACHE_VARIABLE}={named} cannot be used ({error.strerror}): set it to a folder of yours"
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        return f"others may write to {CACHE_VARIABLE}={named}: set it to a folder of yours"
    return None


def _scheme() -> str:
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme  # Debian's own scheme has no headers
