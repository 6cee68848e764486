"""Step 0: what the machine has, and whether a kernel launches at all."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.first_hour.commit import commit_of, output_of
from benchmarks.first_hour.findings import Finding, expect, info, skip
from benchmarks.first_hour.session import NO_GPU, ROOT, Session, device_name

SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "afs", "fuse", "wekafs", "panfs")
PACKAGES = ("torch", "triton", "deepspeed", "transformers", "numpy")
NOT_THROTTLING = 0x1 | 0x2 | 0x4  # idle, clocks set by a user, or the power limit under load


def check(session: Session) -> Iterator[Finding]:
    """Versions, health of the GPU, Triton, NCCL, apex and the cache of kernels."""
    facts = environment()
    (session.folder / "environment.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if session.is_gpu:
        yield from health(session)
    else:
        for name in ("compute capability", "ECC errors and throttling", "a Triton kernel launches"):
            yield skip(name, NO_GPU)
    yield from triton_builds(session)
    if session.is_gpu:
        yield expect("NCCL", torch.distributed.is_nccl_available(), nccl_version(), "available")
    else:
        yield skip("NCCL", NO_GPU)
    found = importlib.util.find_spec("amp_C") is not None
    note = "its optimizer is used only if MEGALOWBIT_APEX is 1; see step 8" if found else ""
    yield info("NVIDIA's apex", "importable" if found else "not installed", note=note)
    yield kernel_cache()


def environment() -> dict[str, str]:
    """Versions and names, for the summary."""
    facts = {"python": platform.python_version(), "machine": platform.platform()}
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["CUDA"] = str(torch.version.cuda)
    facts["CPU cores"] = str(len(os.sched_getaffinity(0)))
    facts["commit"] = commit_of(ROOT)
    if torch.cuda.is_available():
        facts["GPUs"] = device_name()
        facts["driver"] = output_of(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"
        )
        facts["NCCL"] = nccl_version()
    return facts


def nccl_version() -> str:
    """NCCL's version, as torch has it."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "unknown"


def health(session: Session) -> Iterator[Finding]:
    """Capability, ECC errors, throttling, and the first launch."""
    major, minor = torch.cuda.get_device_capability()
    yield expect("compute capability", (major, minor) >= (8, 0), f"{major}.{minor}", "≥ 8.0")
    everything = output_of("nvidia-smi", "-q")
    (session.folder / "nvidia-smi.txt").write_text(everything, encoding="utf-8")
    fields = "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active"
    line = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0")
    if line:
        errors, reasons = (part.strip() for part in line.split(","))
        is_known = errors.isdecimal()
        yield expect("ECC", not is_known or int(errors) == 0, errors, "0 errors", " errors")
        reason = int(reasons, 16) if reasons.startswith("0x") else 0
        yield expect("throttling", not reason & ~NOT_THROTTLING, reasons, "none by heat or hardware")
    else:
        yield skip("ECC errors and throttling", "nvidia-smi does not answer; AMD's GPUs are not covered")
    yield launches_a_kernel()


def launches_a_kernel() -> Finding:
    """Whether Triton compiles and launches; its error in one line."""
    from megalowbit.quantize.triton.probe import why_unusable

    reason = why_unusable(torch.device("cuda"))
    return expect("a Triton kernel launches", reason is None, reason is None, "launches", note=reason or "")


def triton_builds(session: Session) -> Iterator[Finding]:
    """What Triton needs to build its launcher: itself, a C compiler, Python's headers."""
    is_needed = session.is_gpu
    if importlib.util.find_spec("triton") is None:
        yield expect("Triton", False, "not installed", "installed", is_hard=is_needed)
        return
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "none")
    yield expect("C compiler", compiler != "none", compiler, "found", is_hard=is_needed)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    yield expect("Python.h", header.exists(), str(header), "exists", is_hard=is_needed)


def kernel_cache() -> Finding:
    """Compiled kernels belong on a local disk: many processes read and lock the cache."""
    path = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache").absolute()
    kind = file_system_of(path)
    is_shared = kind.startswith(SHARED_FILE_SYSTEMS)
    note = f"set TRITON_CACHE_DIR to a folder on a local disk; {path} is shared" if is_shared else str(path)
    return expect(
        "Triton's cache is local", not is_shared, kind, "no network file system", note=note, is_hard=False
    )


def file_system_of(path: Path) -> str:
    """Kind of the file system that holds a path, by /proc/mounts."""
    best, kind = "", "unknown"
    mounts = Path("/proc/mounts")
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else ():
        _, point, found = line.split()[:3]
        is_above = path == Path(point) or Path(point) in path.parents
        if is_above and len(point) >= len(best):
            best, kind = point, found
    return kind
