"""Whether this machine can compute what a recipe asks for, found out before anything is written."""

from __future__ import annotations

import torch

from megalowbit.errors import UserError
from megalowbit.layers.matmul import fp4 as native_fp4
from megalowbit.layers.matmul import fp8 as fp8_product
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.backends import backend_of

_DESCRIBED = {"c": "C kernel", "triton": "Triton kernels", "torch": "plain torch (slow)"}
_UNAVAILABLE = {"fp8": fp8_product.why_unavailable, "fp4": native_fp4.why_unavailable}


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
