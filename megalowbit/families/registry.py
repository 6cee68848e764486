"""The families there are, a line each."""

from __future__ import annotations

from megalowbit.errors import unknown_name
from megalowbit.families.base import Family
from megalowbit.families.gpt2 import GPT2
from megalowbit.families.llama import LLAMA
from megalowbit.families.mistral import MISTRAL

FAMILIES = {
    each.model_type: each
    for each in (
        GPT2,
        LLAMA,
        MISTRAL,
    )
}


def family(model_type: object) -> Family:
    """The family of a `model_type`.

    Raises:
        UserError: there is none.
    """
    found = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise unknown_name("model_type", model_type, FAMILIES)
    return found
