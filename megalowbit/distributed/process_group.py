"""Identity of a process (rank, local rank, world size) under any launcher, and small collectives.

torchrun and the DeepSpeed launcher export `RANK`, `LOCAL_RANK` and `WORLD_SIZE`; `srun` exports
`SLURM_PROCID`, `SLURM_LOCALID` and `SLURM_NTASKS`; a plain `python` exports nothing and is rank 0 of 1.
DeepSpeed reads only the first form (without it, DeepSpeed tries MPI), so `export` rewrites the others. If a
launcher runs inside `srun`, its ranks see both forms and the launcher's variables take precedence.
The engine creates all process groups but the default one and that of the hosts (`group_of_hosts`).
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalowbit.errors import UserError, shown

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SLURM_NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
DEFAULT_PORT = 29500
MOST_DIGITS = 18  # of a number in a variable; it then fits into 64 bits
LAST_PORT = 2**16 - 1
FIRST_SLURM_PORT, SLURM_PORTS = 15000, 16381  # below the ports that systems assign to clients; a prime
NODE_OF_LIST = re.compile(r"(?:[^,\[\]\s]|\[[\d,-]+\])+")


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """One process of a job.

    Attributes:
        rank: 0 … world_size-1 over all nodes.
        local_rank: 0 … processes on this node - 1; the device index.
        world_size: processes in the job.
        launcher: `"environment"` (torchrun, deepspeed), `"slurm"` or `"single"`.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: str = "single"

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for the whole job."""
        return self.rank == 0


def identify(environ: MutableMapping[str, str] | None = None) -> ProcessIdentity:
    """Read this process's identity from the environment.

    Raises:
        UserError: a rank variable is set without the others, is not an integer, or is out of range.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_names({name: name for name in SLURM_NAMES}, environ, "environment")
    # A batch script itself also sees SLURM_PROCID; only a step started by srun has SLURM_STEP_ID.
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _from_names(SLURM_NAMES, environ, "slurm")
    return ProcessIdentity()


def local_size(environ: Mapping[str, str] | None = None) -> int:
    """Processes of the job on this node, as the launcher sets them; 1 if it does not."""
    environ = os.environ if environ is None else environ
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), 1)


