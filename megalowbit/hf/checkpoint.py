"""Builds models from the `"model"` section, imports Hugging Face folders, and exports training checkpoints.

Two kinds of folder are read: Hugging Face's (`config.json` and weights), and megalowbit's training
checkpoints (`training_checkpoint`). Checkpoints of other programs (`importers`) can only be imported. Imports
and exports hold one tensor in memory at a time. A model to train is always returned in fp32 and without
low-bit layers; the caller chooses precision and conversion. Not covered: optimizer states, which the engine
restores on `--resume`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megalowbit.checkpoints.plain import loading_advice, plain_checkpoint
from megalowbit.checkpoints.shards import reading
from megalowbit.durable_files import MANIFEST, sha256_of, step_name
from megalowbit.errors import UserError
from megalowbit.families.outliers import plant
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import pad_config, pad_vocabulary
from megalowbit.hf.folders.config_file import CONFIG_FILE, config_from_dict
from megalowbit.hf.folders.conversion import Conversion, identity_of
from megalowbit.hf.folders.model_card import model_card
from megalowbit.hf.folders.new_folder import refuse_existing
from megalowbit.hf.folders.shards import SHARD_SIZE, TensorSpec
from megalowbit.hf.folders.stored_weights import (
    StoredWeights,
    misshapen,
    narrowed,
    other_tied_values,
    refuse_differences,
    same_bits,
    tied_names,
    widest,
)
from megalowbit.hf.folders.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megalowbit.hf.folders.tokenizer_files import TEMPLATES
from megalowbit.hf.folders.weight_files import NAMES as WEIGHT_NAMES
from megalowbit.hf.generation import prepare_for_training, read_generation, restore_generation
from megalowbit.hf.importers.base import check_and_select
from megalowbit.hf.importers.registry import is_foreign, read_foreign
from megalowbit.hf.model import (
    SavableTokenizer,
    fill_weights,
    load_weights,
    random_model,
    refuse_nonfinite,
    write_settings,
)
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.start_checkpoint import start_conversion
from megalowbit.hf.training_checkpoint import (
    TrainingCheckpoint,
    is_training_checkpoint,
    read_checkpoint,
)
from megalowbit.json_text import read_json_object, refuse_irregular_files
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES, joined
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.settings import DEFAULT_RECIPE
from megalowbit.layers.state_dict_layout import parameter_layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def read_config(settings: ModelSettings) -> PretrainedConfig:
    """The configuration that `settings` describe, with overrides and padding applied, and checked.

    Raises:
        UserError: no such file, not a configuration of a known family, unknown fields, invalid values.
    """
    config = unpadded_config(settings)
    pad_config(config, settings.pad_vocab_to_multiple_of)
    return config


def unpadded_config(settings: ModelSettings) -> PretrainedConfig:
    """The configuration with overrides, and the vocabulary of the stored weights.

    Raises:
        UserError: see `read_config`.
    """
    if settings.config is not None:
        raw = read_json_object(settings.config)
        return config_from_dict(raw, settings.overrides, str(settings.config), is_strict=True)
    folder = checkpoint_of(settings)
    is_ours = is_training_checkpoint(folder)
    raw = read_checkpoint(folder).hf_config if is_ours else read_json_object(_config_file(folder))
    return config_from_dict(raw, settings.overrides, str(folder))


def build_model(
    settings: ModelSettings, *, seed: int, device: str = "cpu", reads_weights: bool = True
) -> PreTrainedModel:
    """Build the model that `settings` describe: fp32, in training mode, without key-value cache.

    Args:
        settings: the `"model"` section.
        seed: seed of random weights and of planted outliers, which are the same on every rank.
        device: `"cpu"`, or `"meta"` for a model of the same shapes without weights.
        reads_weights: whether the weights of a checkpoint are read; a dry run, whose tensors have no values,
            takes random ones of the same shapes.

    Raises:
        UserError: see `read_config`; also for missing, unexpected, misshapen or damaged weights in a
            checkpoint, or weights that are NaN or infinite.
    """
    if device not in ("cpu", "meta"):
        raise ValueError(f"device must be cpu or meta: {device!r}")
    if settings.config is not None or device == "meta" or not reads_weights:
        model = random_model(
            unpadded_config(settings), seed=seed, device=device, where=str(source_of(settings))
        )
    elif is_training_checkpoint(checkpoint_of(settings)):
        folder = checkpoint_of(settings)
        model = _rebuild(read_checkpoint(folder), settings.overrides, str(folder))
    else:
        model = load_weights(unpadded_config(settings), checkpoint_of(settings), dtype=torch.float32)
    if settings.config is None and device != "meta" and reads_weights:
        refuse_nonfinite(model, str(source_of(settings)))
    if settings.outliers is not None and device != "meta":
        plant(model, family(model.config.model_type), settings.outliers, seed=seed)
    return trainable(model, settings)


def trainable(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    """A plain model as a run trains it: padded, in training mode, without key-value cache."""
    pad_vocabulary(model, settings.pad_vocab_to_multiple_of)
    prepare_for_training(model)
    model.loss_type = "ForCausalLM"  # transformers finds none for GPT2LMHeadModel
    return model.train()


def import_checkpoint(
    source: Path, folder: Path, recipe: Recipe | str = DEFAULT_RECIPE, config: Path | None = None
) -> Path:
    """Convert a model to a training checkpoint to start from, in the dtype of its weights.

    Args:
        source: a Hugging Face folder with a model of a known family, or a checkpoint of plain DeepSpeed or
            Megatron-LM.
        folder: a new folder.
        recipe: the recipe that the model will be trained with.
        config: `config.json`, or a folder with one, for a checkpoint of another program. `None`: the one in
            `source`, if any.

    Returns:
        The step folder inside `folder`; the source's tokenizer, if it has one, is copied next to it.

    Raises:
        UserError: see `plan_import` and `Conversion.run`.
    """
    refuse_existing(folder)
    plan_import(source, recipe, config=config).run(folder)
    return Path(folder) / step_name(0)


def plan_import(
    source: Path,
    recipe: Recipe | str = DEFAULT_RECIPE,
    *,
    config: Path | None = None,
    shard_size: int = SHARD_SIZE,
) -> Conversion:
    """The conversion of a model to a checkpoint to start from; nothing is written yet.

    For the arguments see `import_checkpoint`.

    Raises:
        UserError: `source` is none of the folders that are read; weights are missing, unexpected, misshapen
            or damaged; the recipe is unknown or matches nothing.
    """
    if config is not None or (is_foreign(source) and not _has_hf_weights(source)):
        return _plan_foreign(source, recipe, config, shard_size)
    if is_training_checkpoint(source):
        raise UserError(f"{source} is already a training checkpoint: start from it directly")
    config_file, model, weights = open_folder(source)
    return start_conversion(
        model,
        weights,
        recipe,
        source=source,
        dtype=weights.dtype,
        key={"source": identity_of([config_file, *weights.paths], source)},
        tokenizer_files=source,
        shard_size=shard_size,
    )


def open_folder(source: Path) -> tuple[Path, PreTrainedModel, StoredWeights]:
    """A Hugging Face folder: its configuration file, its model on the meta device, and its weights.

    Raises:
        UserError: see `plan_import`.
    """
    config_file = _config_file(source)
    config = config_from_dict(read_json_object(config_file), {}, str(source))
    model = random_model(config, seed=0, device="meta", where=str(source))
    weights = StoredWeights(source, model, family(config.model_type).former_buffers)
    model.config.dtype = weights.dtype
    read_generation(model, source)
    return config_file, model, weights


def _has_hf_weights(source: Path) -> bool:
    """Whether a folder has weights that transformers reads; its Trainer writes them beside DeepSpeed's."""
    return (source / CONFIG_FILE).is_file() and any((source / name).is_file() for name in WEIGHT_NAMES)


