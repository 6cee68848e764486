"""Checks of the configuration that need torch, transformers or DeepSpeed, and a check of the machine.

`load_config` makes the checks that take a second. This module checks the recipe, DeepSpeed's own blocks and
the model's configuration. Runs, `--dry-run`, `--prepare-data`, `submit.py` and sweeps all call
`check_config`, so all accept the same configurations. `check_tokenizer` reads the tokenizer's files.
`check_kernels` checks that this machine can run the recipe, and loads the C kernels; the run calls it before
it writes anything. Not covered: the other data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megalowbit.config.values import is_installed
from megalowbit.data.settings import BPE_TOKENIZER, DataSettings
from megalowbit.data.tokenize import Tokenizer, build_tokenizer, check_export, check_same_ids
from megalowbit.engine.run_checks.deepspeed_blocks import check_parts
from megalowbit.errors import Problems, UserError
from megalowbit.hf.batches.separate_documents import uses_flash_attention
from megalowbit.hf.checkpoint import read_config
from megalowbit.hf.folders.tokenizer_files import tokenizer_folder
from megalowbit.layers.cpu_gemm import cpu_gemm
from megalowbit.layers.matmul import fp4 as native_fp4
from megalowbit.layers.matmul import fp8 as fp8_product
from megalowbit.layers.recipe import Recipe, named_recipes
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.config import PretrainConfig, load_config
from megalowbit.quantize.backends import backend_of, load_kernels
from megalowbit.values import BLOCK

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DESCRIBED = {"c": "C kernel", "triton": "Triton kernels", "torch": "plain torch (slow)"}
WITH_MASKS = ("sdpa", "eager")  # attention of transformers that takes a mask for each row
HALF = ("fp16", "bf16")  # precisions of flash attention
_UNAVAILABLE = {"fp8": fp8_product.why_unavailable, "fp4": native_fp4.why_unavailable}


def load_checked_config(path: Path, overrides: list[str], *, world_size: int | None) -> PretrainConfig:
    """Read a configuration with `load_config` and check it with `check_config`.

    Raises:
        UserError: a line for each mistake.
    """
    config = load_config(path, overrides, world_size=world_size)
    check_config(config)
    return config


def check_config(config: PretrainConfig, *, has_model: bool = True) -> None:
    """Check everything that `load_config` does not.

    Args:
        config: the configuration.
        has_model: whether this machine has the model's files and the run's packages; if not, they are not
            checked.

    Raises:
        UserError: a line for each mistake.
    """
    problems = Problems()
    settings = config.settings
    with problems.collect():
        check_parts(config.parts)
    if not problems:  # the recipe is valid
        recipe = recipe_of(config.recipe)
        for component, of_component in settings.components():
            with problems.collect():
                try:
                    component.check_recipe(of_component, recipe)
                except UserError as error:
                    raise UserError(f"{BLOCK}.{component.key}: {error}") from None
    if has_model:
        with problems.collect():
            _check_trackio(config)
        with problems.collect():
            model = read_config(settings.model)
            check_attention(model, settings.data, config.parts.settings.precision)
            check_positions(model, settings.data)
    problems.raise_any()


def check_tokenizer(config: PretrainConfig, *, is_start: bool = True) -> None:
    """Check that the tokenizer can be exported with the model, if the run will do that.

    Args:
        config: the configuration.
        is_start: whether training begins with the weights of `model.checkpoint`, if that is set; then the
            tokenizer must be theirs. A BPE is not compared: a run has trained it later.

    Raises:
        UserError: transformers would give other ids than the training, or the tokenizer cannot be used, or
            is not that of the weights.
    """
    if is_start and config.settings.data.tokenizer != BPE_TOKENIZER:
        check_start_tokenizer(config)
    if config.settings.checkpoint.export_hf:
        check_export(config.settings.data, read_config(config.settings.model).model_type)


def check_start_tokenizer(config: PretrainConfig, tokenizer: Tokenizer | None = None) -> None:
    """Check that the tokenizer is the one that was saved with the weights to start from, if one was.

    Args:
        config: the configuration.
        tokenizer: that of the configuration, if it is already there.

    Raises:
        UserError: it gives other ids, or cannot be used.
    """
    settings, start = config.settings.data, config.settings.model.checkpoint
    folder = None if start is None else tokenizer_folder(start)
    if folder is None:
        return
    remedy = (
        f"and the weights to start from would get the wrong ids: set {BLOCK}.data.tokenizer to {folder}, or, "
        "to train new embeddings on purpose, move the tokenizer's files out of there"
    )
    check_same_ids(tokenizer or build_tokenizer(settings), settings, folder, remedy=remedy)


def _check_trackio(config: PretrainConfig) -> None:
    """Reject `trackio` without its package, as DeepSpeed's blocks are for theirs."""
    trackio = config.settings.trackio
    if trackio is not None and trackio.enabled and not is_installed("trackio"):
        raise UserError(
            f"{BLOCK}.trackio is enabled but trackio is not installed: pip install 'megalowbit[trackio]', or "
            f"set {BLOCK}.trackio.enabled=false"
        )


