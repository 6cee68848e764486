"""The supported model families, one line each."""

from __future__ import annotations

from megalowbit.errors import unknown_name
from megalowbit.families.base import Family
from megalowbit.families.gpt2 import GPT2
from megalowbit.families.llama import LLAMA
from megalowbit.families.mistral import MISTRAL
from megalowbit.families.qwen2 import QWEN2
from megalowbit.families.qwen3 import QWEN3

FAMILIES = {
    each.model_type: each
    for each in (
        GPT2,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
    )
}


def family(model_type: object) -> Family:
    """The family of a `model_type`.

    Raises:
        UserError: the `model_type` is unknown.
    """
    found = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise unknown_name("model_type", model_type, FAMILIES)
    return found