def check_local_devices(identity: ProcessIdentity, num_devices: int, kind: str = "cuda") -> None:
    """Check that this process has a device of its own; torch would report an invalid device ordinal.

    Args:
        identity: this process.
        num_devices: the number of devices that this process sees.
        kind: torch's name of the devices.

    Raises:
        UserError: there are fewer devices than processes; the first process without one prints it.
    """
    if identity.local_rank < num_devices:
        return
    size = max(local_size(), identity.local_rank + 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shows = "" if visible is None else f", CUDA_VISIBLE_DEVICES={shown(visible)}"
    error = UserError(
        f"{size} processes on {socket.gethostname()}, but local rank {identity.local_rank} sees "
        f"{num_devices} {kind} devices{shows}: start one process for each device "
        f"(deepspeed --num_accelerators {num_devices}, torchrun --nproc-per-node {num_devices}), and let "
        "each see all of them (srun without --gpus-per-task and --gpu-bind)"
    )
    error.is_reported = identity.local_rank != num_devices
    raise error


def _from_names(names: dict[str, str], environ: MutableMapping[str, str], launcher: str) -> ProcessIdentity:
    rank = _whole_number(names["RANK"], environ)
    world_size = _whole_number(names["WORLD_SIZE"], environ)
    is_alone = world_size == 1 and names["LOCAL_RANK"] not in environ
    local_rank = 0 if is_alone else _whole_number(names["LOCAL_RANK"], environ)
    if rank >= world_size:
        raise UserError(f"RANK {rank} is out of range for WORLD_SIZE {world_size}: use 0 … {world_size - 1}")
    return ProcessIdentity(rank=rank, local_rank=local_rank, world_size=world_size, launcher=launcher)


def _whole_number(name: str, environ: MutableMapping[str, str]) -> int:
    text = environ.get(name)
    if text is None:
        raise UserError(f"{name} is not set although other rank variables are: set it, or unset the others")
    if not (text.isdecimal() and len(text) <= MOST_DIGITS):
        raise UserError(f"{name} must be a whole number ≥ 0, not {shown(text)}")
    return int(text)


def export(identity: ProcessIdentity, environ: MutableMapping[str, str] | None = None) -> None:
    """Write `identity` under the names that torch and DeepSpeed read; set a master address if there is none.

    A single process gets a free port, so two runs on one machine do not collide. Under `srun` the process's
    place on its node and among the nodes is written as well, as the DeepSpeed launcher does.

    Raises:
        UserError: SLURM's variables cannot be parsed, or MASTER_PORT is not a port.
    """
    environ = os.environ if environ is None else environ
    environ["RANK"] = str(identity.rank)
    environ["LOCAL_RANK"] = str(identity.local_rank)
    environ["WORLD_SIZE"] = str(identity.world_size)
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = _slurm_head(environ) if identity.launcher == "slurm" else "127.0.0.1"
    if "MASTER_PORT" not in environ:
        environ["MASTER_PORT"] = str(_port(identity, environ))
    port = _whole_number("MASTER_PORT", environ)
    if not 1 <= port <= LAST_PORT:
        raise UserError(f"MASTER_PORT {environ['MASTER_PORT']} is not a port: use one of 1 … {LAST_PORT}")
    if identity.launcher == "slurm":
        for name, value in _slurm_places(environ).items():
            environ.setdefault(name, str(value))


def _slurm_head(environ: MutableMapping[str, str]) -> str:
    """First host of a SLURM node list: `n[03-05,9]-ib` → `n03-ib`, `a[1-2]b[3-4]` → `a1b3`."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    match = NODE_OF_LIST.match(nodes)
    if match is None or nodes[match.end() :][:1] not in ("", ","):
        raise UserError(f"SLURM node list {nodes!r} cannot be parsed: set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _slurm_places(environ: MutableMapping[str, str]) -> dict[str, int]:
    """Number of processes on this node, number of nodes and this node's index, as far as SLURM sets them."""
    places = {}
    nodes = "SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
    if nodes in environ and "SLURM_NODEID" in environ:
        names = {"CROSS_RANK": "SLURM_NODEID", "CROSS_SIZE": nodes}
        places = {ours: _whole_number(theirs, environ) for ours, theirs in names.items()}
    local_size = _slurm_local_size(environ)
    if local_size is not None:
        places |= {"LOCAL_WORLD_SIZE": local_size, "LOCAL_SIZE": local_size}
    return places


def _slurm_local_size(environ: MutableMapping[str, str]) -> int | None:
    """Tasks on this node. SLURM lists tasks per node: `2(x3),1` is 2, 2, 2, 1."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts is None or "SLURM_NODEID" not in environ:
        text = environ.get("SLURM_NTASKS_PER_NODE", "")
        return int(text) if text.isdecimal() else None
    node = _whole_number("SLURM_NODEID", environ)
    for count in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", count)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE {counts!r} cannot be parsed: unset it")
        repeats = int(match[2] or 1)
        if node < repeats:
            return int(match[1])
        node -= repeats
    raise UserError(f"SLURM_NODEID {environ['SLURM_NODEID']} is not among the nodes of {counts!r}: unset it")


def _port(identity: ProcessIdentity, environ: MutableMapping[str, str]) -> int:
    if identity.launcher == "slurm":
        # All tasks must compute the same port without communicating. Jobs on one node, including array tasks,
        # differ in their job id; steps of one job may run at the same time; and a process of the previous
        # attempt may still hold its port.
        job, step, restarts = (
            _whole_number(name, environ) if name in environ else 0
            for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        )
        return FIRST_SLURM_PORT + (16 * job + step + restarts) % SLURM_PORTS
    if identity.world_size == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    return DEFAULT_PORT


# torch.distributed is imported at use, because a configuration is checked before torch is loaded (seconds).


def is_initialized() -> bool:
    """Whether a default process group exists, so that collectives reach other processes."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Size of `group` (default: the world); 1 if nothing is initialised."""
    import torch.distributed as dist

    return dist.get_world_size(group) if is_initialized() else 1


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in `group` (default: the world); 0 if nothing is initialised."""
    import torch.distributed as dist

    return dist.get_rank(group) if is_initialized() else 0


def is_true_anywhere(value: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether `value` is true on any rank of `group` (default: the world); one 4-byte all-reduce."""
    if world_size(group) == 1:
        return value
    import torch
    import torch.distributed as dist

    from megalowbit.distributed import collectives

    flag = torch.tensor([int(value)], dtype=torch.int32, device=exchange_device(group))
    collectives.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def group_of_hosts() -> dist.ProcessGroup | None:
    """A group of all ranks for tensors of the CPU, so that the host waits for no device; collective.

    None, the world, if that has a backend for the CPU; under NCCL, a new group over gloo.
    """
    if world_size() == 1 or exchange_device(None).type == "cpu":
        return None
    from megalowbit.distributed import collectives

    return collectives.new_group(range(world_size()), backend="gloo")


def check_numbers_differ(
    source: tuple[object, ...] | None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> None:
    """Reject ranks that round different data with the same random numbers; collective, 8 bytes per rank.

    Args:
        source: the values from which this rank's random numbers are derived; None if it draws none.
        group: the ranks that hold different data (default: the world).
        device: of the exchanged tensor; see `exchange_device`.

    Raises:
        UserError: two ranks have the same source; all ranks of the group raise it.
    """
    if world_size(group) == 1:
        return
    import torch
    import torch.distributed as dist

    from megalowbit.distributed import collectives

    digest = hashlib.blake2b(repr(source).encode(), digest_size=7).digest()
    value = -1 if source is None else int.from_bytes(digest, "little")
    local = torch.tensor([value], dtype=torch.int64, device=exchange_device(group, device))
    everyone = [torch.empty_like(local) for _ in range(world_size(group))]
    collectives.all_gather(everyone, local, group=group)
    holders: dict[int, int] = {}
    for number, found in enumerate(torch.cat(everyone).tolist()):
        first = holders.setdefault(found, number)
        if first != number and found != -1:
            ranks = dist.get_process_group_ranks(group)
            error = UserError(
                f"ranks {ranks[first]} and {ranks[number]} draw the same random numbers for stochastic "
                "rounding: leave rank= out of megalowbit.convert, or pass each its data-parallel rank"
            )
            error.is_on_all_ranks = group is None
            raise error


def exchange_device(group: dist.ProcessGroup | None, device: torch.device | None = None) -> torch.device:
    """The device a small tensor must be on for `group` (default: the world) to exchange it.

    Under NCCL the current GPU; otherwise `device` (None: the CPU).
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cpu") if device is None else device
    if device.type == "cpu" and is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device
