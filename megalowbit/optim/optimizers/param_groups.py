"""Parameter groups: which parameters have weight decay, and which have a scaled learning rate.

Weight decay is for matrices. Biases and gains of norms (every 1-D parameter) have none, as in Megatron and
the GPT papers: decaying them changes the function without regularising it. A module whose parameters form one
matrix together can set other rules in `weight_decay_rules`. If U and V of U·diag(S)·V both decayed, their
product would decay twice as fast as a plain weight; decay of S alone is right. The rule belongs to the module
because a copied parameter loses its attributes. The conditions on names and parameters are Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megalowbit.errors import UserError

ParameterCondition = Callable[[str, torch.nn.Parameter], bool]  # (name in the model, parameter)


def learning_rate(group: Mapping[str, Any]) -> float:
    """The effective learning rate of a group: `lr`, times `lr_scale` if the group has one."""
    return group["lr"] * group.get("lr_scale", 1.0)


def refuse_repeated(groups: Sequence[Mapping[str, Any]]) -> None:
    """Reject a parameter that occurs twice; torch only warns, if that is in one group.

    Each occurrence would have a master of its own, and the last one would overwrite the weight.

    Raises:
        UserError: names its place and shape.
    """
    seen: set[int] = set()
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in seen:
                raise UserError(
                    f"parameter {index} of group {number}, shape {tuple(parameter.shape)}, occurs twice in "
                    "the optimizer: list each once, for example with list(dict.fromkeys(parameters))"
                )
            seen.add(id(parameter))


def refuse_changed(groups: Sequence[Mapping[str, Any]], masters: Mapping[int, object]) -> None:
    """Check that the groups still hold these masters, given by id: a removed one would keep its gradient.

    Raises:
        UserError: parameters were removed or added.
    """
    present = [id(master) for group in groups for master in group["params"]]
    if len(present) != len(masters) or not masters.keys() >= set(present):
        raise UserError(
            f"param_groups has {len(present)} parameters, and was built with {len(masters)}: to stop the "
            "training of some, freeze them with requires_grad_(False) or set the lr of their group to 0"
        )


def weight_decay_groups(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    weight_decay: float,
    *,
    no_weight_decay_cond: ParameterCondition | None = None,
    scale_lr_cond: ParameterCondition | None = None,
    lr_mult: float = 1.0,
) -> list[dict[str, Any]]:
    """Split a model's parameters into groups with and without weight decay; with `lr_mult`, into four.

    Frozen parameters are left out. A parameter with several names counts once, under its first name. Empty
    groups are left out, so the result is valid for any torch optimizer.

    Args:
        model: a module, or the chunks of one. Modules may have an attribute `weight_decay_rules`, a mapping
            from names of their own parameters to whether they decay; the condition decides about all others.
        weight_decay: decay of the groups that decay, ≥ 0.
        no_weight_decay_cond: selects parameters without decay; default: biases and 1-D parameters.
        scale_lr_cond: selects parameters that learn at `lr_mult` times the learning rate. Their groups hold
            the factor as `lr_scale`, which schedulers do not change, because they write `lr`.
        lr_mult: factor of those groups, a finite number ≥ 0.

    Raises:
        UserError: no parameter is trainable, or `lr_mult` is out of range.
    """
    if not 0 <= lr_mult < float("inf"):
        raise UserError(f"lr_mult must be a finite number ≥ 0, not {lr_mult!r}")
    members: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {
        (is_scaled, is_decayed): [] for is_scaled in (False, True) for is_decayed in (True, False)
    }
    for name, parameter, rule in _trainable_parameters(
        [model] if isinstance(model, torch.nn.Module) else model
    ):
        if rule is None:
            rule = not (no_weight_decay_cond or _is_bias_or_vector)(name, parameter)
        is_scaled = scale_lr_cond is not None and bool(scale_lr_cond(name, parameter))
        members[is_scaled, bool(rule)].append(parameter)
    groups = [
        {
            "params": parameters,
            "weight_decay": weight_decay if is_decayed else 0.0,
            **({"lr_scale": lr_mult} if is_scaled else {}),
        }
        for (is_scaled, is_decayed), parameters in members.items()
        if parameters
    ]
    if not groups:
        raise UserError("the model has no trainable parameter: set requires_grad on at least one")
    return groups


def _is_bias_or_vector(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.ndim < 2 or name.rpartition(".")[2] == "bias"


def _trainable_parameters(
    models: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter, bool | None]]:
    """Each parameter once: its first full name, and its module's own rule, if any."""
    seen: set[int] = set()
    for model in models:
        for prefix, module in model.named_modules():
            rules = getattr(module, "weight_decay_rules", {})
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}" if prefix else name, parameter, rules.get(name)
