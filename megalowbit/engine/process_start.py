"""Starts DeepSpeed in this process: accelerator, process group, log filters.

If rank variables are missing, DeepSpeed looks for MPI. On CPUs it compiles a shared-memory kernel that
training never uses, which fails without a compiler, and warns that there is no GPU. This file prevents all
three before DeepSpeed's first collective.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import succeed_together
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.versions.extension_locks import stale_lock_lines
from megalowbit.engine.versions.installed import check_installed
from megalowbit.errors import TransientError, UserError, shown

logger = logging.getLogger(__name__)

SHARED_MEMORY_OP = "deepspeed_shm_comm"
# the values that torch accepts as deterministic; the first is the faster one
CUBLAS_VARIABLE, DETERMINISTIC_CUBLAS = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# transformers reads it; the kernels know no setting of torch
FLASH_VARIABLE = "FLASH_ATTENTION_DETERMINISTIC"
NOT_DETERMINISTIC = r"(.+?) does not have a deterministic implementation"


def start_process_group(
    identity: ProcessIdentity | None = None,
    *,
    timeout: timedelta | None = None,
    dist_init_required: bool | None = None,
    checks_versions: bool = True,
) -> ProcessIdentity:
    """Make sure that a process group exists and that DeepSpeed uses it; returns this process's identity.

    May be called again.

    Args:
        identity: this process's identity; read from the environment if not given.
        timeout: a collective that takes longer fails; None: torch's default.
        dist_init_required: as for `deepspeed.init_distributed`.
        checks_versions: reject unsupported versions; False if the caller reports them.

    Raises:
        TransientError: the main process cannot be reached, or its port is taken.
        UserError: DeepSpeed, torch or transformers is of another version than the supported one, on any rank;
            or there are more processes than devices.
    """
    identity = _started_identity() or identity or process_group.identify()
    process_group.export(identity)
    deepspeed = import_deepspeed(is_checked=False)
    _check_interface()
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() != "cpu":
        process_group.check_local_devices(identity, accelerator.device_count(), accelerator.device_name())
    # Collectives of Python objects use the current device, which must be this rank's before the first of
    # them.
    accelerator.set_device(identity.local_rank)
    arguments: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        deepspeed.init_distributed(
            dist_backend=accelerator.communication_backend_name(),
            dist_init_required=dist_init_required,
            verbose=False,
            **arguments,
        )
    except dist.DistNetworkError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise TransientError(
            f"no connection to the main process at {address} ({reason}): if another job uses that port, "
            "give the launcher another one (deepspeed --master_port, torchrun --master-port)"
        ) from error
    except Exception:
        if checks_versions:
            check_installed()  # another DeepSpeed version may fail in its own way: report the version instead
        raise
    if checks_versions:
        _check_installed_together()
        if identity.local_rank == 0:
            _warn_of_stale_locks()
    return identity


@cache
def _warn_of_stale_locks() -> None:
    """Name locks that would make the next build of an extension wait for ever, once per process."""
    # the import has turned off the build of this operator, which only DeepSpeed's collectives on CPUs use
    for line in stale_lock_lines(never_built={SHARED_MEMORY_OP}):
        logger.warning(line)


@cache
def _check_installed_together() -> None:
    """Reject unsupported versions on all ranks with one line, once per process; collective."""
    succeed_together(check_installed)


def compute_deterministically() -> None:
    """Make torch use deterministic algorithms only; call it before the first computation on a GPU.

    On GPUs, some gradients are summed by atomic additions in a random order. Attention, embeddings and cuBLAS
    have other algorithms, which are slower. An operation that has none raises an error.

    Raises:
        UserError: CUBLAS_WORKSPACE_CONFIG has a value with which cuBLAS is not deterministic.
    """
    value = os.environ.setdefault(CUBLAS_VARIABLE, DETERMINISTIC_CUBLAS[0])
    if value not in DETERMINISTIC_CUBLAS:
        raise UserError(
            f"{CUBLAS_VARIABLE}={shown(value)} is not deterministic: use one of "
            f"{', '.join(DETERMINISTIC_CUBLAS)}, or unset it"
        )
    os.environ[FLASH_VARIABLE] = "1"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


@contextmanager
def naming_nondeterministic_operations() -> Iterator[None]:
    """Turn torch's error about an operation without a deterministic algorithm into a one-line error."""
    try:
        yield
    except RuntimeError as error:
        match = re.match(NOT_DETERMINISTIC, str(error))
        if match is None:
            raise
        raise UserError(
            f"run.deterministic: {match[1]} has no deterministic algorithm on this device: set it to false, "
            "or leave out what uses this operation"
        ) from error


def _check_interface() -> None:
    """Reject an unknown name in GLOO_SOCKET_IFNAME, for which Gloo would report a null pointer."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in present:
            raise UserError(
                f"GLOO_SOCKET_IFNAME {name} is not a network interface of {socket.gethostname()}: "
                f"use one of {', '.join(present)}, or unset it"
            )


def stop_process_group(timeout: timedelta | None = None) -> None:
    """Leave the process group together at the end of a job; every rank must call it.

    Otherwise the process that serves the group's store may exit while others still use it, and these fail
    although all work is done.

    Args:
        timeout: if the barrier fails or takes longer, return without leaving the group, because other ranks
            may be gone. None: wait without limit, and raise the barrier's error.
    """
    if not process_group.is_initialized():
        return
    if process_group.world_size() > 1:
        if timeout is None:
            collectives.barrier()
        elif not _all_ranks_leave(timeout):
            return
    dist.destroy_process_group()


def _all_ranks_leave(timeout: timedelta) -> bool:
    try:
        arrival = collectives.barrier(async_op=True)
        if arrival is not None:
            arrival.wait(timeout)
    except RuntimeError as error:  # the error that ended the run has already been printed
        logger.debug("ranks did not leave together: %s", error)
        return False
    return True


def import_deepspeed(*, is_checked: bool = True) -> Any:
    """Import deepspeed; on a CPU, without its compiler run and its search for a GPU.

    Args:
        is_checked: reject unsupported versions; False if `start_process_group` follows, which rejects them on
            all ranks together.
    """
    has_no_device = not torch.accelerator.is_available()
    if has_no_device:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    if deepspeed.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    # caused by DeepSpeed's calls in every run; users cannot do anything about it
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    log_filters = deepspeed.utils.logger.filters
    if _is_not_false_alarm not in log_filters:
        deepspeed.utils.logger.addFilter(_is_not_false_alarm)
    if is_checked:
        check_installed()
    return deepspeed


def _is_not_false_alarm(record: logging.LogRecord) -> bool:
    # DeepSpeed's schedulers read their learning rate too early, at every start.
    return "Attempting to get learning rate from scheduler before it has started" not in record.getMessage()


def _started_identity() -> ProcessIdentity | None:
    """Identity in a process group that already exists, whatever the environment says."""
    if not process_group.is_initialized():
        return None
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return ProcessIdentity(
        rank=rank, local_rank=local_rank, world_size=dist.get_world_size(), launcher="environment"
    )
