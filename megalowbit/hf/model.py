"""Hugging Face models: random initialisation, loading the weights of a folder, and saving.

Random weights depend on the seed only; the global generator does not change. Saving uses a copy of the
weights, so it does not disturb a model during training, with its low-bit layers and hooks. Not covered:
models larger than the memory of a host (`start` has them for training).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megalowbit.errors import UserError
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import pad_vocabulary
from megalowbit.hf.folders.model_card import FILE as MODEL_CARD
from megalowbit.hf.folders.new_folder import new_folder
from megalowbit.hf.folders.stored_weights import (
    WEIGHT_DTYPES,
    misshapen,
    other_tied_values,
    refuse_differences,
    refuse_nonfinite_weight,
    widest,
    without_scale,
)
from megalowbit.hf.folders.tokenizer_files import copy_tokenizer
from megalowbit.hf.folders.weight_files import find_weight_files, stored_dtypes
from megalowbit.hf.generation import generation_to_export, restore_generation, save_model, save_settings
from megalowbit.layers.conversion.convert import bit_layers, plain_state_dict
from megalowbit.layers.state_dict_layout import parameter_layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class SavableTokenizer(Protocol):
    """The part of a tokenizer that `save_hf` uses; megalowbit's and transformers' tokenizers have it."""

    eos_token_id: Any

    def save_pretrained(self, folder: Any) -> Any:
        """Write the tokenizer's files into `folder`."""


