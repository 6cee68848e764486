"""Builds models from the `"model"` section, imports Hugging Face folders, and exports training checkpoints.

Two kinds of folder are read: Hugging Face's (`config.json` and weights), and megalowbit's training
checkpoints (`training_checkpoint`). A model to train is always returned in fp32 and without low-bit layers;
the caller chooses precision and conversion. Not covered: optimizer states, which the engine restores on
`--resume`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megalowbit.checkpoints.plain import loading_advice, plain_checkpoint
from megalowbit.durable_files import MANIFEST
from megalowbit.errors import UserError
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import pad_config, pad_vocabulary
from megalowbit.hf.folders.config_file import CONFIG_FILE, config_from_dict
from megalowbit.hf.folders.new_folder import refuse_existing
from megalowbit.hf.folders.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megalowbit.hf.folders.tokenizer_files import TEMPLATES
from megalowbit.hf.generation import prepare_for_training, restore_generation, store_generation
from megalowbit.hf.model import (
    SavableTokenizer,
    fill_weights,
    load_weights,
    random_model,
    refuse_nonfinite,
    save_hf,
)
from megalowbit.hf.outliers import plant
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.training_checkpoint import (
    TrainingCheckpoint,
    find_checkpoint,
    is_training_checkpoint,
    read_checkpoint,
    write_start_checkpoint,
)
from megalowbit.json_text import read_json_object, refuse_irregular_files
from megalowbit.layers.conversion.convert import convert, restore
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.settings import DEFAULT_RECIPE

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def read_config(settings: ModelSettings) -> PretrainedConfig:
    """The configuration that `settings` describe, with overrides and padding applied, and checked.

    Raises:
        UserError: no such file, not a configuration of a known family, unknown fields, invalid values.
    """
    config = _stored_config(settings)
    pad_config(config, settings.pad_vocab_to_multiple_of)
    return config


def _stored_config(settings: ModelSettings) -> PretrainedConfig:
    """The configuration with overrides, and the vocabulary of the stored weights."""
    if settings.config is not None:
        raw = read_json_object(settings.config)
        return config_from_dict(raw, settings.overrides, str(settings.config), is_strict=True)
    folder = _checkpoint_of(settings)
    is_ours = is_training_checkpoint(folder)
    raw = read_checkpoint(folder).hf_config if is_ours else read_json_object(_config_file(folder))
    return config_from_dict(raw, settings.overrides, str(folder))


def build_model(settings: ModelSettings, *, seed: int, device: str = "cpu") -> PreTrainedModel:
    """Build the model that `settings` describe: fp32, in training mode, without key-value cache.

    Args:
        settings: the `"model"` section.
        seed: seed of random weights and of planted outliers, which are the same on every rank.
        device: `"cpu"`, or `"meta"` for a model of the same shapes without weights (a dry run).

    Raises:
        UserError: see `read_config`; also for missing, unexpected, misshapen or damaged weights in a
            checkpoint, or weights that are NaN or infinite.
    """
    if device not in ("cpu", "meta"):
        raise ValueError(f"device must be cpu or meta: {device!r}")
    if settings.config is not None or device == "meta":
        model = random_model(_stored_config(settings), seed=seed, device=device, where=str(_source(settings)))
    elif is_training_checkpoint(_checkpoint_of(settings)):
        folder = _checkpoint_of(settings)
        model = _rebuild(read_checkpoint(folder), settings.overrides, str(folder))
    else:
        model = load_weights(_stored_config(settings), _checkpoint_of(settings), dtype=torch.float32)
    if settings.config is None and device != "meta":
        refuse_nonfinite(model, str(_source(settings)))
    if settings.outliers is not None and device != "meta":
        plant(model, family(model.config.model_type), settings.outliers, seed=seed)
    pad_vocabulary(model, settings.pad_vocab_to_multiple_of)
    prepare_for_training(model)
    model.loss_type = "ForCausalLM"  # transformers finds none for GPT2LMHeadModel
    return model.train()


def import_checkpoint(source: Path, folder: Path, recipe: Recipe | str = DEFAULT_RECIPE) -> Path:
    """Convert a Hugging Face folder to a training checkpoint to start from, in the dtype of its weights.

    Args:
        source: `config.json` and weights of a model of a known family.
        folder: a new folder.
        recipe: the recipe that the model will be trained with.

    Returns:
        The step folder inside `folder`; the source's tokenizer, if it has one, is copied next to it.

    Raises:
        UserError: see `build_model` for `source` and `write_start_checkpoint` for `folder`.
    """
    refuse_existing(folder)  # first, because a large model takes minutes
    if is_training_checkpoint(source):
        raise UserError(f"{source} is already a training checkpoint: start from it directly")
    config = config_from_dict(read_json_object(_config_file(source)), {}, str(source))
    model = load_weights(config, source, dtype="auto")
    refuse_nonfinite(model, str(source))
    return write_start_checkpoint(model, recipe, folder, tokenizer_files=source)


def export_checkpoint(
    source: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    tokenizer: SavableTokenizer | None = None,
) -> None:
    """Convert a training checkpoint to an ordinary Hugging Face folder.

    Args:
        source: a step folder, a `checkpoints/` folder or a run's folder.
        folder: a new folder.
        dtype: of the saved weights; `None`: the one in which the model computed. fp32 is exact.
        tokenizer: saved with the weights; `None`: the tokenizer kept in a checkpoint to start from, if any.

    Raises:
        UserError: no undamaged checkpoint in `source`; `folder` exists and is not empty, or cannot be
            written.
    """
    refuse_existing(folder)
    stored = read_checkpoint(source)
    model = _rebuild(stored, {}, str(source))
    stored_dtypes = {value.dtype for value in stored.half_state_dict.values()} if dtype is None else set()
    if len(stored_dtypes) == 1:
        (dtype,) = stored_dtypes
    kept = find_checkpoint(source).parent / TOKENIZER_FOLDER
    is_kept = tokenizer is None and kept.is_dir()
    store_generation(model, stored.generation)
    save_hf(model, folder, tokenizer, dtype=dtype, tokenizer_files=kept if is_kept else None)


def _rebuild(stored: TrainingCheckpoint, overrides: dict[str, Any], where: str) -> PreTrainedModel:
    """The stored model in fp32, with plain layers."""
    config = config_from_dict(stored.hf_config, overrides, where)
    model = random_model(config, seed=0, where=where)
    convert(model, stored.recipe)
    fill_weights(model, stored.state_dict, where)
    restore(model)
    restore_generation(stored.generation, model)
    return model


def _source(settings: ModelSettings) -> Path:
    return settings.config or _checkpoint_of(settings)


def _checkpoint_of(settings: ModelSettings) -> Path:
    assert settings.checkpoint is not None, "ModelSettings holds exactly one of config and checkpoint"
    folder = settings.checkpoint.expanduser()
    plain = plain_checkpoint(folder)
    if plain is not None and not (folder / CONFIG_FILE).is_file():
        raise UserError(f"checkpoint {plain} has no {MANIFEST}: use a complete one; {loading_advice(plain)}")
    return folder


def _config_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(
            f"checkpoint {folder} is not a folder: name a Hugging Face folder or a training checkpoint"
        )
    refuse_irregular_files("checkpoint", folder, TEMPLATES)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"checkpoint {folder} has no {CONFIG_FILE} and contains no training checkpoint: name another"
        )
    return folder / CONFIG_FILE
