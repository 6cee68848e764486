"""Reads the weights of checkpoints that plain DeepSpeed wrote of an unconverted Hugging Face model.

The fp32 masters are in the optimizer's shards, as flat tensors without names. The model's file names them:
`param_shapes` lists the parameters of every group in the order in which they lie in its flat tensor.

- Stages 1 and 2, and DeepSpeed's bf16 optimizer: a group's flat tensor, with padding at its end, is cut into
  one part per data-parallel rank. A parameter may begin on one rank and end on another.
- Stage 3: every parameter is cut into one part per rank, of ceil(elements / ranks) elements. A rank's parts
  lie one after the other in its groups.
- Stage 0: the masters are in the model's file (`stage_zero`).
- Frozen parameters, and checkpoints without shards: the model's own weights.

Not covered: tensor and pipeline parallelism, experts, states swapped to NVMe.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megalowbit.checkpoints.shards import reading
from megalowbit.durable_files import MANIFEST
from megalowbit.errors import UserError, shown
from megalowbit.hf.importers.base import (
    MOST_MISSING,
    ForeignModel,
    LazyTensor,
    LazyWeights,
    entries,
    file_tensor,
    flat_tensor,
    numbers_up_to,
    numel_of,
    require_config,
    shape_of,
)
from megalowbit.hf.importers.file_tensors import FileTensor
from megalowbit.hf.importers.inert_files import Inert, read_inert
from megalowbit.hf.importers.stage_zero import masters_of_stage_zero

logger = logging.getLogger(__name__)

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
SHARD_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
EXPERT_FILE = re.compile(r".*(?:expert_\d+|expp_rank_\d+)_mp_rank_\d+_.*\.pt")
PIPELINE_FILE = re.compile(r"layer_\d+-model.*_states\.pt")
STAGE_NAMES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
CHUNK = 2**18  # elements that are compared at once
ALIGNMENT = 2  # DeepSpeed pads flat groups to a multiple of this times the number of ranks
WRAPPERS = ("module.", "_orig_mod.")  # added to names by DistributedDataParallel and torch.compile


def read_deepspeed(folder: Path, config: Mapping[str, Any] | None) -> ForeignModel:
    """The model in a checkpoint of plain DeepSpeed.

    Args:
        folder: contains the files of one step, `global_step100/`.
        config: fields of the Hugging Face configuration.

    Raises:
        UserError: no configuration was named; files are missing, damaged, or of different steps; the model
            was split over tensor-parallel ranks, pipeline stages or experts.
    """
    where = f"checkpoint {folder}"
    hf_config = require_config(config, where)
    model_files, shard_files = _files_in(folder)
    if not model_files:
        raise UserError(
            f"checkpoint {folder} holds only optimizer states, which do not name the weights: add the files "
            "that end in model_states.pt"
        )
    paths = [folder / name for name in (*model_files.values(), *shard_files.values())]
    with reading(where):
        headers = [read_inert(folder / name) for name in model_files.values()]
        check_headers(folder, headers, list(model_files.values()))
        if not shard_files:
            return _from_weights(headers[0], hf_config, folder, paths)
        shards = _read_shards(folder, shard_files)
        stage = _stage_of(shards[0])
        if stage == 3 and (missing := numbers_up_to(list(model_files), len(shards))):
            raise _missing_ranks(folder, missing, "model_states.pt", len(shards))
        if stage == 3:
            stored = _masters_of_stage_three(headers, shards, folder)
        else:
            stored = _masters_of_stage_two(headers[0], shards, folder)
        refuse_mixed_masters(stored, folder)
        stored = with_model_weights(stored, headers, folder)
        ranks = "1 rank" if len(shards) == 1 else f"{len(shards)} ranks"
        kind = f"ZeRO {stage}" if stage else "the bf16 optimizer"
        description = f"DeepSpeed, {kind} on {ranks}, step {headers[0].get('global_steps')}, fp32 masters"
        return ForeignModel(hf_config, LazyWeights(without_wrapper_prefixes(stored)), paths, description)


def refuse_mixed_masters(masters: Mapping[str, LazyTensor], folder: Path) -> None:
    """Check that all masters have one dtype; a rounded one would agree with the model's rounded weight.

    Raises:
        UserError: they have several.
    """
    names: dict[torch.dtype, str] = {}
    for name, master in masters.items():
        names.setdefault(master.dtype, name)
    if len(names) > 1:
        found = ", ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in names.items())
        raise UserError(f"checkpoint {folder} has masters of several dtypes, {found}: use another checkpoint")


def with_model_weights(
    masters: Mapping[str, LazyTensor], headers: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, LazyTensor]:
    """Masters, which are compared with the model's weights when they are read, and all other weights.

    Args:
        masters: the masters that were found.
        headers: contents of the files with weights, by data-parallel rank.
        folder: the checkpoint, for messages.
    """
    weights = {name: each for name, each in model_weights(headers[0]).items() if numel_of(each.shape)}
    stored = {
        name: _checked(master, weights[name], f"checkpoint {folder}: the fp32 master of {name}")
        if name in weights
        else master
        for name, master in masters.items()
    }
    stored |= _frozen(headers, folder)
    for name, first in (headers[0].get("shared_params") or {}).items():
        if first in stored:
            stored[name] = stored[first]
    # a frozen parameter at stages 0 and 1 is in the model's weights only
    return weights | stored


def _checked(master: LazyTensor, weight: LazyTensor, where: str) -> LazyTensor:
    """A master that must be rounded to the model's weight, as DeepSpeed does after every step.

    Shards of another step or run, and names in another order, differ from it.
    """

    def read() -> torch.Tensor:
        value, model = master.read(), weight.read()
        if not _rounds_to(value, model):
            raise UserError(
                f"{where} does not round to the model's {str(model.dtype).removeprefix('torch.')} weight: "
                "the files are of different checkpoints, or the order of the parameters is wrong; to use the "
                "model's weights instead, take a copy without the files optim_states.pt and the folder zero"
            )
        return value

    return LazyTensor(master.shape, master.dtype, read) if master.shape == weight.shape else master


def _rounds_to(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a master, rounded to the weight's dtype, is the weight; NaN equals NaN."""
    for part, model in zip(master.flatten().split(CHUNK), weight.flatten().split(CHUNK), strict=True):
        rounded = part.to(model.dtype)
        if not ((rounded == model) | (rounded.isnan() & model.isnan())).all():
            return False
    return True


