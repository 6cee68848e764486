"""Checks that a saved optimizer state fits an optimizer.

torch checks only the number of groups and parameters. It silently loads a moment of another shape, which
broadcasts or corrupts memory at the next step. The state of another update rule fails there too, after the
masters have been overwritten. This module therefore checks groups, hyper-parameters, keys and tensors first:
a state either fits completely or changes nothing. The keys are known for torch's Adam, AdamW and SGD. For
other optimizers, tensors must have the shape of their parameter or broadcast to it. Not covered: whether the
numbers in tensors are finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from megalowbit.errors import UserError, shown

REMEDY = "resume with the model and parameter groups it was saved with"
RULE_REMEDY = "resume with the update rule it was saved with, or load the weights alone"
ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq")
# keys of a group that identify its update rule
RULE_OF_KEY = {"betas": "Adam", "momentum": "SGD"}
# torch fills these in if an older version of it did not save them
FILLED_IN = frozenset(
    {"amsgrad", "capturable", "centered", "decoupled_weight_decay", "differentiable", "foreach", "fused",
     "maximize", "nesterov"}
)  # fmt: skip
SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg")


def find_key(state: Mapping[str, Any], names: Sequence[str], default: Any = None) -> Any:
    """The value of the first of `names` that is in `state`; newest name first.

    Raises:
        UserError: none is present and there is no default, or `state` is not a mapping.
    """
    if not isinstance(state, Mapping):
        raise UserError(f"optimizer state = {shown(state)} must be a mapping, as returned by state_dict()")
    for name in names:
        if name in state:
            return state[name]
    if default is not None:
        return default
    raise UserError(f"optimizer state lacks {names[0]!r}: found {_shown_keys(state) or 'nothing'}; {REMEDY}")


def with_hooks(optimizer: torch.optim.Optimizer, state_of: Callable[[], Any]) -> Any:
    """What `state_of` returns, with the optimizer's state-dict hooks called as torch calls them."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state = state_of()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = after(optimizer, state)
        state = state if replaced is None else replaced
    return state


