"""Reads Megatron-LM's GPT checkpoints in the format `torch`.

    latest_checkpointed_iteration.txt                  "100", or "release"
    iter_0000100/mp_rank_01_002/model_optim_rng.pt     tensor-parallel rank 1, pipeline stage 2

The files of a pipeline stage number its layers from 0. With interleaved stages a file holds several chunks of
layers, `model0`, `model1` …; the layers of all stages' first chunks come first.

The weights have the dtype in which the model computed. Not covered: fp32 masters in the optimizer's states,
the format `torch_dist`, experts, GPT models of DeepSpeed's fork of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalowbit.checkpoints.shards import reading
from megalowbit.errors import UserError, shown
from megalowbit.hf.importers.base import ForeignModel, LazyWeights, entries, file_tensor, named_step
from megalowbit.hf.importers.file_tensors import FileTensor
from megalowbit.hf.importers.inert_files import fields_of, read_inert
from megalowbit.hf.importers.megatron_config import config_from_arguments, merged_config
from megalowbit.hf.importers.megatron_names import (
    TOKENS,
    Sizes,
    layer_and_part,
    layer_weights,
    outside_weights,
)

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
STEP_FOLDER = re.compile(r"iter_\d{7,}|release")
WEIGHT_FILES = ("model_optim_rng.pt", "model_rng.pt")
VERSIONS = (0, 1.0, 2.0, 3.0)
HEADS = {  # configuration fields of the number of query heads, and of key and value heads
    "gpt2": ("n_head", "n_head"),
    "llama": ("num_attention_heads", "num_key_value_heads"),
    "qwen3": ("num_attention_heads", "num_key_value_heads"),
}


class Chunk(NamedTuple):
    """A contiguous run of layers, and what lies outside of them on its pipeline stage.

    Attributes:
        layers: of every layer, part → its tensors on all tensor-parallel ranks.
        outside: the same for embeddings, final norm and head.
    """

    layers: list[dict[str, list[FileTensor]]]
    outside: dict[str, list[FileTensor]]


def find_megatron(source: Path) -> Path | None:
    """The folder of one iteration of a Megatron-LM checkpoint in `source`; None if there is none.

    Raises:
        UserError: there is one, but it is not complete or has another format.
    """
    if not source.is_dir():
        return None
    names = entries(source)
    if TRACKER in names:
        tag = named_step(source / TRACKER)
        folder = source / (f"iter_{int(tag):07d}" if tag.isdecimal() else "release")
        if not (tag.isdecimal() or tag == "release") or not folder.is_dir():
            raise UserError(
                f"{source / TRACKER} says {shown(tag)}, and {source} has no {folder.name}: name a folder"
            )
        return _checked_folder(folder)
    if steps := [name for name in names if STEP_FOLDER.fullmatch(name) and (source / name).is_dir()]:
        raise UserError(f"{source} has no {TRACKER}: name one of its folders: {', '.join(steps[:8])}")
    if any(map(RANK_FOLDER.fullmatch, names)) or STEP_FOLDER.fullmatch(source.name):
        return _checked_folder(source)
    if any(name in names for name in WEIGHT_FILES):
        raise UserError(
            f"{source} is the folder of one rank of Megatron-LM: name the folder that contains it"
        )
    return None


def read_megatron(folder: Path, given: Mapping[str, Any] | None) -> ForeignModel:
    """The model in a checkpoint of Megatron-LM.

    Args:
        folder: of one iteration, as `find_megatron` returns it.
        given: fields of a Hugging Face configuration; they complete what the checkpoint's arguments say. A
            checkpoint without arguments needs them all.

    Raises:
        UserError: files of ranks are missing or damaged, belong to different iterations, or contain a model
            that no supported family has.
    """
    where = f"checkpoint {folder}"
    with reading(where):
        paths = _rank_files(folder)
        files = [[read_inert(path) for path in stage] for stage in paths]
        first = files[0][0]
        arguments = fields_of(first.get("args"))
        version = first.get("checkpoint_version", 0)
        if isinstance(version, bool) or version not in VERSIONS:
            raise UserError(
                f"{where} has version {shown(version)}: versions 0, 1.0, 2.0 and 3.0 are supported"
            )
        _check_ranks(files, arguments, folder)
        chunks = list(_chunks(files, where))
        if version < 2 and any("linear_qkv" in name for name, _ in _flat(first)):
            raise UserError(
                f"{where} has version {version} and names of Megatron Core, whose version is 3.0: use another"
            )
        outside = {part: tensors for chunk in chunks for part, tensors in chunk.outside.items()}
        if TOKENS not in outside:
            raise UserError(f"{where} has no word embeddings: it is not a GPT model")
        rows = sum(part.shape[0] for part in outside[TOKENS])
        if arguments:
            config = merged_config(_config_of_ranks(files, rows, where), given, where)
        elif given is not None:
            config = dict(given)
        else:
            raise UserError(f"{where} has no arguments, so name a config.json with --config")
        sizes = _sizes(config, rows, float(version), where)
        # a tied head of a pipeline's last stage is among them; whoever knows the ties compares it
        stored = outside_weights(outside, sizes)
        for index, layer in enumerate(layer for chunk in chunks for layer in chunk.layers):
            stored |= layer_weights(index, layer, sizes)
        ranks = f"{len(files[0])} tensor-parallel × {len(files)} pipeline ranks"
        description = f"Megatron-LM, {ranks}, iteration {first.get('iteration')}"
        return ForeignModel(config, LazyWeights(stored), [*chain(*paths)], description)


def _checked_folder(folder: Path) -> Path:
    names = entries(folder)
    if any(name.endswith(".distcp") for name in names) or ".metadata" in names:
        raise UserError(
            f"{folder} has the format torch_dist: save it with --ckpt-convert-format torch in Megatron-LM "
            "first"
        )
    if not any(map(RANK_FOLDER.fullmatch, names)):
        raise UserError(f"{folder} has no mp_rank_00: name a complete checkpoint")
    return folder


def _rank_files(folder: Path) -> list[list[Path]]:
    """All files, by pipeline stage and tensor-parallel rank."""
    found: dict[tuple[int, int], Path] = {}
    for name in entries(folder):
        if match := RANK_FOLDER.fullmatch(name):
            if match[3]:
                raise UserError(
                    f"{folder} has files of expert-parallel ranks ({name}): experts are not supported"
                )
            found[int(match[2] or 0), int(match[1])] = folder / name
    stages, ranks = (max(index) + 1 for index in zip(*found, strict=True))
    files = []
    for stage in range(stages):
        for rank in range(ranks):
            if (stage, rank) not in found:
                what = f"tensor-parallel rank {rank}" + f" of pipeline stage {stage}" * (stages > 1)
                raise UserError(f"{folder} lacks the folder of {what}: add the folders of all ranks")
        files.append([_weight_file(found[stage, rank]) for rank in range(ranks)])
    return files


def _weight_file(folder: Path) -> Path:
    names = entries(folder)
    for name in WEIGHT_FILES:
        if name in names:
            return folder / name
    what = "holds only optimizer states" if any("optim" in name for name in names) else "has no weights"
    raise UserError(f"{folder} {what}: add {WEIGHT_FILES[0]}")


def _check_ranks(
    files: Sequence[Sequence[Mapping[str, Any]]], arguments: Mapping[str, Any], folder: Path
) -> None:
    """Check that all ranks' files are there and belong together."""
    tensor_size = arguments.get("tensor_model_parallel_size", arguments.get("model_parallel_size"))
    pipeline_size = arguments.get("pipeline_model_parallel_size")
    sizes = ((tensor_size, len(files[0]), "tensor-parallel"), (pipeline_size, len(files), "pipeline"))
    for expected, found, what in sizes:
        if isinstance(expected, int) and expected != found:
            raise UserError(
                f"{folder} has folders of {found} {what} ranks, but was saved by {expected}: "
                "add the folders of all ranks"
            )
    first = files[0][0]
    for stage, ranks in enumerate(files):
        for rank, content in enumerate(ranks):
            for key in ("iteration", "checkpoint_version"):
                if content.get(key) != first.get(key):
                    raise UserError(
                        f"{folder} mixes checkpoints: {key} is {shown(first.get(key))} on the first rank and "
                        f"{shown(content.get(key))} on tensor-parallel rank {rank} of pipeline stage {stage}"
                    )


