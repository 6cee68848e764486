"""The names users type for quantisers: one line a format.

A name without suffix rounds stochastically, `…nosr` to nearest even, as in Metis.
"""

from __future__ import annotations

import functools

from megalowbit.errors import unknown_name
from megalowbit.quantize.quantizer import BlockQuantizer, IdentityQuantizer, Quantizer


@functools.lru_cache(maxsize=1)
def _registry() -> dict[str, Quantizer]:
    quantizers: list[Quantizer] = [
        BlockQuantizer(name="nvfp4e2m1b", is_stochastic=True),
        BlockQuantizer(name="nvfp4e2m1bnosr"),
        IdentityQuantizer(name="fp32"),
    ]
    return {each.name: each for each in quantizers}


def quantizer_names() -> tuple[str, ...]:
    """All names `quantizer` knows."""
    return tuple(_registry())


def quantizer(name: str) -> Quantizer:
    """The quantiser called `name`.

    Raises:
        UserError: there is none; the message lists the names and the nearest one.
    """
    if name not in _registry():
        raise unknown_name("quantizer", name, quantizer_names())
    return _registry()[name]
