"""Parameters that torch has sharded: its distributed tensors, made by `fully_shard` or `parallelize_module`.

Low-bit layers work below FSDP 2, which gives them whole weights in each forward. Code that replaces layers,
or computes on weights between steps, needs whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megalowbit.errors import UserError


def is_sharded(tensor: Tensor) -> bool:
    """Whether torch has distributed the tensor; the module of its class need not be imported."""
    return hasattr(tensor, "to_local")


def refuse_sharded(function: str, named_parameters: Iterable[tuple[str, Tensor]], remedy: str) -> None:
    """Reject a model with sharded parameters.

    Args:
        function: what the user has called.
        named_parameters: of the model.
        remedy: what to do instead.

    Raises:
        UserError: names the function, the first sharded parameter and the remedy.
    """
    for name, parameter in named_parameters:
        if is_sharded(parameter):
            by = "torch's fully_shard or parallelize_module"
            raise UserError(f"{function}: {by} has sharded parameter {name}: {remedy}")
