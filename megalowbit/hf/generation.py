"""Generation settings of a model: stored on the model during training, and written with every export.

Training disables the key-value cache and builds copies of models from their configuration, which does not
include `generation_config.json`. Therefore the original settings are stored as an attribute of the model,
saved in its checkpoints (`"generation"` in their header), and written from there into exported folders.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

from megalowbit.errors import UserError, shortened
from megalowbit.hf.folders.config_file import CONFIG_FILE
from megalowbit.json_text import read_json_object

logger = logging.getLogger("megalowbit")

ATTRIBUTE = "generation_before_training"
FILE = "generation_config.json"


def prepare_for_training(model: PreTrainedModel) -> None:
    """Disable the key-value cache, and store its state and the generation settings on the model."""
    store_generation(model, _settings_of(model))
    model.config.use_cache = False


def store_generation(model: Any, settings: dict[str, Any] | None) -> None:
    """Store settings returned by `stored_generation` on `model`, or on a module made from one."""
    if settings is not None:
        setattr(model, ATTRIBUTE, settings)


def stored_generation(model: Any) -> dict[str, Any] | None:
    """The stored settings of a model that was prepared for training; None for any other model."""
    return getattr(model, ATTRIBUTE, None)


def generation_to_export(model: PreTrainedModel) -> dict[str, Any]:
    """The settings to write with a model: the stored ones, or its own if it was not prepared for training."""
    settings = stored_generation(model)
    return _settings_of(model) if settings is None else settings


def restore_generation(settings: dict[str, Any] | None, model: PreTrainedModel) -> None:
    """Restore a model's settings from before training; without settings, enable the cache."""
    from transformers import GenerationConfig

    model.config.use_cache = True if settings is None else settings["use_cache"]
    if settings is not None and settings["generation_config"] is not None:
        model.generation_config = GenerationConfig.from_dict(dict(settings["generation_config"]))
    elif model.generation_config is not None:
        model.generation_config.use_cache = model.config.use_cache


def read_generation(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the generation settings of a Hugging Face folder, as `from_pretrained` does.

    Raises:
        UserError: the file of the settings is damaged, which transformers ignores.
    """
    from transformers import GenerationConfig

    path = folder / FILE
    if not os.path.lexists(path):  # old folders have them in config.json
        path = folder / CONFIG_FILE
    content = read_json_object(path)
    origin = {"_from_model_config": True} if path.name == CONFIG_FILE else {}
    try:
        model.generation_config = GenerationConfig.from_dict(content, **origin)
    except Exception as error:  # its values may be of any kind
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{path} has invalid generation settings ({reason}): correct or remove it") from error


def save_settings(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """The files that `save_model` writes beside the weights, for weights of this dtype."""
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    generation = model.generation_config
    if generation is not None and _is_valid(generation):
        generation.save_pretrained(folder)
    elif generation is not None:
        (folder / FILE).write_text(generation.to_json_string(use_diff=True), encoding="utf-8")


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained`, also for a model whose generation settings transformers refuses to write."""
    generation = model.generation_config
    is_refused = generation is not None and not _is_valid(generation)
    if is_refused:
        model.generation_config = type(generation)()
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
        shutil.copymode(folder / CONFIG_FILE, path)
    if is_refused:
        model.generation_config = generation
        (folder / FILE).write_text(generation.to_json_string(use_diff=True), encoding="utf-8")


def _is_valid(generation: GenerationConfig) -> bool:
    """Whether transformers writes these settings; it refuses some that it reads."""
    try:
        generation.validate(strict=True)
    except ValueError:  # for example published models that set a temperature without sampling
        logger.warning("%s: transformers calls the model's values invalid; they are saved unchanged", FILE)
        return False
    return True


def _settings_of(model: PreTrainedModel) -> dict[str, Any]:
    generation = model.generation_config
    text = None if generation is None else generation.to_json_string(use_diff=True)
    return {
        "use_cache": model.config.use_cache,
        "generation_config": None if text is None else json.loads(text),
    }
