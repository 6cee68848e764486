"""What this host has: devices and their units, libraries and their versions, compiler, caches.

Facts are plain text by name, which the ranks of a job compare. Each is looked up without changing anything:
the C kernels and a Triton kernel of one line are compiled, as a run would.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalowbit.doctor.disk import file_system_of, is_shared
from megalowbit.doctor.notices import Notice, note, problem, warning
from megalowbit.doctor.target import BF16, FP4, FP8, Target, cpu_target, target_of_device
from megalowbit.engine.versions.extension_locks import stale_lock_lines
from megalowbit.errors import UserError
from megalowbit.pretrain.checks import this_device
from megalowbit.pretrain.estimate.host_memory import host_memory
from megalowbit.pretrain.estimate.memory import GIB
from megalowbit.processor import cpu_name, cpu_units

PACKAGES = ("torch", "deepspeed", "transformers", "triton", "numpy")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY, LEAST_SHARED = Path("/dev/shm"), GIB  # NCCL's buffers between the processes of a host
APEX, NOT_APEX = "NVIDIA's", "another package"
SECONDS = 20.0  # for a program that prints its version


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host.

    Attributes:
        host: its name.
        facts: text by name; equal on all hosts of a healthy job, except `LOCAL_FACTS`.
        gpus: names of its GPUs.
        capability: of the first GPU; None: there is none, or it is AMD's.
        gpu_memory: GiB of the smallest GPU; 0 without one.
        memory: GiB of the host, within the limit of its control group.
        notices: what was found there.
    """

    host: str
    facts: dict[str, str]
    gpus: tuple[str, ...]
    capability: tuple[int, int] | None
    gpu_memory: float
    memory: float
    notices: tuple[Notice, ...]

    @property
    def target(self) -> Target:
        """This machine as a target."""
        if not self.gpus:
            return cpu_target(self.memory)
        return target_of_device(
            self.gpus[0], capability=self.capability, memory=self.gpu_memory, count=len(self.gpus)
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "host": self.host,
            "gpus": list(self.gpus),
            "gpu_memory_gib": self.gpu_memory,
            "memory_gib": self.memory,
            "facts": dict(self.facts),
        }


LOCAL_FACTS = ("cpu cores", "memory")  # may differ between hosts


def inspect_machine(*, processes: int = 1, is_cpu_chosen: bool = False) -> Machine:
    """Look at this host.

    Args:
        processes: of the job; several on GPUs need NCCL.
        is_cpu_chosen: whether the user leaves GPUs unused on purpose (`DS_ACCELERATOR=cpu`, which is also set
            when DeepSpeed is imported on a machine without GPUs).
    """
    device = this_device()
    gpus: tuple[str, ...] = ()
    capability, gpu_memory = None, 0.0
    if device.type == "cuda":
        properties = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        gpus = tuple(each.name for each in properties)
        gpu_memory = min(each.total_memory for each in properties) / GIB
        if torch.version.hip is None:
            capability = torch.cuda.get_device_capability(0)
    memory = host_memory() / GIB
    facts = _facts(gpus, memory)
    notices = [
        *_check_versions(),
        *_check_gpus(gpus, capability, is_cpu_chosen=is_cpu_chosen),
        *_check_kernels(device, facts["C compiler"]),
        *_check_communication(device, processes),
        *_check_locks(),
        *_check_apex(facts["apex"]),
    ]
    return Machine(
        host=socket.gethostname(),
        facts=facts,
        gpus=gpus,
        capability=capability,
        gpu_memory=gpu_memory,
        memory=memory,
        notices=tuple(notices),
    )


def _facts(gpus: Sequence[str], memory: float) -> dict[str, str]:
    return {
        **versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "CUDA of torch": str(torch.version.cuda or torch.version.hip),
        "driver": driver_version(),
        "NCCL": nccl_version(),
        "C compiler": compiler_version() or "none found",
        "apex": apex_kind(),
        "cpu": cpu_name(),
        "cpu units": ", ".join(cpu_units()) or "none known",
        "cpu cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "memory": f"{memory:.0f} GiB",
        "GPUs": ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)) or "none",
    }


def versions() -> dict[str, str]:
    """Installed versions of the libraries that a run needs."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def apex_kind() -> str:
    """`NVIDIA's`, with or without its kernels, `another package` such as PyPI's, or `not installed`."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return "not installed"
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return NOT_APEX
    return f"{APEX}, with{'' if importlib.util.find_spec('amp_C') else 'out'} its kernels"


def driver_version() -> str:
    """That of NVIDIA's driver, from the kernel's module."""
    with suppress(OSError):
        for word in NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace").split():
            if word[:1].isdigit() and word.count(".") >= 1:
                return word
    return "none"


def nccl_version() -> str:
    """That of torch's NCCL."""
    if not torch.distributed.is_nccl_available():
        return "not in this torch"
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError) as error:
        return f"unknown ({type(error).__name__})"


