"""Which settings may change when a run is resumed.

A checkpoint restores the optimizer with its learning rate, the loss scale and the data order. Changes of
settings that the checkpoint overrides are rejected, because they would have no effect. Changes of settings
that alter the model or its arithmetic are rejected, because they would silently join two different runs. This
includes all of `speculation`: each of its settings influences the precisions, and the decisions in the
checkpoint were made with the earlier settings. Settings of duration, intervals and the number of processes
may change, and so may the settings that a component lists in `may_change`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megalowbit.config.deepspeed_json import LOOP_SECTIONS
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.data.settings import BYTE_TOKENIZER, NO_TOKENIZER
from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_json_object
from megalowbit.layers.settings import DEFAULT_RECIPE
from megalowbit.optim.loss_scale.dynamic import DynamicSettings
from megalowbit.pretrain.components.registry import ALWAYS_ON, COMPONENTS, OPTIONAL
from megalowbit.speculation.settings import with_current_keys

MAY_CHANGE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "scheduler.params.total_num_steps",
    "megalowbit.lr_schedule.total_steps",
    "megalowbit.lr_schedule.decay_steps",
    # the layout: full tensors are read from the checkpoint and sharded for the new layout
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
    # memory and speed: the same numbers, except for the order of sums in a chunked loss or in attention
    "megalowbit.model.overrides.attn_implementation",
    "megalowbit.activation_checkpointing.*",
    "megalowbit.chunked_cross_entropy",
    "megalowbit.run.steps",
    "megalowbit.run.name",
    "megalowbit.run.deterministic",
    "megalowbit.run.max_consecutive_skips",
    "megalowbit.run.overflow_retries",
    "megalowbit.watchdog.*",
    "megalowbit.checkpoint.*",
    "megalowbit.telemetry.*",
    "megalowbit.trackio.*",
    # paths: their contents are compared instead, by fingerprint (data) and by value (model)
    "megalowbit.data.cache_dir",
    "megalowbit.data.corpus",
    "megalowbit.data.sources",
    "megalowbit.data.sources.*",  # weights may change; the loader compares names and contents
    "megalowbit.data.phases",
    "megalowbit.data.max_bad_records",
    "megalowbit.data.workers",
    "megalowbit.data.build_timeout",
    "megalowbit.data.tokenizer",
    "megalowbit.model.config",
    "megalowbit.model.checkpoint",
    *(pattern for component in COMPONENTS for pattern in component.may_change),
)
# Earlier versions did not record these settings; their runs used the values that are now the defaults.
ADDED_LATER = (
    "regularizer", "gradient_norm", "autocast", "fp32_norms", "layer_scaling", "log_num_zeros_in_grad",
    "activation_checkpointing", "chunked_cross_entropy",
)  # fmt: skip
# Reported first, because a change of one of these also changes others.
REPORTED_FIRST = (
    "megalowbit.precision",
    "megalowbit.grad_scaler.type",
    "megalowbit.grad_scaler.mode",
    "megalowbit.lr_schedule.type",
    "megalowbit.speculation.candidates",
)
# Keys of a Hugging Face configuration that name its origin, or that the loop sets itself.
NOT_OF_THE_MODEL = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"})
# key, recorded by earlier versions, now
FORMER_DEFAULTS = [("megalowbit.recipe", each, DEFAULT_RECIPE) for each in ("nvfp4", "nvfp4-keep-positions")]
REMEDY = "resume with the old value, or start a new run from its weights with megalowbit.model.checkpoint"


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Compare the resolved configurations of a run before and after it is resumed.

    Returns:
        The allowed changes, as `"key: old → new"`.

    Raises:
        UserError: a setting has changed that must not.
    """
    unwritten = {
        "megalowbit": {
            **EngineSettings().model_dump(mode="json", include=set(ADDED_LATER)),
            "run": {"overflow_retries": 0, "deterministic": False},
            "watchdog": {"silence": EngineSettings().watchdog.silence},
            "telemetry": {"count_every": 1},  # not today's default
            "oscillation_reset": {"reset": True},
            "data": {
                "phases": [],
                "packing": "wrapped",
                "eod_mask_loss": False,
                **_tokens_of_earlier_versions(saved),
            },
            **{kind.key: kind.settings_class().model_dump(mode="json") for kind in ALWAYS_ON},
        }
    }
    saved = with_current_names(saved)
    before = {**_flat(unwritten), **_flat(saved), **_flat(_unwritten_scaler(saved))}
    now = {**_flat(unwritten), **_flat(current)}
    _check_components_are_kept(saved, current)
    changes = [f"megalowbit.{name}: {was} → {now_is}" for name, was, now_is in _switched(saved, current)]
    sections = tuple(change.partition(":")[0] + "." for change in changes)
    for key in sorted(before.keys() | now.keys(), key=lambda key: (_report_order(key), key)):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if not _may_change(key):
            was, now_is = _shown(saved, key, old), _shown(current, key, new)
            was += ", the default of earlier versions," if (key, old, new) in FORMER_DEFAULTS else ""
            raise UserError(f"{key} was {was} in the run to resume and is {now_is} now: {REMEDY}")
        if not key.startswith(sections) and key + "." not in sections:  # a section's defaults are no changes
            changes.append(f"{key}: {old} → {new}")
    return changes