def random_model(
    config: PretrainedConfig, *, seed: int, device: str = "cpu", where: str = "the configuration"
) -> PreTrainedModel:
    """An fp32 model with random weights that depend on `config` and `seed` only.

    `device` is `"cpu"`, or `"meta"` for no weights. `where` is the source of `config`, for messages.

    Raises:
        UserError: values that transformers accepts in a file but cannot build, or more weights than memory.
    """
    model_class = family(config.model_type).load_model_class()
    try:
        with _seeded(seed), torch.device(device):
            return model_class._from_config(config, dtype=torch.float32)
    except ImportError as error:
        raise _unavailable(config, error) from error
    except (ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise UserError(
            f"no {config.model_type} can be built from {where} ({reason}): "
            "correct its fields or model.overrides"
        ) from error


def load_weights(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load the model of a Hugging Face folder, which must contain every weight.

    Args:
        config: read from `folder`, perhaps with overrides.
        folder: contains `model.safetensors` or another form that transformers supports.
        dtype: of the result; `"auto"`: the stored dtype, or the narrowest that holds all stored ones.

    Raises:
        UserError: weights are missing, damaged, or differ from those of `config`.
    """
    model_family = family(config.model_type)
    model_class = model_family.load_model_class()
    try:
        files = find_weight_files(folder)
        stored = stored_dtypes(files)
        with _seeded(0), quiet_transformers():
            model, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=widest(stored.values()) if dtype == "auto" else dtype,
                use_safetensors=files.is_safetensors,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # the report lists them by name
            )
    except UserError:
        raise
    except ImportError as error:
        raise _unavailable(config, error) from error
    except Exception as error:  # a damaged pickle can raise anything
        reason = _first_line(error) or type(error).__name__
        raise UserError(f"the weights in {folder} cannot be loaded ({reason}): replace the folder") from error
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise misshapen(str(folder), name, found, expected)
    _refuse_integers(model, stored, str(folder))
    former = tuple(model_family.former_buffers)
    unexpected = [name for name in report["unexpected_keys"] if not name.endswith(former)]
    refuse_differences(report["missing_keys"], unexpected, str(folder))
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if config.tie_word_embeddings and not is_tied:  # transformers only warns, and trains other weights
        raise other_tied_values(folder, f"{model_family.head}.weight", f"{model_family.tokens}.weight")
    return model


def fill_weights(
    model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor], where: str, *, is_assigned: bool = False
) -> None:
    """Copy `state_dict`, which must be complete, into `model`, one tensor at a time.

    Args:
        model: of the same architecture as the source of the weights, converted or not in the same way.
        state_dict: the weights in the parameters' layout; may read each one on access.
        where: the source of the weights, for messages.
        is_assigned: use the tensors themselves, with their dtype, instead of copying their values.

    Raises:
        UserError: names or shapes differ; then nothing has changed.
    """
    with parameter_layout(model):
        expected = model.state_dict(keep_vars=True)
        refuse_differences(expected.keys() - state_dict.keys(), state_dict.keys() - expected.keys(), where)
        for name in expected:
            if (value := state_dict[name]).shape != expected[name].shape:
                raise misshapen(where, name, value.shape, expected[name].shape)
            del value  # one tensor at a time
        if is_assigned:
            model.load_state_dict(state_dict, strict=True, assign=True)
            model.tie_weights()  # assigning separates what the configuration ties
            return
    with torch.no_grad():
        for name, target in expected.items():
            target.copy_(state_dict[name])
    for layer in bit_layers(model).values():  # loading a state dict would detect this
        layer.is_split = layer.holds_split()


def save_hf(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: SavableTokenizer | None = None,
    *,
    whole: Mapping[str, torch.Tensor] | None = None,
    tokenizer_files: Path | None = None,
    card: str | None = None,
) -> None:
    """Save `model` as an ordinary Hugging Face checkpoint for `from_pretrained`, completely or not at all.

    The model does not change: its weights are copied to the CPU. In the copy, low-bit layers are converted
    back, and a padded vocabulary loses its padding.

    Args:
        model: converted or not, on any device.
        folder: a new folder.
        tokenizer: saved with the weights; its end-of-text id becomes the model's.
        whole: the model's full weights if ranks hold parts of them, see `plain_state_dict`.
        tokenizer_files: folder of a tokenizer whose files are copied unchanged.
        card: text of the model card, see `folders.model_card`; None: none.

    Raises:
        UserError: `folder` exists and is not empty, or cannot be written.
    """
    plain = _plain_copy(model, whole)
    pad_vocabulary(plain, None)
    restore_generation(generation_to_export(model), plain)
    if tokenizer is not None:
        use_end_of_text(plain, tokenizer)
    with new_folder(Path(folder)) as draft, quiet_transformers():
        save_model(plain, draft)
        _write_tokenizer(draft, tokenizer, tokenizer_files)
        if card is not None:
            (draft / MODEL_CARD).write_text(card, encoding="utf-8")


def write_settings(
    model: PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype,
    tokenizer: SavableTokenizer | None,
    tokenizer_files: Path,
    card: str,
) -> None:
    """Write what belongs beside the weights: configuration, generation settings, tokenizer and model card.

    Args:
        model: on any device, with the generation settings to write; it changes.
        folder: where the weights are.
        dtype: of the weights.
        tokenizer: saved; its end-of-text id becomes the model's. None: the one in `tokenizer_files`, if any.
        tokenizer_files: folder of a tokenizer whose files are copied unchanged.
        card: text of the model card.
    """
    if tokenizer is not None:
        use_end_of_text(model, tokenizer)
    with quiet_transformers():
        save_settings(model, folder, dtype)
    kept = tokenizer_files if tokenizer is None and tokenizer_files.is_dir() else None
    _write_tokenizer(folder, tokenizer, kept)
    (folder / MODEL_CARD).write_text(card, encoding="utf-8")


def _write_tokenizer(folder: Path, tokenizer: SavableTokenizer | None, files: Path | None) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if files is not None:
        copy_tokenizer(files, folder, with_config=False)


def use_end_of_text(model: PreTrainedModel, tokenizer: SavableTokenizer) -> None:
    """Make the tokenizer's end-of-text id that of the model, which also begins texts.

    Settings that have this id already keep their other end tokens and their begin token.
    """
    for settings in (model.config, model.generation_config):
        if settings is None:
            continue
        ends = settings.eos_token_id
        if tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):
            settings.eos_token_id = settings.bos_token_id = tokenizer.eos_token_id


def refuse_nonfinite(model: PreTrainedModel, where: str) -> None:
    """Check that all weights are finite; otherwise no loss of the model would be.

    Raises:
        UserError: names the first weight with NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        refuse_nonfinite_weight(name, parameter.detach(), where)


def _refuse_integers(model: PreTrainedModel, stored: dict[str, torch.dtype | str], where: str) -> None:
    # Folders of a GPT-2 without a head lack the first part of the names.
    named = model.named_parameters(remove_duplicate=False)
    own = {name.removeprefix(f"{model.base_model_prefix}.") for name, _ in named}
    for name, dtype in sorted(stored.items()):
        if name.removeprefix(f"{model.base_model_prefix}.") in own and dtype not in WEIGHT_DTYPES:
            raise without_scale(where, name, dtype)


def _unavailable(config: PretrainedConfig, error: ImportError) -> UserError:
    """The error for attention whose package this machine lacks."""
    return UserError(
        f"attn_implementation {config._attn_implementation!r} is not available here ({_first_line(error)}): "
        'install its package, or set megalowbit.model.overrides to {"attn_implementation": "sdpa"}'
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _plain_copy(model: PreTrainedModel, whole: Mapping[str, torch.Tensor] | None = None) -> PreTrainedModel:
    """A copy on the CPU with plain layers, made from the weights alone.

    `copy.deepcopy` would also copy objects that hooks and observers reference: the engine, its optimizer, the
    run's writers.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    copy = random_model(config, seed=0, device="meta")
    fill_weights(copy, plain_state_dict(model, whole), "the model", is_assigned=True)
    return copy


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generator inside the block and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and the report of wrong weights, which is checked here and raised in one line."""
    from transformers.utils import logging

    verbosity, has_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bar:
            logging.enable_progress_bar()
