"""The model card (`README.md`) of an exported model: what its checkpoint and its run recorded.

Nothing is guessed: a fact that was not recorded has no line, and neither licence nor language nor intended
use are stated. Of absolute paths only the last part is shown, because cards are published.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "README.md"
ORIGIN = "exported from a training checkpoint of megalowbit"
USAGE = "Load it with\n`transformers.AutoModelForCausalLM.from_pretrained`."
LIBRARIES = ("megalowbit", "torch", "transformers", "deepspeed")


def model_card(
    header: Mapping[str, Any],
    recipe: str | None,
    *,
    dtype: str,
    usage: str = USAGE,
    origin: str = ORIGIN,
    notes: Sequence[str] = (),
) -> str:
    """The text of a card.

    Args:
        header: of the checkpoint, see `CheckpointContents`.
        recipe: name of the recipe with which the weights were trained or rounded; None: with none.
        dtype: of the exported weights.
        usage: what to do with the folder.
        origin: where the weights are from, after "a causal language model, ".
        notes: further sentences.
    """
    ours, progress = _mapping(header.get("megalowbit")), _mapping(header.get("progress"))
    # values in JSON are YAML
    kind = _cell(_mapping(ours.get("hf_config")).get("model_type"))
    tags = json.dumps(["megalowbit", kind, *([] if recipe is None else [recipe])])
    front = f"library_name: transformers\npipeline_tag: text-generation\ntags: {tags}\n"
    rows = {
        "recipe": recipe,
        "other recipes": _of_layers(_mapping(ours.get("recipe")).get("layers")),
        **(_run_facts(ours, progress) if progress else {"training": "none: these are imported weights"}),
        "dtype of these weights": dtype,
        "exported with": ", ".join(f"{library} {version}" for library, version in versions().items()),
    }
    if isinstance(header.get("ds_version"), str):
        rows["trained with"] = f"deepspeed {header['ds_version']}"
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items() if value is not None)
    return (
        f"---\n{front}---\n\n# A {kind} model in megalowbit\n\n"
        f"A causal language model, {origin}. {usage}\n\n"
        f"| | |\n|---|---|\n{table}\n" + "".join(f"\nNote: {_cell(each)}.\n" for each in notes)
    )


def versions() -> dict[str, str]:
    """The versions of the libraries that make a model, as far as they are installed."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run_facts(ours: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    totals, validation = _mapping(progress.get("totals")), _mapping(progress.get("validation"))
    config = _mapping(ours.get("config"))
    validated = _mapping(validation.get("last")).get("validation/loss")
    return {
        "data": _data(_mapping(_mapping(config.get("megalowbit")).get("data"))),
        "steps": _count(ours.get("step")),
        "tokens": _count(totals.get("tokens")),
        "loss of the last step": _number(totals.get("final_loss")),
        "validation loss": _validation(_number(validated), validation.get("last_step")),
        "SHA-256 of the configuration": _digest(config) if config else None,
    }


def _of_layers(layers: Any) -> str | None:
    """The recipes of single layers; None if all have the same."""
    own = {pattern: _mapping(each) for pattern, each in _mapping(layers).items()}
    shown = (
        f"`{pattern}`: {each.get('name')}" + " (if present)" * (each.get("if_present") is True)
        for pattern, each in own.items()
    )
    return ", ".join(shown) or None


def _validation(loss: str | None, step: Any) -> str | None:
    return None if loss is None else f"{loss} at step {_count(step)}"


def _data(section: Mapping[str, Any]) -> str | None:
    """The names of the texts, as far as they are recorded."""
    sources = section.get("sources")
    entries = sources.values() if isinstance(sources, Mapping) else [section]
    names = [_mapping(each).get("corpus") for each in entries]
    shown = [_without_folders(each) for each in names if isinstance(each, str)]
    return ", ".join(shown) or None


def _without_folders(corpus: str) -> str:
    is_path = corpus.startswith(("/", "~", "."))
    return Path(corpus).name if is_path else corpus


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> str | None:
    return f"{value:,}" if type(value) is int else None


def _number(value: Any) -> str | None:
    return f"{value:.4f}" if isinstance(value, float) else None


def _cell(value: Any) -> str:
    """Text that cannot end its cell or line."""
    return " ".join(str(value).split()).replace("|", "\\|")
