"""Names the masters of DeepSpeed's checkpoints of stage 0.

They are in the model's file, without names, in the order of the model within a group. Each is assigned to the
next weight that it rounds to. If one fits nowhere, or equal weights leave it open, the model's weights are
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalowbit.hf.importers.base import LazyTensor, file_tensor, flat_tensor, numel_of
from megalowbit.hf.importers.file_tensors import FileTensor


def masters_of_stage_zero(
    header: Mapping[str, Any], weights: Mapping[str, FileTensor]
) -> dict[str, LazyTensor]:
    """Masters by name, and under the further names of tied weights; none if one cannot be assigned.

    Args:
        header: content of the model's file.
        weights: the model's weights in it.

    Raises:
        UserError: a master is no plain tensor, or its file is damaged.
    """
    optimizer = header.get("optimizer")
    names: dict[tuple[Any, ...], list[str]] = {}  # tied weights are one tensor in the file
    for name, weight in weights.items():
        names.setdefault(weight.place, []).append(name)
    groups = optimizer.get("fp32_groups", optimizer.get("fp32_groups_flat")) if optimizer else None
    found: dict[str, LazyTensor] = {}
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups or ()):
        offset = 0
        for same in names.values():
            weight = weights[same[0]]
            master, size = _next_master(group, offset, weight.shape)
            if same[0] in found or master is None:
                continue
            if torch.equal(master.read().to(weight.dtype), weight.read()):
                found |= dict.fromkeys(same, LazyTensor.of(master))
                group_of[same[0]] = number
                offset += size
        if offset != (group.numel() if isinstance(group, FileTensor) else len(group)):
            return {}
    if len({master.dtype for master in found.values()}) > 1:  # one was rounded
        return {}
    equal = _equal_weights({same[0]: weights[same[0]] for same in names.values()})
    return found if all(_is_certain(same, weights, found, group_of) for same in equal) else {}


def _equal_weights(weights: Mapping[str, FileTensor]) -> list[list[str]]:
    """Names of different weights with equal values, such as norms of ones; lists of two or more."""
    alike: dict[tuple[Any, ...], list[list[str]]] = {}
    for name, weight in weights.items():
        value = weight.read()
        groups = alike.setdefault((weight.shape, *value.flatten()[:8].tolist()), [])
        same = next((each for each in groups if torch.equal(weights[each[0]].read(), value)), None)
        if same is None:
            groups.append([name])
        else:
            same.append(name)
    return [same for groups in alike.values() for same in groups if len(same) > 1]


def _is_certain(
    names: Sequence[str],
    weights: Mapping[str, FileTensor],
    masters: Mapping[str, LazyTensor],
    group_of: Mapping[str, int],
) -> bool:
    """Whether it is known which master belongs to which of several equal weights.

    A group has its masters in the model's order. Some of the weights may be in another group, or frozen.
    """
    if all(name in group_of for name in names) and len({group_of[name] for name in names}) == 1:
        return True
    values = [masters[name].read() for name in names if name in masters]
    if len(values) < len(names):
        values.append(weights[names[0]].read().to(values[0].dtype) if values else torch.empty(0))
    return all(torch.equal(value, values[0]) for value in values)


def _next_master(
    group: FileTensor | Sequence[FileTensor], offset: int, shape: tuple[int, ...]
) -> tuple[FileTensor | None, int]:
    """The master at `offset` of a group, if it can have this shape, and the offset from it to the next one.

    A fused optimizer's group is a flat tensor, in which offsets count elements; others' are lists of tensors.
    """
    if isinstance(group, FileTensor):
        numel = numel_of(shape)
        fits = offset + numel <= flat_tensor(group, "a group of masters").numel()
        return (group.cut(offset, shape) if fits else None), numel
    master = file_tensor(group[offset], "a master") if offset < len(group) else None
    return (master if master is not None and master.shape == shape else None), 1
