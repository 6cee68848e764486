"""Parameters that torch has sharded: its distributed tensors, made by `fully_shard` or `parallelize_module`.

Low-bit layers work below FSDP 2, which gives them whole weights in each forward. Code that replaces layers,
or computes on weights between steps, needs whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megalowbit.errors import UserError


def refuse_sharded(named_parameters: Iterable[tuple[str, Tensor]], remedy: str) -> None:
    """Reject a model with sharded parameters.

    Raises:
        UserError: names the first one, and the remedy.
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "to_local"):  # of torch's DTensor; its module need not be imported
            raise UserError(
                f"parameter {name} is a shard of torch's fully_shard or parallelize_module: {remedy}"
            )
