"""Reads Hugging Face's `config.json`, applies overrides, and reports each mistake in one line.

A file written by a person is read strictly: transformers ignores an unknown field, and "n_layers" instead of
"n_layer" would train a model of another depth. A checkpoint's file was written by a program, often by another
version of transformers, and may have fields that are unknown here.
"""

from __future__ import annotations

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
    for name in overrides:
        if name not in known or name == "model_type":
            raise unknown_name("field in model.overrides", name, known)
    # an alias ("hidden_size" for GPT-2's "n_embd") must replace the original field, not be added to it
    fields = raw | {config_class.attribute_map.get(name, name): value for name, value in overrides.items()}
    _refuse_fields(fields, where)
    try:
        config = config_class.from_dict(fields)
    except Exception as error:  # its classes raise different exceptions for invalid values
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{where} is not a valid {raw['model_type']} configuration: {reason}") from error
    check_config(config, where)
    return config


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
