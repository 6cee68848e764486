"""The one check of a configuration that all ways to a run go through, and the one of the machine.

`load_config` reads what can be read in a second. Here is what takes torch, transformers and DeepSpeed to
know: recipe, DeepSpeed's own blocks, the model's configuration. The run, `--dry-run`, `--prepare-data`,
`submit.py` and sweeps call the same function, so none accepts what another refuses. Whether this machine has
the kernels for a recipe is asked where the run is, before anything is written. Not covered: the data.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megalowbit.engine.run_checks.deepspeed_blocks import check_parts
from megalowbit.errors import Problems, UserError
from megalowbit.hf.checkpoint import read_config
from megalowbit.layers.matmul import fp4 as native_fp4
from megalowbit.layers.matmul import fp8 as fp8_product
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.config import BLOCK, PretrainConfig, load_config
from megalowbit.quantize.backends import backend_of

_DESCRIBED = {"c": "C kernel", "triton": "Triton kernels", "torch": "plain torch (slow)"}
_UNAVAILABLE = {"fp8": fp8_product.why_unavailable, "fp4": native_fp4.why_unavailable}


def load_checked_config(path: Path, overrides: list[str], *, world_size: int | None) -> PretrainConfig:
    """Read a configuration as `load_config` does, and check it.

    Raises:
        UserError: a line for each mistake.
    """
    config = load_config(path, overrides, world_size=world_size)
    check_config(config)
    return config


def check_config(config: PretrainConfig, *, has_model: bool = True) -> None:
    """Check what `load_config` cannot; without `has_model` the model's files can be read in the run only.

    Raises:
        UserError: a line for each mistake.
    """
    problems = Problems()
    settings = config.settings
    with problems.collect():
        check_parts(config.parts)
    if not problems:  # what follows takes a recipe that is one
        recipe = recipe_of(config.recipe)
        for component, of_component in settings.components():
            with problems.collect():
                try:
                    component.check_recipe(of_component, recipe)
                except UserError as error:
                    raise UserError(f"{BLOCK}.{component.key}: {error}") from None
    if has_model:
        with problems.collect():
            read_config(settings.model)
    problems.raise_any()


def this_device() -> torch.device:
    """The device that a run on this machine computes on."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Why the recipe's products cannot run on a device; `None` if they can."""
    reason = _UNAVAILABLE[recipe.gemm](device) if recipe.gemm in _UNAVAILABLE else None
    return f'gemm "{recipe.gemm}" cannot run on {device}: {reason}' if reason else None


def describe_kernels(recipe: Recipe, device: torch.device) -> str:
    """What quantises and multiplies, for people.

    Raises:
        UserError: `MEGALOWBIT_BACKEND` asks for what the device cannot have.
    """
    backend = _DESCRIBED[backend_of(torch.empty(0, device=device))]
    return f"{backend} on {device}, {recipe.gemm} products"


def check_kernels(recipe: Recipe) -> None:
    """Refuse a recipe or a backend that this machine cannot run.

    Raises:
        UserError: naming the device and the remedy.
    """
    device = this_device()
    describe_kernels(recipe, device)
    reason = why_not(recipe, device)
    if reason:
        raise UserError(f'{reason}; set gemm to "bf16" in the recipe, which computes the same products')
