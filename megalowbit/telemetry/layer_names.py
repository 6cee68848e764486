"""Short names of layers, for tables and pictures. Imported without torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence


def short_names(layers: Sequence[str]) -> dict[str, str]:
    """Short, unique display names of the layers.

    The name from the block number on (`transformer.h.3.attn.c_attn` → `3.attn.c_attn`). If those are not
    unique, the names without their common prefix. Characters that cannot be printed are escaped.
    """
    return {layer: _printable(name) for layer, name in _shortened(layers).items()}


def _printable(name: str) -> str:
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in name
    )


def _shortened(layers: Sequence[str]) -> dict[str, str]:
    found = {layer: re.sub(r"^[^0-9]*\.(?=[0-9]+\.)", "", layer) for layer in layers}
    if len(set(found.values())) == len(found):
        return found
    parts = [layer.split(".") for layer in layers]
    common = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*(p[:-1] for p in parts), strict=False)
    )
    start = len(list(common))
    return {layer: ".".join(names[start:]) for layer, names in zip(layers, parts, strict=True)}