def check_attention(model: PretrainedConfig, data: DataSettings, precision: str) -> None:
    """Reject attention that cannot compute, or would look across documents that are to be separate.

    Raises:
        UserError: names the implementation and the remedy.
    """
    chosen = model._attn_implementation
    if uses_flash_attention(model):
        if precision not in HALF:
            raise UserError(
                f"the model's attn_implementation {chosen!r} computes in {' or '.join(HALF)} only, and "
                f"{BLOCK}.precision is {precision!r}: change one of them"
            )
    elif data.separates_documents and chosen not in (None, *WITH_MASKS):
        raise UserError(
            f"{BLOCK}.data.packing {data.packing!r} keeps documents apart, which the model's "
            f"attn_implementation {chosen!r} would not do: set it to {', '.join(map(repr, WITH_MASKS))} or "
            "one of flash attention's"
        )


def check_positions(model: PretrainedConfig, data: DataSettings) -> None:
    """Reject rotary positions with which a separate document would depend on others in its micro-batch.

    transformers takes longrope's short or long factors for a whole micro-batch, by its largest position.

    Raises:
        UserError: names both settings and the remedy.
    """
    rope = getattr(model, "rope_parameters", None) or {}
    if not data.separates_documents or rope.get("rope_type") != "longrope":
        return
    limit = rope["original_max_position_embeddings"]
    if data.sequence_length > limit:
        raise UserError(
            f"{BLOCK}.data.packing {data.packing!r} keeps documents apart, but the model's longrope chooses "
            'its factors by the longest document of a micro-batch: set data.packing to "wrapped", or '
            f"data.sequence_length {data.sequence_length} to at most original_max_position_embeddings {limit}"
        )


def recipe_advice(config: PretrainConfig) -> str | None:
    """One line with the sections that belong to the run's recipe and are off; `None` if there are none.

    A section that the configuration sets to `null` is off on purpose.
    """
    recipe = recipe_of(config.recipe)
    named = named_recipes().get(recipe.name)
    if named is None or named.recipe != recipe:
        return None
    given = config.settings.model_fields_set
    missing = [key for key in named.settings if key not in given and getattr(config.settings, key) is None]
    off = {key: named.settings[key] for key in missing}
    return f"{recipe.name} is meant to be used with {json.dumps(off)[1:-1]}, which is off" if off else None


def this_device() -> torch.device:
    """The device that a run on this machine computes on; `DS_ACCELERATOR=cpu` leaves GPUs unused."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Why the recipe's products cannot run on a device; `None` if they can."""
    for gemm in _gemms(recipe):
        reason = _UNAVAILABLE[gemm](device) if gemm in _UNAVAILABLE else None
        if reason:
            return f'gemm "{gemm}" cannot run on {device}: {reason}'
    return None


def describe_gemms(recipe: Recipe, device: torch.device, *, noun: str = "") -> str:
    """The GEMMs of all layers, such as `bf16 and fp8`, before `noun`, and that a CPU multiplies in fp32."""
    names = _gemms(recipe)
    is_wide = "bf16" in names and device.type == "cpu" and cpu_gemm() == "fp32"
    return " and ".join(names) + noun + (" (multiplied in fp32)" if is_wide else "")


def _gemms(recipe: Recipe) -> list[str]:
    return list(dict.fromkeys(each.gemm for each in recipe.variants))


def describe_kernels(recipe: Recipe, device: torch.device) -> str:
    """The quantisation backend and the precision of products, as text for a person.

    Raises:
        UserError: the device does not support the backend that `MEGALOWBIT_BACKEND` names.
    """
    backend = _DESCRIBED[backend_of(torch.empty(0, device=device))]
    return f"{backend} on {device}, {describe_gemms(recipe, device, noun=' products')}"


def check_kernels(recipe: Recipe) -> None:
    """Check that this machine can run the recipe and the backend, and load the C kernels of a low-bit recipe.

    Raises:
        UserError: it cannot; the message names the device and the remedy.
    """
    device = this_device()
    describe_kernels(recipe, device)
    reason = why_not(recipe, device)
    if reason:
        raise UserError(f'{reason}; set gemm to "bf16" in the recipe, which computes the same products')
    if recipe.quantizes:  # 8-bit formats may also come from speculation and from factors of splits
        load_kernels(device)
