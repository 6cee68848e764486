"""Parameters that torch has sharded: its distributed tensors, made by `fully_shard` or `parallelize_module`.

Low-bit layers work below FSDP 2, which gives them whole weights in each forward. Code that replaces layers,
or computes on weights between steps, needs whole parameters.

After a forward without a backward, FSDP 2 leaves whole weights in the root module, or in all, until the next
backward. So a model is asked for FSDP's modules, not only for distributed tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from megalowbit.errors import UserError


def is_sharded(tensor: Tensor) -> bool:
    """Whether torch has distributed the tensor; the module of its class need not be imported."""
    return hasattr(tensor, "to_local")


def reshard(model: nn.Module) -> None:
    """Make `model.parameters()` those that an optimizer must hold; no communication."""
    for module in _fsdp_modules(model):
        module.reshard()


def refuse_sharded_model(function: str, model: nn.Module, remedy: str) -> None:
    """Reject a model that torch has sharded, whether its weights are gathered at the moment or not.

    Args:
        function: what the user has called.
        model: the model.
        remedy: what to do instead.

    Raises:
        UserError: names the function, the first sharded module or parameter, and the remedy.
    """
    for module in _fsdp_modules(model):
        kind = type(module).__name__.removeprefix("FSDP")
        raise UserError(f"{function}: torch's fully_shard has sharded {kind}: {remedy}")
    refuse_sharded(function, model.named_parameters(), remedy)


def refuse_sharded(function: str, named_parameters: Iterable[tuple[str, Tensor]], remedy: str) -> None:
    """Reject sharded parameters, where the model is not known; the arguments as above.

    Raises:
        UserError: names the function, the first sharded parameter and the remedy.
    """
    for name, parameter in named_parameters:
        if is_sharded(parameter):
            by = "torch's fully_shard or parallelize_module"
            raise UserError(f"{function}: {by} has sharded parameter {name}: {remedy}")


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))
