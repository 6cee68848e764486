"""What a configuration has by name or path, by its content.

A finished run stands for its configuration only if the model, the recipe, the weights to start from, the
tokenizer and the text are still what they were when it was trained. All of these may change while their names
and paths stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalowbit.data.settings import BPE_TOKENIZER, BYTE_TOKENIZER, NO_TOKENIZER
from megalowbit.data.sources import is_on_hub, open_source, sources_of
from megalowbit.data.tokenize import FolderTokenizer
from megalowbit.errors import UserError
from megalowbit.hf.training_checkpoint import digest_of_weights
from megalowbit.json_text import read_json_object
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.config import PretrainConfig

MISSING = "nothing"  # in the place of a value


def contents_of(config: PretrainConfig) -> dict[str, Any]:
    """All but the text: the fields of the model and of the recipe, digests of the weights and the tokenizer.

    Raises:
        UserError: a file cannot be read.
    """
    model, tokenizer = config.settings.model, config.settings.data.tokenizer
    files = {}
    if model.checkpoint is not None:
        files["weights"] = digest_of_weights(model.checkpoint)
    if tokenizer not in (BYTE_TOKENIZER, BPE_TOKENIZER, NO_TOKENIZER):
        files["tokenizer"] = FolderTokenizer(Path(tokenizer).expanduser()).fingerprint
    path = config.to_dict()["megalowbit"]["model"].get("config")
    return {
        "model": None if path is None else read_json_object(Path(path)),
        "files": files,
        "recipe": plain(recipe_of(config.recipe).to_dict()),
    }


def texts_of(config: PretrainConfig) -> dict[str, str]:
    """Digests of the sources of the text by name, `text` if there is one; those on a hub are left out.

    Raises:
        UserError: a file cannot be read.
    """
    sources = sources_of(config.settings.data).items()
    return {
        name or "text": open_source(name, each).fingerprint for name, each in sources if not is_on_hub(each)
    }


def with_default_fields(recipe: Mapping[str, Any]) -> Any:
    """The recorded fields of a recipe, and at their defaults those that were added since."""
    try:
        return plain(Recipe.from_dict(recipe).to_dict())
    except UserError:  # a field is gone: the differences name it
        return recipe


def plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def differences(before: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{where}.{key}" if where else str(key)
            yield from differences(before.get(key, MISSING), now.get(key, MISSING), inner)
    elif before != now or type(before) is not type(now):
        yield where, before, now
