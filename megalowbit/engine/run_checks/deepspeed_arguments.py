"""Checks the arguments that `megalowbit.initialize` shares with `deepspeed.initialize`.

A script can replace one call by the other: the arguments have the same names in the same order, and each has
the same effect or is rejected by name. Our further arguments are keyword-only.
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

OF_ARGS = ("deepspeed_config", "deepscale_config")  # the second is DeepSpeed's old name
Config = str | Path | dict[str, Any] | DeepSpeedConfigParts


def require_model(model: object, args: object) -> torch.nn.Module:
    """Check and return the model.

    Raises:
        UserError: it is missing, is not a module, or was passed as the first argument.
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
    """The configuration, given as `config`, `config_params` or `args.deepspeed_config`.

    Raises:
        UserError: it is missing, given twice, or neither a path nor a dict.
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
    """Reject invalid numbers and a device mesh.

    Raises:
        UserError: names the argument and its value.
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


def check_training_data(training_data: object) -> None:
    """Reject what DeepSpeed takes for a data set and fails on later: a tensor, an array or a DataLoader.

    Raises:
        UserError: names its type and what to pass.
    """
    remedy = None
    if isinstance(training_data, torch.utils.data.DataLoader):
        remedy = "pass its data set, loader.dataset; the engine makes the loader"
    elif isinstance(training_data, torch.Tensor) or hasattr(training_data, "__array__"):
        remedy = "pass a data set, such as list(rows)"
    elif training_data is not None and not hasattr(training_data, "__getitem__"):
        remedy = "pass a torch.utils.data.Dataset"
    if remedy is not None:
        raise UserError(f"training_data is a {type(training_data).__name__}: {remedy}")


def set_default_port(port: int | None) -> None:
    """Use `port` for the main process if the environment sets none."""
    if port is not None:
        os.environ.setdefault("MASTER_PORT", str(port))


def set_local_rank(args: object, local_rank: int) -> None:
    """Set `args.local_rank`, as DeepSpeed does for scripts that read it."""
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank


def hidden_size_of(model: torch.nn.Module) -> int | None:
    """Hidden size of a Hugging Face model, the largest if there are several; None if unknown."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            size = getattr(part, name, None)
            if size is not None:
                return max(size) if isinstance(size, list | tuple) else int(size)
    return None