def _plan_foreign(source: Path, recipe: Recipe | str, config: Path | None, shard_size: int) -> Conversion:
    """The conversion of a checkpoint of another program; see `plan_import`."""
    folder = source if config is None else None  # of tokenizer and generation settings
    if config is None and (source / CONFIG_FILE).is_file():
        config = source
    config_file = None if config is None else _named_config(config)
    if config_file is not None and config_file.name == CONFIG_FILE:
        folder = config_file.parent
    foreign = read_foreign(source, None if config_file is None else read_json_object(config_file))
    where = f"checkpoint {source}"
    hf_config = config_from_dict(foreign.hf_config, {}, where if config is None else str(config))
    model = random_model(hf_config, seed=0, device="meta", where=where)
    weights = check_and_select(foreign.weights, model.state_dict(keep_vars=True), where)
    logger.info("%s: %s, %d weights", source, foreign.description, len(weights))
    model.config.dtype = weights.dtype
    if config_file is not None and folder is not None:
        read_generation(model, folder)
    return start_conversion(
        model,
        weights,
        recipe,
        source=source,
        dtype=weights.dtype,
        key={"source": identity_of(foreign.paths, source), "config": foreign.hf_config},
        tokenizer_files=folder,
        shard_size=shard_size,
    )


def _named_config(config: Path) -> Path:
    """The file that `--config` means.

    Raises:
        UserError: there is none.
    """
    file = config / CONFIG_FILE if config.is_dir() else config
    if not file.is_file():
        raise UserError(f"--config {config} is neither a file nor a folder with {CONFIG_FILE}: name one")
    return file


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
        UserError: see `plan_export` and `Conversion.run`.
    """
    refuse_existing(folder)  # first, because verifying a large checkpoint takes minutes
    plan_export(source, dtype, tokenizer).run(folder)


def plan_export(
    source: Path,
    dtype: torch.dtype | None = None,
    tokenizer: SavableTokenizer | None = None,
    *,
    shard_size: int = SHARD_SIZE,
) -> Conversion:
    """The conversion of a training checkpoint to a Hugging Face folder; nothing is written yet.

    For the arguments see `export_checkpoint`.

    Raises:
        UserError: no undamaged checkpoint in `source`, or its weights are not those of its configuration.
    """
    stored = read_checkpoint(source)
    step = stored.folder
    with reading(f"checkpoint {step}"):
        config = config_from_dict(stored.hf_config, {}, str(source))
        model = random_model(config, seed=0, device="meta", where=str(source))
        weights = PlainWeights(stored, model, str(source))
        pad_vocabulary(model, None)
        restore_generation(stored.generation, model)
    chosen = widest(map(stored.half_state_dict.dtype, stored.half_state_dict)) if dtype is None else dtype
    state = model.state_dict(keep_vars=True)
    specs = tuple(TensorSpec(names[0], chosen, tuple(state[names[0]].shape)) for names in tied_names(state))
    shapes = {spec.name: spec.shape for spec in specs}

    def read(name: str) -> torch.Tensor:
        weight = weights[name]
        # the rows that pad a vocabulary come last
        return narrowed(name, weight[: shapes[name][0]] if weight.ndim else weight, chosen, str(source))

    def finish(draft: Path, _: Any) -> None:
        is_trained = stored.header.get("progress") is not None
        recipe = stored.recipe.name if is_trained else None
        card = model_card(stored.header, recipe, dtype=str(chosen).removeprefix("torch."))
        kept = step.parent / TOKENIZER_FOLDER
        write_settings(model, draft, dtype=chosen, tokenizer=tokenizer, tokenizer_files=kept, card=card)

    return Conversion(
        source=step,
        tensors=specs,
        read=read,
        read_dtype=torch.promote_types(chosen, torch.float32),  # masters
        finish=finish,
        key={"source": sha256_of(step / MANIFEST), "dtype": str(chosen)},
        shard_size=shard_size,
    )


class PlainWeights(Mapping[str, torch.Tensor]):
    """The weights of a training checkpoint in the layout of the Hugging Face model, each read on access.

    Args:
        stored: a checkpoint.
        model: of its configuration, plain, on the meta device; it is not changed.
        where: the checkpoint, for messages.

    Raises:
        UserError: the checkpoint does not have the weights that its configuration and recipe say, or
            others than the configuration ties.
    """

    def __init__(self, stored: TrainingCheckpoint, model: PreTrainedModel, where: str) -> None:
        self._stored, self._where = stored, where
        groups = tied_names(model.state_dict(keep_vars=True))
        self._names = [names[0] for names in groups]
        converted = random_model(type(model.config).from_dict(model.config.to_dict()), seed=0, device="meta")
        convert(converted, stored.recipe)
        self._layers = bit_layers(converted)
        with parameter_layout(converted):
            self._shapes = {name: tuple(value.shape) for name, value in converted.state_dict().items()}
        refuse_differences(
            self._shapes.keys() - stored.state_dict.keys(),
            stored.state_dict.keys() - self._shapes.keys(),
            where,
        )
        _refuse_newly_tied(groups, stored, where)

    def __getitem__(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        layer = self._layers.get(module)
        if layer is None or kind != "weight":
            return self._read(name)
        weight = self._read(name)
        if layer.has_factors:
            factors = [self._read(f"{module}.{factor}") for factor in SPLIT_NAMES]
            if bool(factors[-1].any()):  # split, see SplitLinear.holds_split
                wide = torch.promote_types(weight.dtype, torch.float32)
                weight = joined(*(part.to(wide) for part in (weight, *factors)))
        return weight.t() if layer.is_transposed else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, name: str) -> torch.Tensor:
        value = self._stored.state_dict[name]
        if tuple(value.shape) != self._shapes[name]:
            raise misshapen(self._where, name, value.shape, self._shapes[name])
        return value.detach()


def _rebuild(stored: TrainingCheckpoint, overrides: dict[str, Any], where: str) -> PreTrainedModel:
    """The stored model in fp32, with plain layers."""
    config = config_from_dict(stored.hf_config, overrides, where)
    model = random_model(config, seed=0, where=where)
    groups = tied_names(model.state_dict(keep_vars=True))
    convert(model, stored.recipe)
    fill_weights(model, stored.state_dict, where)
    _refuse_newly_tied(groups, stored, where)
    restore(model)
    with reading(where):
        restore_generation(stored.generation, model)
    return model


def _refuse_newly_tied(groups: list[list[str]], stored: TrainingCheckpoint, where: str) -> None:
    """Check that weights have equal values if the model ties them and the checkpoint did not."""
    if stored.hf_config.get("tie_word_embeddings"):
        return
    for first, *others in groups:
        for other in others:
            if not same_bits(stored.state_dict[first], stored.state_dict[other]):
                raise other_tied_values(where, other, first)


def source_of(settings: ModelSettings) -> Path:
    """The file or folder that a model is built from, for messages."""
    return settings.config or checkpoint_of(settings)


def checkpoint_of(settings: ModelSettings) -> Path:
    """The folder of the weights that `settings` name.

    Raises:
        UserError: it is a checkpoint of an engine without its manifest.
    """
    assert settings.checkpoint is not None, "ModelSettings holds exactly one of config and checkpoint"
    folder = settings.checkpoint.expanduser()
    plain = plain_checkpoint(folder)
    if plain is not None and not (folder / CONFIG_FILE).is_file():
        raise UserError(f"checkpoint {plain} has no {MANIFEST}: use a complete one; {loading_advice(plain)}")
    return folder


def _config_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(
            f"checkpoint {folder} is not a folder: name a Hugging Face folder or a training checkpoint; "
            "download a model of the Hub first (hf download NAME --local-dir FOLDER)"
        )
    refuse_irregular_files("checkpoint", folder, TEMPLATES)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"checkpoint {folder} has no {CONFIG_FILE} and contains no training checkpoint: name another"
        )
    return folder / CONFIG_FILE