def before_load(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """The state to load after the optimizer's hooks before a load, which get a shallow copy, as in torch."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks.values()
    state = copy.copy(state) if hooks else state
    for hook in hooks:
        replaced = hook(optimizer, state)
        state = state if replaced is None else replaced
    return state


def after_load(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's hooks after a load."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def check_inner_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check that a torch optimizer's state has the groups, keys and tensor shapes of `optimizer`.

    Reads step counts, which may be tensors, on the host.

    Raises:
        UserError: it does not.
    """
    if not isinstance(saved, Mapping):
        raise UserError(f"state of the inner optimizer = {shown(saved)} must be a mapping: {REMEDY}")
    missing = [name for name in ("state", "param_groups") if name not in saved]
    if missing:
        raise UserError(f"optimizer state lacks {', '.join(missing)}: {REMEDY}")
    indices = _check_groups(saved["param_groups"], optimizer)
    entries = saved["state"]
    if not isinstance(entries, Mapping) or not all(isinstance(each, Mapping) for each in entries.values()):
        raise UserError(
            f"'state' of the optimizer state = {shown(entries)} must map a parameter's index to a mapping: "
            f"{REMEDY}"
        )
    unknown = sorted(key for key in entries if isinstance(key, int) and key not in indices)
    if unknown:
        raise UserError(f"optimizer state has parameters {shown(unknown)} that no group has: {REMEDY}")
    for group, present in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(group["params"], present["params"], strict=True):
            if entries.get(index):
                _check_entry(entries[index], index, parameter, group, optimizer)


def check_masters(saved: Sequence[Sequence[torch.Tensor]], masters: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check that saved fp32 masters have the groups and shapes of `masters`; empty groups are ignored.

    Raises:
        UserError: they do not, or are not tensors.
    """
    if not _is_list(saved) or not all(map(_is_list, saved)):
        raise UserError(f"saved masters = {shown(saved)} must be a list of lists of tensors: {REMEDY}")
    found = [len(group) for group in saved if len(group)]
    have = [len(group) for group in masters if len(group)]
    if found != have:
        raise UserError(f"saved masters have groups of {found}, the model of {have}: {REMEDY}")
    pairs = zip(chain.from_iterable(saved), chain.from_iterable(masters), strict=True)
    for index, (source, target) in enumerate(pairs):
        if not _is_dense(source):
            raise UserError(f"saved master {index} = {shown(source)} is no tensor of real numbers: {REMEDY}")
        if source.shape != target.shape:
            shapes = f"{tuple(source.shape)}, the model's {tuple(target.shape)}"
            raise UserError(f"saved master {index} has shape {shapes}: {REMEDY}")


@torch.no_grad()
def copy_masters(saved: Sequence[Sequence[torch.Tensor]], masters: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy saved fp32 masters that passed `check_masters`."""
    for source, target in zip(chain.from_iterable(saved), chain.from_iterable(masters), strict=True):
        target.copy_(source)


def _check_groups(saved: Any, optimizer: torch.optim.Optimizer) -> set[int]:
    """Check groups and hyper-parameters; returns the indices of all parameters."""
    if not _is_list(saved) or not all(
        isinstance(group, Mapping) and _is_list(group.get("params")) for group in saved
    ):
        raise UserError(
            f"'param_groups' of the optimizer state = {shown(saved)} must be a list of mappings with a list "
            f"'params': {REMEDY}"
        )
    have = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved]
    if have != found:
        raise UserError(f"optimizer state has groups of {found} parameters, the model {have}: {REMEDY}")
    indices = list(chain.from_iterable(group["params"] for group in saved))
    if not all(isinstance(each, int) for each in indices) or len(set(indices)) < len(indices):
        raise UserError(f"parameters of the optimizer state = {shown(indices)} are not indices: {REMEDY}")
    for number, (group, present) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        _check_hyper_parameters(number, group, present, optimizer)
    return set(indices)


def _check_hyper_parameters(
    number: int, group: Mapping[str, Any], present: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    # other libraries' groups may lack keys added to ours since, such as a scheduler's `initial_lr`
    needed = (optimizer.defaults.keys() & present.keys()) - FILLED_IN | (present.keys() & {"lr_scale"})
    missing = sorted(name for name in needed if name not in group)
    kind = type(optimizer).__name__
    if missing:
        other = [rule for key, rule in RULE_OF_KEY.items() if key in group and key not in present]
        if other:
            raise UserError(f"the optimizer state is of {other[0]}, the optimizer is {kind}: {RULE_REMEDY}")
        raise UserError(f"group {number} of the optimizer state lacks {', '.join(missing)}: {REMEDY}")
    for name in sorted(needed):
        value, current = group[name], present[name]
        if isinstance(current, (tuple, list)):
            fits = _is_list(value) and len(value) == len(current) and all(map(_is_like, value, current))
        else:
            fits = _is_like(value, current)
        if not fits:
            raise UserError(
                f"{name} of group {number} of the optimizer state = {shown(value)} is not a value like "
                f"{kind}'s {shown(current)}: load an earlier checkpoint"
            )


def _check_entry(
    entry: Mapping[str, Any],
    index: int,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Check the state of one parameter."""
    expected, optional = _keys_of(optimizer, group)
    found = set(entry)
    if expected is not None and not (expected <= found <= expected | optional):
        wanted = ", ".join(sorted(expected)) or "momentum_buffer or nothing"
        raise UserError(
            f"state of parameter {index} holds {_shown_keys(entry)}, that of {type(optimizer).__name__} "
            f"{wanted}: {RULE_REMEDY}"
        )
    for name, value in entry.items():
        if name == "step":
            if not _is_number(value) or float(value) < 0:
                raise UserError(
                    f"step of parameter {index} = {shown(value)} must be a finite number ≥ 0: load an "
                    "earlier checkpoint"
                )
            continue
        if name == "momentum_buffer" and value is None:
            continue
        is_moment = name in SHAPED or expected is not None
        if isinstance(value, torch.Tensor) and (value.ndim > 0 or is_moment):
            _check_shape(name, value, index, parameter, is_exact=is_moment)
        elif is_moment:
            raise UserError(f"{name} of parameter {index} = {shown(value)} is not a tensor: {REMEDY}")


def _keys_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[set[str] | None, set[str]]:
    """Required and optional keys of a parameter's state; None if the update rule is unknown."""
    # exactly these classes: a subclass may keep other keys
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        largest = {"max_exp_avg_sq"}
        return (set(ADAM_KEYS) | largest, set()) if group.get("amsgrad") else (set(ADAM_KEYS), largest)
    if type(optimizer) is torch.optim.SGD:
        return set(), {"momentum_buffer"}
    return None, set()


def _check_shape(
    name: str, value: torch.Tensor, index: int, parameter: torch.Tensor, *, is_exact: bool
) -> None:
    sizes = zip(value.shape, parameter.shape, strict=False)
    is_factor = value.ndim == parameter.ndim and all(own in (1, whole) for own, whole in sizes)
    if not (value.shape == parameter.shape or (is_factor and not is_exact)):
        raise UserError(
            f"{name} of parameter {index} has shape {tuple(value.shape)}, "
            f"the parameter {tuple(parameter.shape)}: {REMEDY}"
        )
    if not _is_dense(value):
        raise UserError(f"{name} of parameter {index} is not a dense tensor of real numbers: {REMEDY}")


def _is_dense(value: object) -> bool:
    """Whether `value` is a tensor of real numbers in memory, each element stored separately."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type == "meta":
        return False
    is_expanded = any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True))
    return not value.is_complex() and value.dtype != torch.bool and not is_expanded


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _is_like(value: object, current: object) -> bool:
    """Whether a hyper-parameter is a number if the present one is."""
    return _is_number(value) or not _is_number(current)


def _is_number(value: object) -> bool:
    """Whether `value` is a finite number, or a tensor of one such number."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or not _is_dense(value):
            return False
        value = value.item()
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _shown_keys(state: Mapping[Any, Any]) -> str:
    return shown(sorted(map(str, state))) if state else ""
