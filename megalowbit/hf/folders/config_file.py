"""Reads Hugging Face's `config.json`, applies overrides, and reports each mistake in one line.

A file written by a person is read strictly: transformers ignores an unknown field, and "n_layers" instead of
"n_layer" would train a model of another depth. A checkpoint's file was written by a program, often by another
version of transformers, and may have fields that are unknown here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megalowbit.errors import UserError, shortened, shown, unknown_name
from megalowbit.families.config_checks import check_config
from megalowbit.families.registry import FAMILIES, family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_FILE = "config.json"
# Written by other versions of transformers, without effect on the weights of the supported families.
IDLE_FIELDS = ("torch_dtype", "n_ctx", "task_specific_params", "gradient_checkpointing", "auto_map")
# How a model is computed, not what it is: transformers reads it and never writes it.
ATTENTION = "attn_implementation"
# Rotary positions: the field that transformers 5 stores, and the fields of older files.
ROPE, SCALING, THETA = "rope_parameters", "rope_scaling", "rope_theta"
# Fields that transformers derives from others if they are unset, and then stores. Where a class has a fixed
# default instead, deriving again gives the stored value.
DERIVED = ("head_dim", "layer_types", "num_key_value_heads")
# Fields of a stored model that describe more than its architecture, and why such a model is rejected.
REFUSED_FIELDS = {
    "quantization_config": "its weights are quantised already: save the model unquantised",
    "compression_config": "its weights are compressed: save the model unquantised",
    "transformers_weights": "it names its own weight files: call them model.safetensors and remove the field",
}


def config_from_dict(
    raw: dict[str, Any], overrides: dict[str, Any], where: str, *, is_strict: bool = False
) -> PretrainedConfig:
    """A checked configuration from the fields of a `config.json`.

    Args:
        raw: the fields, including `model_type`.
        overrides: fields to change; unknown ones are always rejected.
        where: the file's name, for messages.
        is_strict: reject unknown fields in `raw` too.

    Raises:
        UserError: names field, value and remedy.
    """
    if "model_type" not in raw:
        names = " or ".join(f'"{name}"' for name in FAMILIES)
        raise UserError(f'{where} has no "model_type": add {names}')
    model_family = family(raw["model_type"])
    config_class = model_family.load_config_class()
    fields_of_class = {*config_class().to_dict(), *config_class.attribute_map}
    known = sorted({*fields_of_class, *model_family.further_fields, ATTENTION})
    for name in raw if is_strict else ():
        if name not in known and name not in IDLE_FIELDS:
            raise UserError(f"{where}: {unknown_name('field', name, known)}")
    if is_strict:
        _refuse_untyped(raw, where)
    changeable = [name for name in known if name != "model_type"]
    for name in overrides:
        if name not in changeable:
            raise unknown_name("field in model.overrides", name, changeable)
    fields = with_changes(raw, overrides, config_class, where)
    _refuse_fields(fields, where)
    if overrides:
        _drop_derived(fields, raw, overrides, config_class, where)
    config = _built(fields, config_class, where)
    check_config(config, where)
    _check_effect(overrides, config, where)
    return config


def with_changes(
    raw: Mapping[str, Any], changes: Mapping[str, Any], config_class: Any, where: str
) -> dict[str, Any]:
    """The fields of a `config.json` with changes; both may have the form of any version of transformers.

    New `rope_scaling` or `rope_parameters` replace the former ones, but keep a theta that they do not have.

    Args:
        raw: the fields.
        changes: fields that replace them, also under their common names.
        config_class: transformers' class of the configuration.
        where: the file's name, for messages.

    Raises:
        UserError: rotary positions are not an object, or change by a scaling without a type.
    """
    aliases = config_class.attribute_map
    # an alias ("hidden_size" for GPT-2's "n_embd") must replace the original field, not be added to it
    changed = {aliases.get(name, name): value for name, value in changes.items()}
    fields = {name: value for name, value in raw.items() if aliases.get(name, name) not in changed} | changed
    if not changed.keys().isdisjoint((ROPE, SCALING, THETA)):
        stored, rope = _rope_parameters(raw, where), _rope_parameters(changed, where)
        _refuse_untyped(changed, where)
        if not changed.keys().isdisjoint((ROPE, SCALING)):
            stored = {name: value for name, value in stored.items() if name == THETA}
        fields = {name: value for name, value in fields.items() if name not in (SCALING, THETA)}
        fields[ROPE] = stored | rope
    return copy.deepcopy(fields)  # transformers adds keys to what it is given


def _rope_parameters(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What fields say of rotary positions, as transformers 5 stores it; `null` is no scaling."""
    found = fields.get(SCALING) or fields.get(ROPE) or {}
    if not isinstance(found, Mapping):
        name = SCALING if fields.get(SCALING) else ROPE
        example = '{"rope_type": "linear", "factor": 2.0}'
        raise UserError(f"{where}: {name} must be null or an object such as {example}, not {shown(found)}")
    rope = dict(found)
    if SCALING in fields or ROPE in fields:
        rope.setdefault("rope_type", rope.pop("type", "default"))
    if THETA in fields:
        rope.setdefault(THETA, fields[THETA])
    return rope