def unwritten_tokens(config: Path) -> dict[str, bool]:
    """Keys that the `config.json` of a run lacks, because it is of an earlier version, and their values."""
    saved = read_json_object(config)
    written = saved.get("megalowbit", {}).get("data", {})
    found = _tokens_of_earlier_versions(saved)
    return {f"data.{key}": value for key, value in found.items() if key not in written}


def parses_special_tokens(config: Mapping[str, Any]) -> bool:
    """Whether the run of a resolved configuration made tokens of text that spells special ones."""
    written = config.get("megalowbit", {}).get("data") or {}
    return bool({**_tokens_of_earlier_versions(config), **written}["parse_special_tokens"])


def _tokens_of_earlier_versions(saved: Mapping[str, Any]) -> dict[str, bool]:
    """Runs of earlier versions parsed special tokens; those of bytes have none."""
    data = saved.get("megalowbit", {}).get("data") or {}
    return {
        "parse_special_tokens": data.get("tokenizer", BYTE_TOKENIZER) not in (BYTE_TOKENIZER, NO_TOKENIZER)
    }


def with_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration with today's keys: earlier ones are renamed, and later ones have no effect."""
    block = config.get("megalowbit")
    if not isinstance(block, Mapping):
        return dict(config)
    block, section, model = dict(block), block.get("speculation"), block.get("model")
    if isinstance(section, Mapping):
        block["speculation"] = with_current_keys(section)
    if isinstance(model, Mapping) and "config" in model:
        block["model"] = {"outliers": None, **model}
    return {**config, "megalowbit": block}


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def _check_components_are_kept(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Reject added or removed components; the message names the section rather than one of its keys."""
    for name, was, now in _switched(saved, current):
        if not _may_change(f"megalowbit.{name}"):
            raise UserError(f"megalowbit.{name} was {was} in the run to resume and is {now} now: {REMEDY}")


def _switched(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Components that were added or removed: (name, "on" or "off" in the saved run, and now)."""
    found = []
    for name in (kind.key for kind in OPTIONAL):
        # earlier versions did not record sections that were off
        was, now = (
            "off" if config.get("megalowbit", {}).get(name) is None else "on" for config in (saved, current)
        )
        found += [(name, was, now)] * (was != now)
    return found


def check_is_configuration(saved: Mapping[str, Any], where: str) -> None:
    """Check that a file has the structure of a resolved configuration.

    Raises:
        UserError: the `megalowbit` block is missing, or one of its sections is not an object.
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
        f"{where} is damaged ({what}, not an object): restore the original, or remove it to compare with the "
        "settings in the checkpoint"
    )


def check_same_model(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Reject a model with the same shapes whose Hugging Face configuration differs."""
    before, now = _flat(saved), _flat(current)
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old != new and key.split(".")[0] not in NOT_OF_THE_MODEL:
            was, now_is = _shown(saved, key, old), _shown(current, key, new)
            raise UserError(f"the model's {key} was {was} in the checkpoint and is {now_is} now: {REMEDY}")


def _report_order(key: str) -> int:
    return REPORTED_FIRST.index(key) if key in REPORTED_FIRST else len(REPORTED_FIRST)


def _unwritten_scaler(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for a dynamic scaler's block from before `mode` existed, when only Megatron's rule did."""
    block = saved.get("megalowbit", {})
    scaler = block.get("grad_scaler") if isinstance(block, Mapping) else None
    if not isinstance(scaler, Mapping) or scaler.get("type") != "dynamic" or scaler.get("mode") is not None:
        return {}
    defaults = DynamicSettings().model_dump()
    missing = {key: value for key, value in defaults.items() if scaler.get(key) is None}
    return {"megalowbit": {"grad_scaler": missing}}


def _shown(values: Mapping[str, Any], key: str, value: object) -> str:
    """A value for a message; for a key that names a block, which flattening removes, the block."""
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
