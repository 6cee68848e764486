"""Start DeepSpeed in this process: accelerator, process group, log level.

DeepSpeed asks for MPI where the rank variables are missing, compiles a shared-memory kernel on CPUs that
training never uses (and fails where there is no compiler), and warns that it found no GPU. All three are
settled here, before its first collective.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import succeed_together
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.versions.installed import check_installed
from megalowbit.errors import TransientError, UserError

logger = logging.getLogger(__name__)

SHARED_MEMORY_OP = "deepspeed_shm_comm"


def start_process_group(
    identity: ProcessIdentity | None = None,
    *,
    timeout: timedelta | None = None,
    dist_init_required: bool | None = None,
) -> ProcessIdentity:
    """Make sure that a process group exists and that DeepSpeed uses it; returns the identity that was used.

    Harmless if called again.

    Args:
        identity: who this process is; read from the environment if not given.
        timeout: after which a collective that does not end fails; torch's default if None.
        dist_init_required: as for `deepspeed.init_distributed`.

    Raises:
        TransientError: the main process cannot be reached, or its port is taken.
        UserError: DeepSpeed, torch or transformers is of another version than the supported one, on any rank.
    """
    identity = _started_identity() or identity or process_group.identify()
    process_group.export(identity)
    deepspeed = import_deepspeed(is_checked=False)
    _check_interface()
    accelerator = deepspeed.get_accelerator()
    # Collectives of Python objects use the current device: it must be this rank's own from the first one on.
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
        check_installed()  # where another DeepSpeed fails in its own way, its version is what to mend
        raise
    _check_installed_together()
    return identity


@cache
def _check_installed_together() -> None:
    """Refuse other versions on all ranks with one line, once a process; collective."""
    succeed_together(check_installed)


def _check_interface() -> None:
    """Refuse a name in GLOO_SOCKET_IFNAME of which Gloo would say that a pointer was null."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in present:
            raise UserError(
                f"GLOO_SOCKET_IFNAME {name} is no network interface of {socket.gethostname()}: "
                f"use one of {', '.join(present)}, or unset it"
            )


def stop_process_group(timeout: timedelta | None = None) -> None:
    """Leave the group together, at the end of a job; every rank must call it.

    Without it the process that serves the group's store may exit while others still talk to it, and theirs
    then fail although all work is done.

    Args:
        timeout: after it, or where the barrier fails, this rank leaves nothing and returns, for the others
            may never come; None: wait for them, and raise what the barrier raises.
    """
    if not process_group.is_initialized():
        return
    if process_group.world_size() > 1:
        if timeout is None:
            dist.barrier()
        elif not _all_ranks_leave(timeout):
            return
    dist.destroy_process_group()


def _all_ranks_leave(timeout: timedelta) -> bool:
    try:
        arrival = dist.barrier(async_op=True)
        if arrival is not None:
            arrival.wait(timeout)
    except RuntimeError as error:  # the error that ends the run has been printed and is the one to see
        logger.debug("ranks did not leave together: %s", error)
        return False
    return True


def import_deepspeed(*, is_checked: bool = True) -> Any:
    """Import deepspeed, on a CPU without its compiler run and its search for a GPU.

    Args:
        is_checked: refuse versions that are not supported; False where `start_process_group` follows, which
            refuses them on all ranks together.
    """
    has_no_device = not torch.accelerator.is_available()
    if has_no_device:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    if deepspeed.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    # said of DeepSpeed's own calls, in every run; the user can do nothing about it
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    log_filters = deepspeed.utils.logger.filters
    if _is_not_false_alarm not in log_filters:
        deepspeed.utils.logger.addFilter(_is_not_false_alarm)
    if is_checked:
        check_installed()
    return deepspeed


def _is_not_false_alarm(record: logging.LogRecord) -> bool:
    # DeepSpeed's own schedulers ask themselves for the rate too early, at every start.
    return "Attempting to get learning rate from scheduler before it has started" not in record.getMessage()


def _started_identity() -> ProcessIdentity | None:
    """Identity in a group that someone else has started, whatever the environment says."""
    if not process_group.is_initialized():
        return None
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return ProcessIdentity(
        rank=rank, local_rank=local_rank, world_size=dist.get_world_size(), launcher="environment"
    )
