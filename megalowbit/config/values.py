"""Types and ranges of DeepSpeed's top-level values, checked before DeepSpeed is imported.

DeepSpeed reads most of them with `dict.get` and uses them seconds or steps later: `steps_per_print = 0`
divides by zero in the first step, a list where an object belongs is an `AttributeError`, a predivide factor
of 1e-300 is infinite in fp32. What has keys of its own and a pydantic model in DeepSpeed is checked there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from megalowbit.errors import Problems, UserError, shown, unknown_name
from megalowbit.json_text import is_finite_number
from megalowbit.values import is_count

OBJECT_KEYS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "checkpoint",
        "comet",
        "comms_logger",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_types",
        "datastates_ckpt",
        "expert_parallel",
        "flops_profiler",
        "hybrid_engine",
        "pipeline",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "wandb",
        "weight_quantization",
        "zero_optimization",
    }
)
BOOLEAN_KEYS = frozenset(
    {
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "memory_breakdown",
        "prescale_gradients",
        "use_data_before_expert_parallelism",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    }
)
COUNT_KEYS = frozenset({"steps_per_print", "vocabulary_size"})  # null: never, unknown
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
# DeepSpeed takes capitals too; null, where it is allowed, is the default
CHOICES: dict[str, tuple[str, ...]] = {
    "log_level": LOG_LEVELS,
    "gradient_allreduce_op": ("mean", "sum"),
    "communication_data_type": ("fp32", "fp16", "bf16"),
    "seq_parallel_communication_data_type": ("fp32", "fp16", "bf16"),
}
NEEDS_A_CHOICE = frozenset({"gradient_allreduce_op"})
# gradients are multiplied by the factor and by its inverse, in fp32: both must leave room for them
PREDIVIDE_RANGE = (1e-6, 1e6)
MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def check_values(config: Mapping[str, Any]) -> None:
    """Refuse top-level values of a wrong type or out of range.

    Args:
        config: the configuration without its `"megalowbit"` block; unknown keys are not looked at.

    Raises:
        UserError: names the key, its value and what it must be.
    """
    problems = Problems()
    for key, value in config.items():
        with problems.collect():
            _check_value(key, value)
    for key, package in MONITOR_PACKAGES.items():
        with problems.collect():
            _check_monitor(key, config.get(key), package)
    problems.raise_any()


def _check_value(key: str, value: Any) -> None:
    if key in OBJECT_KEYS:
        _check_object(key, value)
    elif key in BOOLEAN_KEYS and not isinstance(value, bool):
        raise UserError(f"{key} = {shown(value)} must be true or false")
    elif key in COUNT_KEYS and value is not None and not is_count(value):
        raise UserError(f"{key} = {shown(value)} must be a whole number ≥ 1, or null")
    elif key in CHOICES and not (value is None and key not in NEEDS_A_CHOICE):
        if not isinstance(value, str) or value.lower() not in CHOICES[key]:
            raise unknown_name(key, value, CHOICES[key])
    elif key == "gradient_predivide_factor":
        low, high = PREDIVIDE_RANGE
        if not is_finite_number(value) or not low <= value <= high:
            raise UserError(
                f"{key} = {shown(value)} must be a number from {low:g} to {high:g} (1: no effect)"
            )


def _check_monitor(key: str, block: Any, package: str) -> None:
    is_on = block.get("enabled") if isinstance(block, Mapping) else None
    if is_on not in (None, False) and not _is_installed(package):
        raise UserError(
            f"{key}.enabled = {shown(is_on)} needs the package {package}: pip install {package}, "
            "or set it to false"
        )


def _check_object(key: str, value: object) -> None:
    # a boolean is DeepSpeed's old way to choose ZeRO stage 0 or 1
    if key == "zero_optimization" and isinstance(value, bool):
        return
    if not isinstance(value, Mapping):
        raise UserError(f"{key} = {shown(value)} must be an object {{…}}: write one, or remove it")


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # without an origin it is no package but a folder of that name, such as the ./wandb of earlier runs
    return spec is not None and spec.origin is not None