def without_wrapper_prefixes(stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The same tensors without the prefixes that wrappers add to all names."""
    result = dict(stored)
    while result:
        prefix = next((each for each in WRAPPERS if all(name.startswith(each) for name in result)), None)
        if prefix is None:
            break
        result = {name.removeprefix(prefix): tensor for name, tensor in result.items()}
    return result


def check_headers(folder: Path, headers: Sequence[Mapping[str, Any]], files: Sequence[str]) -> None:
    """Check that files with weights are of one model and step, and that plain DeepSpeed wrote them.

    Raises:
        UserError: they describe different models, were saved at different steps, or by megalowbit.
    """
    # a converted GPT-2 has other shapes, which could not be told from its own where they are square
    if any(isinstance(key, str) and key.startswith("megalowbit") for key in headers[0]):
        raise UserError(
            f"checkpoint {folder} was written by megalowbit and lost its {MANIFEST}, so it may be "
            "incomplete: use an older checkpoint"
        )
    check_steps(folder, [header.get("global_steps") for header in headers], files)
    for header, file in zip(headers, files, strict=True):
        for key in ("param_shapes", "frozen_param_shapes"):
            if header.get(key) != headers[0].get(key):
                raise UserError(
                    f"checkpoint {folder} mixes checkpoints: {key} in {file} is not that in {files[0]}; use "
                    "one that was saved completely"
                )


def check_steps(folder: Path, steps: Sequence[Any], files: Sequence[str]) -> None:
    """Check that files belong to one step.

    Raises:
        UserError: they were saved at different steps.
    """
    for step, file in zip(steps, files, strict=True):
        if step is not None and steps[0] is not None and step != steps[0]:
            raise UserError(
                f"checkpoint {folder} mixes steps: {files[0]} was saved at step {shown(steps[0])}, {file} at "
                f"step {shown(step)}; use one that was saved completely"
            )


def model_weights(header: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Floating-point parameters of the model's own state dict, in the dtype in which it computed."""
    return {name: LazyTensor.of(value) for name, value in _model_tensors(header).items()}


def _model_tensors(header: Mapping[str, Any]) -> dict[str, FileTensor]:
    module, buffers = header.get("module"), set(header.get("buffer_names") or ())
    if not isinstance(module, Mapping):
        return {}
    return {
        name: file_tensor(value, f"weight {name}")
        for name, value in module.items()
        if isinstance(value, (FileTensor, torch.Tensor)) and name not in buffers
    }


def model_files_in(folder: Path) -> dict[int, str]:
    """Names of the files with weights, by data-parallel rank.

    Raises:
        UserError: they are of tensor-parallel ranks, pipeline stages or experts.
    """
    return _files_in(folder)[0]


def _files_in(folder: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Names of the files with weights and of the optimizer's shards, by data-parallel rank."""
    model_files: dict[int, str] = {}
    shard_files: dict[int, str] = {}
    for name in entries(folder):
        if EXPERT_FILE.fullmatch(name):
            raise UserError(f"checkpoint {folder} holds experts ({name}): no supported family has them")
        if PIPELINE_FILE.fullmatch(name):
            raise UserError(
                f"checkpoint {folder} holds pipeline stages of DeepSpeed ({name}), whose modules "
                "have numbers instead of names: join them with the program that trained it"
            )
        for pattern, found in ((MODEL_FILE, model_files), (SHARD_FILE, shard_files)):
            if (match := pattern.fullmatch(name)) is None:
                continue
            if int(match[2]):
                raise UserError(
                    f"checkpoint {folder} holds tensor-parallel shards ({name}), and DeepSpeed does not "
                    "record how they were cut: join them with the program that trained it"
                )
            found[int(match[1] or 0)] = name
    return dict(sorted(model_files.items())), dict(sorted(shard_files.items()))


def _from_weights(
    header: Mapping[str, Any], config: dict[str, Any], folder: Path, paths: Sequence[Path]
) -> ForeignModel:
    """The model's own weights, in a checkpoint without shards."""
    tensors = _model_tensors(header)
    stored = {name: LazyTensor.of(value) for name, value in tensors.items()}
    if not stored or not all(numel_of(each.shape) for each in stored.values()):
        raise UserError(f"checkpoint {folder} lacks the optimizer's shards, which hold the weights at ZeRO 3")
    masters = masters_of_stage_zero(header, tensors)
    weights = LazyWeights(without_wrapper_prefixes({**stored, **masters}))
    dtype = str(weights.dtype).removeprefix("torch.")
    if dtype != "float32":
        logger.warning(
            "%s: its fp32 masters are missing or not certain, so its %s weights are used",
            folder,
            dtype,
        )
    kind = "ZeRO 0, fp32 masters" if masters else f"{dtype} weights"
    return ForeignModel(config, weights, paths, f"DeepSpeed, step {header.get('global_steps')}, {kind}")


def _read_shards(folder: Path, files: Mapping[int, str]) -> list[Mapping[str, Any]]:
    """The optimizer's state on every data-parallel rank."""
    shards = []
    for name in files.values():
        state = read_inert(folder / name).get("optimizer_state_dict")
        if not isinstance(state, Mapping):
            raise UserError(f"{folder / name} holds no optimizer state: use another checkpoint")
        shards.append(state)
    counts = shards[0].get("partition_count")
    count = max(counts, default=len(shards)) if isinstance(counts, (list, tuple)) else counts
    if isinstance(count, int) and (missing := numbers_up_to(list(files), count)):
        raise _missing_ranks(folder, missing, "optim_states.pt", count)
    if isinstance(count, int) and count != len(shards):
        raise UserError(
            f"checkpoint {folder} has the shards of {len(shards)} ranks, but was saved by {count}: "
            "remove the files of another checkpoint"
        )
    check_steps(folder, [_step_of(state) for state in shards], list(files.values()))
    return shards


def _missing_ranks(folder: Path, missing: Sequence[int], what: str, count: int) -> UserError:
    most = MOST_MISSING - 1
    ranks = ", ".join(map(str, missing[:most])) + (" …" if len(missing) > most else "")
    return UserError(
        f"checkpoint {folder} lacks {what} of data-parallel rank {ranks} of {count}: "
        "add the files of all ranks"
    )


def _stage_of(state: Mapping[str, Any]) -> int:
    """The ZeRO stage; 0 for the bf16 optimizer, which has none and cuts its groups like stage 1."""
    value = state.get("zero_stage", 0)
    if isinstance(value, Inert):  # an enumeration: its value, or (its class, its name)
        value = value.arguments[-1] if value.arguments else None
        value = STAGE_NAMES.get(value, value) if isinstance(value, str) else value
    if value not in (0, 1, 2, 3):
        raise UserError(f"the checkpoint has ZeRO stage {shown(value)}: 0, 1, 2 and 3 are supported")
    return int(value)


def _step_of(state: Mapping[str, Any]) -> float | None:
    """The largest step count in an inner optimizer's state; None if there is none."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if not isinstance(inner, Mapping):
        return None
    states, groups = inner.get("state"), inner.get("param_groups")
    holders = [*(states.values() if isinstance(states, Mapping) else ()), *(groups or ())]
    steps = [holder["step"] for holder in holders if isinstance(holder, Mapping) and "step" in holder]
    return max((float(step.read() if isinstance(step, FileTensor) else step) for step in steps), default=None)


def _groups_of(header: Mapping[str, Any], folder: Path) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the trained parameters, by group, in the order of its flat tensor."""
    groups = header.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise UserError(f"checkpoint {folder} has no param_shapes, so its masters have no names: use another")
    return [[(name, shape_of(shape, name)) for name, shape in group.items()] for group in groups]


def _masters_of_stage_two(
    header: Mapping[str, Any], shards: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, LazyTensor]:
    """Masters of stages 1 and 2 and of the bf16 optimizer."""
    stored: dict[str, LazyTensor] = {}
    groups, paddings = _groups_of(header, folder), shards[0].get("param_alignment_paddings")
    for index, group in enumerate(groups):
        where = f"checkpoint {folder}: group {index}"
        flats = [flat_tensor(shard["single_partition_of_fp32_groups"][index], where) for shard in shards]
        after = [0] * len(group) if paddings is None else shape_of(paddings[index], f"{where}, its paddings,")
        offset = 0
        for (name, shape), padding in zip(group, after, strict=True):
            pieces = _pieces(flats, offset, numel_of(shape))
            stored[name] = LazyTensor.concatenated(pieces, shape)
            offset += numel_of(shape) + padding
        _check_end(offset, sum(flat.numel() for flat in flats), ALIGNMENT * len(shards), index, folder)
    return stored


def _check_end(offset: int, held: int, alignment: int, group: int, folder: Path) -> None:
    """Check that the names use up a flat tensor, up to its padding, which may be stored or not."""
    if -(-offset // alignment) != -(-held // alignment) or offset > held:
        raise UserError(
            f"checkpoint {folder}: the shards of group {group} hold {held:,} elements, its parameters have "
            f"{offset:,}: files of different checkpoints are mixed, or shards are missing"
        )


def _pieces(flats: Sequence[FileTensor], offset: int, numel: int) -> list[FileTensor]:
    """The `numel` elements from `offset` of the flat tensor whose parts are `flats`, one piece a part."""
    pieces: list[FileTensor] = []
    done = 0
    for part, start in _overlaps([flat.numel() for flat in flats], offset, numel):
        count = min(flats[part].numel() - start, numel - done)
        pieces.append(flats[part].cut(start, (count,)))
        done += count
    return pieces or [flats[0].cut(0, (0,))]


def _overlaps(sizes: Sequence[int], offset: int, numel: int) -> Iterator[tuple[int, int]]:
    """Index and first element of every part that holds some of `numel` elements from `offset`."""
    for part, end in enumerate(accumulate(sizes)):
        begin = end - sizes[part]
        if end > offset and begin < offset + numel:
            yield part, max(offset - begin, 0)


def _masters_of_stage_three(
    headers: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, LazyTensor]:
    """Masters of stage 3."""
    where = f"checkpoint {folder}: a group"
    flats = [[flat_tensor(each, where) for each in shard["fp32_flat_groups"]] for shard in shards]
    held = sum(flat.numel() for flat in flats[0])
    stored: dict[str, LazyTensor] = {}
    offset = 0
    for name, shape in (each for group in _groups_of(headers[0], folder) for each in group):
        size = -(-numel_of(shape) // len(shards))
        pieces = [piece for each in flats for piece in _pieces(each, offset, size)]
        stored[name] = LazyTensor.concatenated(pieces, shape)
        offset += size
    if any(sum(flat.numel() for flat in each) != held for each in flats) or offset != held:
        raise UserError(
            f"checkpoint {folder}: a rank's shard holds {held:,} elements, its parameters have {offset:,}: "
            "files of different checkpoints are mixed, or states were swapped to NVMe"
        )
    return stored


def _frozen(headers: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, LazyTensor]:
    """Parameters that were not trained, in the dtype in which the model computed."""
    shapes = headers[0].get("frozen_param_shapes") or {}
    stored: dict[str, LazyTensor] = {}
    for name, raw in shapes.items():
        shape = shape_of(raw, name)
        found = [(header.get("frozen_param_fragments") or {}).get(name) for header in headers]
        if any(part is None for part in found):
            raise UserError(f"checkpoint {folder} lacks the frozen weight {name}: use a complete one")
        parts = [file_tensor(part, f"frozen weight {name}") for part in found]
        if sum(part.numel() for part in parts) < numel_of(shape):
            raise UserError(f"checkpoint {folder} has only a part of the frozen weight {name}: add all ranks")
        is_whole = len(parts) == 1 and parts[0].shape == shape
        stored[name] = LazyTensor.of(parts[0]) if is_whole else LazyTensor.concatenated(parts, shape)
    return stored
