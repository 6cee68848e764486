"""Checks types and ranges of DeepSpeed's top-level values, before DeepSpeed is imported.

DeepSpeed reads most of them with `dict.get` and uses them seconds or steps later: `steps_per_print = 0`
divides by zero in the first step, a list in the place of an object is an `AttributeError`, and the inverse of
a predivide factor of 1e-300 is infinite in fp32. Blocks that have a pydantic model in DeepSpeed are checked
there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megalowbit.errors import Problems, UserError, shown, unknown_name
from megalowbit.json_text import is_finite_number
from megalowbit.values import is_count

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
ALLREDUCE_OPS = ("mean", "sum")
COMMUNICATION_DTYPES = ("fp32", "fp16", "bf16")
# gradients are multiplied by the factor and by its inverse in fp32; neither product may overflow or underflow
PREDIVIDE_RANGE = (1e-6, 1e6)
MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
Rule = Callable[[str, Any], None]  # takes key and value, raises UserError


def check_value(key: str, value: object, is_valid: bool, rule: str) -> None:
    """Raise `UserError` "`key` = `value` must be `rule`" unless `is_valid`."""
    if not is_valid:
        raise UserError(f"{key} = {shown(value)} must be {rule}")


def unknown_key(block: str, key: str, known: Iterable[str]) -> UserError:
    """The error for a key that is not among the `known` keys of its block."""
    return unknown_name("key", f"{block}.{key}", [f"{block}.{name}" for name in known])


def _object(key: str, value: Any) -> None:
    check_value(key, value, isinstance(value, Mapping), "an object {…}: write one, or remove it")


def _object_or_switch(key: str, value: Any) -> None:
    if not isinstance(value, bool):  # DeepSpeed's old form of ZeRO stage 0 or 1
        _object(key, value)


def _switch(key: str, value: Any) -> None:
    check_value(key, value, isinstance(value, bool), "true or false")


def _count_or_null(key: str, value: Any) -> None:  # null: never, unknown
    check_value(key, value, value is None or is_count(value), "a whole number ≥ 1, or null")


def _predivide_factor(key: str, value: Any) -> None:
    low, high = PREDIVIDE_RANGE
    is_valid = is_finite_number(value) and low <= value <= high
    check_value(key, value, is_valid, f"a number from {low:g} to {high:g} (1: no effect)")


def _one_of(names: Sequence[str], *, is_nullable: bool = True) -> Rule:
    def check(key: str, value: Any) -> None:
        is_default = value is None and is_nullable
        # DeepSpeed accepts upper case too
        if not is_default and (not isinstance(value, str) or value.lower() not in names):
            raise unknown_name(key, value, names)

    return check


# The top-level keys that DeepSpeedConfig and deepspeed.initialize read, without removed features. None: the
# value is checked elsewhere, where the key is rejected or filled in.
RULES: dict[str, Rule | None] = {
    "activation_checkpointing": _object,
    "aio": _object,
    "autotuning": _object,
    "bf16": None,
    "bfloat16": None,
    "checkpoint": _object,
    "comet": _object,
    "comms_logger": _object,
    "communication_data_type": _one_of(COMMUNICATION_DTYPES),
    "compile": _object,
    "csv_monitor": _object,
    "data_efficiency": _object,
    "data_parallel_size": None,
    "data_types": _object,
    "dataloader_drop_last": _switch,
    "datastates_ckpt": _object,
    "disable_allgather": _switch,
    "disable_python_gc": _switch,
    "dump_state": _switch,
    "expert_parallel": _object,
    "flops_profiler": _object,
    "fp16": None,
    "gradient_accumulation_steps": None,
    "gradient_allreduce_op": _one_of(ALLREDUCE_OPS, is_nullable=False),
    "gradient_clipping": None,
    "gradient_predivide_factor": _predivide_factor,
    "hybrid_engine": _object,
    "log_level": _one_of(LOG_LEVELS),
    "managed_gradient_accumulation": None,
    "memory_breakdown": _switch,
    "optimizer": None,
    "pipeline": _object,
    "prescale_gradients": _switch,
    "scheduler": None,
    "seq_parallel_communication_data_type": _one_of(COMMUNICATION_DTYPES),
    "sequence_parallel_size": None,
    "steps_per_print": _count_or_null,
    "tensor_parallel": _object,
    "tensorboard": _object,
    "timers": _object,
    "torch_autocast": _object,
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "use_data_before_expert_parallelism": _switch,
    "vocabulary_size": _count_or_null,
    "wall_clock_breakdown": _switch,
    "wandb": _object,
    "weight_quantization": _object,
    "zero_allow_untested_optimizer": _switch,
    "zero_force_ds_cpu_optimizer": _switch,
    "zero_optimization": _object_or_switch,
}


def check_values(config: Mapping[str, Any]) -> None:
    """Reject top-level values of a wrong type or out of range.

    Unknown keys are ignored here; `keys` rejects them.

    Raises:
        UserError: names the key, its value and the valid values.
    """
    problems = Problems()
    for key, value in config.items():
        rule = RULES.get(key)
        if rule is not None:
            with problems.collect():
                rule(key, value)
    for key, package in MONITOR_PACKAGES.items():
        with problems.collect():
            _check_monitor(key, config.get(key), package)
    problems.raise_any()


def _check_monitor(key: str, block: Any, package: str) -> None:
    is_on = block.get("enabled") if isinstance(block, Mapping) else None
    if is_on not in (None, False) and not is_installed(package):
        raise UserError(
            f"{key}.enabled = {shown(is_on)} needs the package {package}: pip install {package}, "
            "or set it to false"
        )


def is_installed(package: str) -> bool:
    """Whether a package is there, without importing it."""
    spec = importlib.util.find_spec(package)
    # without an origin it is a mere folder of that name, such as the ./wandb of earlier runs
    return spec is not None and spec.origin is not None
