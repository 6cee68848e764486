"""Arguments of benchmarks. Imports no torch, so that a mistake is told at once."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import megalowbit as mlb


def shape(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not tokens x in x out: write for example 4096x768x3072"
        )
    tokens, inputs, outputs = map(int, parts)
    return tokens, inputs, outputs


def recipe(text: str) -> mlb.Recipe:
    import megalowbit as mlb  # with torch, as soon as it makes a recipe

    try:
        return mlb.recipe(json.loads(text) if text.startswith("{") else text)
    except ValueError as error:  # a UserError, or invalid JSON
        raise argparse.ArgumentTypeError(str(error)) from error