def _refuse_untyped(fields: Mapping[str, Any], where: str) -> None:
    """Reject a scaling that does not say which one it is: transformers would scale nothing."""
    for name in (SCALING, ROPE):
        found = fields.get(name)
        if not isinstance(found, Mapping) or found.get("rope_type") or found.get("type"):
            continue
        if found.keys() - {"rope_type", "type", THETA, "partial_rotary_factor"}:
            raise UserError(
                f"{where}: {name} {shown(found)} has no rope_type, so it has no effect: name its rope_type, "
                'for example "linear"'
            )


def _drop_derived(
    fields: dict[str, Any],
    raw: Mapping[str, Any],
    overrides: Mapping[str, Any],
    config_class: Any,
    where: str,
) -> None:
    """Remove stored values that transformers has derived from other fields, to be derived again."""
    for name in DERIVED:
        if raw.get(name) is None or name in overrides:
            continue
        others = {other: value for other, value in raw.items() if other != name}
        if getattr(_built(copy.deepcopy(others), config_class, where), name, None) == raw[name]:
            del fields[name]
        elif name == "layer_types" and "max_window_layers" in overrides:
            raise UserError(
                f"model.overrides.max_window_layers {shown(overrides['max_window_layers'])} has no effect, "
                f"because {where} has layer_types of its own: override layer_types instead"
            )


def _built(fields: dict[str, Any], config_class: Any, where: str) -> PretrainedConfig:
    try:
        config: PretrainedConfig = config_class.from_dict(fields)
    except Exception as error:  # its classes raise different exceptions for invalid values
        reason = shortened(" ".join(str(error).split()))
        message = f"{where} is not a valid {config_class.model_type} configuration: {reason}"
        raise UserError(message) from error
    return config


def _check_effect(overrides: Mapping[str, Any], config: PretrainedConfig, where: str) -> None:
    """Check that the configuration has each override: transformers ignores some in silence."""
    built = {**config.to_dict(), ATTENTION: config._attn_implementation}
    for name, value in overrides.items():
        field, expected = config.attribute_map.get(name, name), value
        if field in (ROPE, SCALING, THETA):
            field, expected = ROPE, _rope_parameters({field: value}, where)
        found = built[field]
        has_effect = expected is None or found == expected  # transformers gives null a default
        if isinstance(expected, Mapping) and isinstance(found, Mapping):  # which may have more, or other keys
            has_effect = _by_text(expected).items() <= _by_text(found).items()
        if not has_effect:
            raise UserError(
                f"model.overrides.{name} {shown(value)} has no effect, the model would have {field} "
                f"{shown(found)}: override the fields that it depends on as well, or remove it"
            )


def _by_text(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in values.items()}  # JSON has no other names


def _refuse_fields(fields: dict[str, Any], where: str) -> None:
    for name, reason in REFUSED_FIELDS.items():
        if fields.get(name) is not None:
            raise UserError(f"{where} has {name} {shown(fields[name])}: {reason}")
    for name, value in fields.items():
        # transformers treats "owner/name" as a kernel, which it downloads and runs
        if name.strip("_").removesuffix("_internal").endswith("_implementation") and "/" in str(value):
            raise UserError(
                f"{where} has {name} {shown(value)}, code that would be downloaded: remove the field"
            )
