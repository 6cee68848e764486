"""How a model generates text: kept beside the model while it trains, and given back with every export.

Training turns the key-value cache off, and makes copies of models from their configuration, of which the
values of `generation_config.json` are no part. So what a model came with is remembered on it, goes into its
checkpoints (`"generation"` in their header) and from there into the folders that are written.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("megalowbit")

ATTRIBUTE = "generation_before_training"
FILE = "generation_config.json"


def prepare_for_training(model: PreTrainedModel) -> None:
    """Turn the key-value cache off, and remember that it was on and how the model generates."""
    remember(model, _settings_of(model))
    model.config.use_cache = False


def remember(model: Any, settings: dict[str, Any] | None) -> None:
    """Let `model`, or a module made of one, carry what `remembered` of another has returned."""
    if settings is not None:
        setattr(model, ATTRIBUTE, settings)


def remembered(model: Any) -> dict[str, Any] | None:
    """Plain values, of a model that was prepared for training; None of any other."""
    return getattr(model, ATTRIBUTE, None)


def give_back(settings: dict[str, Any] | None, model: PreTrainedModel) -> None:
    """Set a model as it was before training; without settings, as most are: with the cache on."""
    from transformers import GenerationConfig

    model.config.use_cache = True if settings is None else settings["use_cache"]
    if settings is not None and settings["generation_config"] is not None:
        model.generation_config = GenerationConfig.from_dict(dict(settings["generation_config"]))
    elif model.generation_config is not None:
        model.generation_config.use_cache = model.config.use_cache


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained`, also of a model whose generation settings transformers refuses to write."""
    generation = model.generation_config
    try:
        if generation is not None:
            generation.validate(strict=True)
    except ValueError:  # as of published models that set a temperature without sampling
        logger.warning("%s: transformers calls the model's values invalid; they are kept as they are", FILE)
        model.generation_config = type(generation)()
        model.save_pretrained(folder)
        model.generation_config = generation
        (folder / FILE).write_text(generation.to_json_string(use_diff=True), encoding="utf-8")
        return
    model.save_pretrained(folder)


def _settings_of(model: PreTrainedModel) -> dict[str, Any]:
    generation = model.generation_config
    text = None if generation is None else generation.to_json_string(use_diff=True)
    return {
        "use_cache": model.config.use_cache,
        "generation_config": None if text is None else json.loads(text),
    }
