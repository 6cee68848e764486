"""What may change when a run is resumed, and what makes it another run.

A checkpoint brings back the optimizer with its learning rate, the scaler with its scale, the data with its
order. Settings that the checkpoint decides would have no effect, and settings that change the model or its
arithmetic would quietly make one run out of two; both are refused. So is any change of `speculation`, since
every part of it has a say in what products run in, and the decisions in the checkpoint were made under the
former ladder and thresholds. What decides only how long, how often or on how many processes may change, and
of a component what its `may_change` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from megalowbit.config.deepspeed_json import LOOP_SECTIONS
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.errors import UserError, shown
from megalowbit.optim.loss_scale.dynamic import DynamicSettings
from megalowbit.pretrain.components.registry import ALWAYS_ON, COMPONENTS, OPTIONAL

MAY_CHANGE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "scheduler.params.total_num_steps",
    "megalowbit.lr_schedule.total_steps",
    "megalowbit.lr_schedule.decay_steps",
    # how the run is cut over ranks: a checkpoint is read whole and cut anew
    "zero_optimization.*",
    "tensor_parallel.*",
    "pipeline.*",
    "steps_per_print",
    "wall_clock_breakdown",
    "log_level",
    "timers.*",
    "flops_profiler.*",
    "comms_logger.*",
    "tensorboard.*",
    "wandb.*",
    "csv_monitor.*",
    "megalowbit.run.steps",
    "megalowbit.run.name",
    "megalowbit.run.max_consecutive_skips",
    "megalowbit.run.overflow_retries",
    "megalowbit.watchdog.*",
    "megalowbit.checkpoint.*",
    "megalowbit.telemetry.*",
    # paths: what they hold is compared by fingerprint (data) and by value (model)
    "megalowbit.data.cache_dir",
    "megalowbit.data.corpus",
    "megalowbit.data.tokenizer",
    "megalowbit.model.config",
    "megalowbit.model.checkpoint",
    *(pattern for component in COMPONENTS for pattern in component.may_change),
)
# Settings that earlier versions did not write down: their runs had what is the default now.
ADDED_LATER = (
    "regularizer", "gradient_norm", "autocast", "fp32_norms", "layer_scaling", "log_num_zeros_in_grad",
)  # fmt: skip
# Said first: other settings have changed because of them.
REPORTED_FIRST = (
    "megalowbit.precision",
    "megalowbit.grad_scaler.type",
    "megalowbit.grad_scaler.mode",
    "megalowbit.lr_schedule.type",
    "megalowbit.speculation.ladder",
)
# Of a HuggingFace configuration: where it came from, and what the loop sets itself.
NOT_OF_THE_MODEL = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"})
REMEDY = "resume with the former value, or start a new run from its weights with megalowbit.model.checkpoint"


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Compare the resolved configurations of a run and of its continuation.

    Returns:
        What changed and may, as `"key: old → new"`.

    Raises:
        UserError: something changed that may not.
    """
    unwritten = {
        "megalowbit": {
            **EngineSettings().model_dump(mode="json", include=set(ADDED_LATER)),
            "run": {"overflow_retries": 0},
            **{kind.key: kind.settings_class().model_dump(mode="json") for kind in ALWAYS_ON},
        }
    }
    before = {**_flat(unwritten), **_flat(saved), **_flat(_unwritten_scaler(saved))}
    now = {**_flat(unwritten), **_flat(current)}
    _check_components_are_kept(saved, current)
    changes = []
    for key in sorted(before.keys() | now.keys(), key=lambda key: (_place(key), key)):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if not _may_change(key):
            was, now_is = _shown(saved, key, old), _shown(current, key, new)
            raise UserError(f"{key} was {was} in the run to be resumed and is {now_is} now: {REMEDY}")
        changes.append(f"{key}: {old} → {new}")
    return changes


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def _check_components_are_kept(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to add or to leave out a component, naming the section and not the first of its many keys."""
    for name in (kind.key for kind in OPTIONAL):
        blocks = [config.get("megalowbit", {}).get(name) for config in (saved, current)]
        # earlier versions did not write it down
        if (blocks[0] is None) != (blocks[1] is None) and not _may_change(f"megalowbit.{name}"):
            was, now = ("off" if block is None else "on" for block in blocks)
            raise UserError(
                f"megalowbit.{name} was {was} in the run to be resumed and is {now} now: {REMEDY}"
            )


def check_is_configuration(saved: Mapping[str, Any], where: str) -> None:
    """Refuse what no run has written as its resolved configuration.

    Raises:
        UserError: there is no `megalowbit` block in it, or a section of that is no object.
    """
    block = saved.get("megalowbit")
    if not isinstance(block, dict):
        what = f"megalowbit is {shown(block)}"
    else:
        sections = {*LOOP_SECTIONS, "grad_scaler", "watchdog"} - {kind.key for kind in OPTIONAL}
        wrong = sorted(name for name in sections & block.keys() if not isinstance(block[name], dict))
        if not wrong:
            return
        what = f"megalowbit.{wrong[0]} is {shown(block[wrong[0]])}"
    raise UserError(
        f"{where} is damaged, {what} and not an object: put back what the run has written, or remove it, and "
        "settings are compared with those in the checkpoint"
    )


def check_same_model(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to continue with a model of the same shapes whose HuggingFace configuration differs."""
    before, now = _flat(saved), _flat(current)
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old != new and key.split(".")[0] not in NOT_OF_THE_MODEL:
            was, now_is = _shown(saved, key, old), _shown(current, key, new)
            raise UserError(f"the model's {key} was {was} in the checkpoint and is {now_is} now: {REMEDY}")


def _place(key: str) -> int:
    return REPORTED_FIRST.index(key) if key in REPORTED_FIRST else len(REPORTED_FIRST)


def _unwritten_scaler(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a dynamic scaler's block left out before it had a `mode`: Megatron's rule was the only one."""
    block = saved.get("megalowbit", {})
    scaler = block.get("grad_scaler") if isinstance(block, Mapping) else None
    if not isinstance(scaler, Mapping) or scaler.get("type") != "dynamic" or scaler.get("mode") is not None:
        return {}
    defaults = DynamicSettings().model_dump()
    missing = {key: value for key, value in defaults.items() if scaler.get(key) is None}
    return {"megalowbit": {"grad_scaler": missing}}


def _shown(values: Mapping[str, Any], key: str, value: object) -> str:
    """A value of flattened ones for a message; of a block, whose fields alone are among them, the block."""
    if value is not None:
        return shown(value)
    found: object = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return shown(found)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
