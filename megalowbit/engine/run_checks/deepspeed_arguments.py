"""The arguments that `deepspeed.initialize` takes and `megalowbit.initialize` has no use for, or another one.

A script that calls the one may call the other: the arguments have the same names in the same order, and
each does what it does there or is refused by name. Arguments of our own follow, by keyword only.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.errors import UserError, shown
from megalowbit.values import LARGEST, whole_number

OF_ARGS = ("deepspeed_config", "deepscale_config")  # the second is DeepSpeed's old name of the first
Config = str | Path | dict[str, Any] | DeepSpeedConfigParts


def require_model(model: object, args: object) -> torch.nn.Module:
    """The model, where it stands where `deepspeed.initialize` expects it.

    Raises:
        UserError: it is missing, no module, or the first argument.
    """
    if isinstance(args, torch.nn.Module):
        raise UserError(
            "the first argument is args, as in deepspeed.initialize, not the model: pass it as model="
        )
    if model is None:
        raise UserError("model is missing: pass a torch.nn.Module as model=")
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    return model


def find_config(config: Config | None, args: object, config_params: Config | None) -> Config:
    """The configuration, which may come in as `config`, `config_params` or `args.deepspeed_config`.

    Raises:
        UserError: it is missing, given twice, or neither path nor dict.
    """
    given: dict[str, Any] = {"config": config, "config_params": config_params}
    given |= {f"args.{name}": getattr(args, name, None) for name in OF_ARGS}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise UserError("config is missing: pass a path or a dict as config=, or args with deepspeed_config")
    if len(given) > 1:
        raise UserError(f"the configuration is given as {' and as '.join(given)}: pass one of them")
    ((name, value),) = given.items()
    if not isinstance(value, str | Path | dict | DeepSpeedConfigParts):
        raise UserError(f"{name} is a {type(value).__name__}: pass the path of a JSON file, or a dict")
    found: Config = value
    return found


def check_scalars(
    *, seed: object, total_steps: object, timeout: object, mesh_param: object, distributed_port: object
) -> None:
    """Refuse numbers that are none, and a device mesh.

    Raises:
        UserError: names argument and value.
    """
    whole_number("seed", seed, least=-LARGEST)
    if total_steps is not None:
        whole_number("total_steps", total_steps, least=1)
    if timeout is not None and not isinstance(timeout, timedelta):
        raise UserError(f"timeout is {shown(timeout)}: pass a datetime.timedelta")
    if mesh_param is not None:
        raise UserError(
            f"mesh_param = {shown(mesh_param)} cannot be used: sequence parallelism is not supported yet; "
            "leave it out"
        )
    if distributed_port is not None:
        whole_number("distributed_port", distributed_port, least=1, most=65535)


def set_default_port(port: int | None) -> None:
    """Let the main process listen at `port` where the environment names none."""
    if port is not None:
        os.environ.setdefault("MASTER_PORT", str(port))


def set_local_rank(args: object, local_rank: int) -> None:
    """Write the process's own local rank into `args`, as DeepSpeed does for scripts that read it there."""
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank


def hidden_size_of(model: torch.nn.Module) -> int | None:
    """Of a Hugging Face model's configuration, the largest of several; None if it says nothing of that."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            size = getattr(part, name, None)
            if size is not None:
                return max(size) if isinstance(size, list | tuple) else int(size)
    return None