def compiler_version() -> str | None:
    """The C compiler's path and the first line of its version; None: there is none."""
    command = (
        os.environ.get("CC", "").split()
        or [path for path in map(shutil.which, ("cc", "gcc", "clang")) if path][:1]
    )
    if not command:
        return None
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{command[0]}, which cannot be run"
    return (done.stdout.strip().splitlines() or [f"{command[0]}, exit code {done.returncode}"])[0]


def _check_versions() -> Iterator[Notice]:
    from megalowbit.engine.process_start import import_deepspeed
    from megalowbit.engine.versions.installed import check_installed

    try:
        import_deepspeed(is_checked=False)  # sets it up; before any other import of it
        check_installed()
    except UserError as error:
        text, _, fix = str(error).rpartition(": ")
        yield problem("versions", text, fix)


def _check_gpus(
    gpus: tuple[str, ...], capability: tuple[int, int] | None, *, is_cpu_chosen: bool
) -> Iterator[Notice]:
    if not gpus and NVIDIA_DRIVER.exists() and not is_cpu_chosen:
        build = f"torch {torch.__version__}"
        reason = "is built without CUDA" if torch.version.cuda is None else "cannot use them"
        yield problem(
            "gpu-unused",
            f"this host has NVIDIA's driver {driver_version()}, but {build} {reason}: a run would use the "
            "CPUs",
            "install torch for CUDA, free the GPUs for this job (CUDA_VISIBLE_DEVICES), or update the driver",
        )
    if len(set(gpus)) > 1:
        yield problem(
            "gpu-mixed",
            f"GPUs of different kinds in one host ({', '.join(dict.fromkeys(gpus))}): the slowest sets the "
            "pace, and kernels may be chosen differently",
            "choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    if capability is not None:
        units = {"bf16": BF16, "FP8": FP8, "FP4": FP4}
        has = [name for name, least in units.items() if capability >= least]
        lacks = [name for name in units if name not in has]
        text = f"compute capability {capability[0]}.{capability[1]}: units for {', '.join(has) or 'fp16'}"
        yield note("gpu-units", text + (f"; none for {', '.join(lacks)}" if lacks else ""))


def _check_kernels(device: torch.device, compiler: str) -> Iterator[Notice]:
    """Whether kernels can be compiled: Triton's on GPUs, those in C elsewhere."""
    if device.type == "cuda":
        yield from _check_triton(device)
        return
    from megalowbit.quantize.cpu.fp4 import LIBRARY

    reason = LIBRARY.why_unavailable()
    if reason is not None:
        yield warning(
            "c-kernels",
            f"the C kernels cannot be built ({reason}); compiler: {compiler}. Plain torch computes the same "
            "bits, and a run takes about twice as long",
            "install gcc, or set CC",
        )


def _check_triton(device: torch.device) -> Iterator[Notice]:
    if importlib.util.find_spec("triton") is None:
        yield problem(
            "triton",
            "Triton is not installed: plain torch rounds operands, many times slower",
            "pip install triton",
        )
        return
    from megalowbit.quantize.triton.probe import CACHE_VARIABLE, why_unusable

    reason = why_unusable(device)
    if reason is not None:
        yield problem("triton", f"{reason}: plain torch would round operands, many times slower")
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".triton" / "cache").absolute()
    if is_shared(file_system_of(cache)):
        yield warning(
            "triton-cache",
            f"Triton's cache {cache} is on a network file system ({file_system_of(cache)}): all processes of "
            "all hosts read and lock it at the start",
            f"set {CACHE_VARIABLE} to a folder on a local disk",
        )


def _check_communication(device: torch.device, processes: int) -> Iterator[Notice]:
    if device.type != "cuda" or processes == 1:
        return
    if not torch.distributed.is_nccl_available():
        yield problem("nccl", "torch has no NCCL: several GPUs cannot communicate", "install torch for CUDA")
    with suppress(OSError):
        status = os.statvfs(SHARED_MEMORY)
        size = status.f_blocks * status.f_frsize
        if size < LEAST_SHARED:
            yield warning(
                "shared-memory",
                f"{SHARED_MEMORY} has {size / 2**20:.0f} MiB, and NCCL's buffers between the processes of a "
                "host are there",
                "start the container with --ipc=host or --shm-size=8g",
            )


def _check_apex(kind: str) -> Iterator[Notice]:
    is_asked = os.environ.get("MEGALOWBIT_APEX") == "1"
    if is_asked and kind != f"{APEX}, with its kernels":
        yield problem(
            "apex",
            f"MEGALOWBIT_APEX=1 asks for NVIDIA's apex with its kernels (amp_C), and apex is: {kind}",
            "install it from github.com/NVIDIA/apex, or unset the variable",
        )
    elif kind == NOT_APEX:
        yield note(
            "apex",
            "the installed `apex` is not NVIDIA's: the one on PyPI is another package, and nothing here uses "
            "it",
        )
    elif kind.startswith(APEX) and not is_asked:
        yield note(
            "apex",
            f"apex is {kind}; it is not used unless MEGALOWBIT_APEX is 1, because it has not been tested",
        )


def _check_locks() -> Iterator[Notice]:
    """Also those of operators that only other libraries' loops build."""
    for line in stale_lock_lines():
        text, _, fix = line.rpartition(": ")
        yield warning("stale-lock", text, fix)