def _config_of_ranks(files: Sequence[Sequence[Mapping[str, Any]]], rows: int, where: str) -> dict[str, Any]:
    """The configuration that the arguments in all ranks' files give; those of the first rank are there."""
    found = [fields_of(content.get("args")) for content in chain(*files)]
    first, *others = [config_from_arguments(arguments, rows, where) for arguments in found if arguments]
    for other in others:
        for name, value in other.items():
            if value != first.get(name):
                raise UserError(
                    f"{where} mixes checkpoints: arguments of ranks give {name} {shown(first.get(name))} and "
                    f"{shown(value)}; use one that was saved completely"
                )
    return first


def _chunks(files: Sequence[Sequence[Mapping[str, Any]]], where: str) -> Iterator[Chunk]:
    """All chunks in the order of their layers."""
    first = files[0][0]
    keys = (
        ["model"] if "model" in first else [key for key in map("model{}".format, range(1000)) if key in first]
    )
    if not keys:
        raise UserError(f"{where} holds no model: it has only {', '.join(sorted(map(str, first)))[:200]}")
    for key in keys:
        for stage, ranks in enumerate(files):
            if any(not isinstance(content.get(key), Mapping) for content in ranks):
                raise UserError(f"{where}: pipeline stage {stage} has no {key}: use a complete checkpoint")
            yield _chunk([dict(_flat(content[key])) for content in ranks], f"{where}, pipeline stage {stage}")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, FileTensor]]:
    """Dotted names and tensors of nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, (FileTensor, torch.Tensor)):
            name = f"{prefix}{key}".removeprefix("module.")
            yield name, file_tensor(value, f"weight {name}")


def _chunk(ranks: Sequence[Mapping[str, FileTensor]], where: str) -> Chunk:
    layers: dict[int, dict[str, list[FileTensor]]] = {}
    outside: dict[str, list[FileTensor]] = {}
    for name in ranks[0]:
        if (place := layer_and_part(name)) is None:
            continue
        if any(name not in rank for rank in ranks):
            raise UserError(f"{where}: a tensor-parallel rank lacks {name}: use a complete checkpoint")
        target = outside if place[0] is None else layers.setdefault(place[0], {})
        target[place[1]] = [rank[name] for rank in ranks]
    if sorted(layers) != list(range(len(layers))):
        raise UserError(f"{where} has layers {sorted(layers)}: use a complete checkpoint")
    return Chunk([layers[index] for index in range(len(layers))], outside)


def _sizes(config: Mapping[str, Any], rows: int, version: float, where: str) -> Sizes:
    family = config.get("model_type")
    if family not in HEADS:
        raise UserError(f"{where}: --config has model_type {shown(family)}, not {', '.join(HEADS)}")
    heads, groups = (config.get(name, 0) for name in HEADS[family])
    hidden_size = config.get("n_embd" if family == "gpt2" else "hidden_size")
    head_size = config.get("head_dim") or (hidden_size // heads if hidden_size and heads else None)
    groups = groups or heads
    vocab_size = config.get("vocab_size", rows)
    values = [each for each in (heads, groups, head_size, vocab_size) if type(each) is int and each > 0]
    if len(values) < 4:
        raise UserError(f"{where}: --config does not say how many heads the model has")
    if version < 2 and groups != heads:
        raise UserError(f"{where} has version {version}, which has no groups of heads: correct --config")
    heads, groups, head_size, vocab_size = values
    return Sizes(heads, groups, head_size, vocab_size, version, family)
