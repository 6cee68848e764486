"""Parameter groups: which parameters are pulled towards zero.

Weight decay is for matrices. Biases and gains of norms (every 1-D parameter) get none, as in Megatron and the
GPT papers: decaying them changes the function without regularising it. A module whose parameters make up one
matrix together knows better, and says so in `weight_decay_rules`: if U and V of U·diag(S)·V decayed, their
product would do so twice as fast as a plain weight; S alone is right. The rule lies with the module because a
copied parameter loses what was set on it.
"""

from __future__ import annotations

from typing import Any

import torch

from megalowbit.errors import UserError


def weight_decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split a model's parameters into a group with weight decay and one without.

    Frozen parameters are left out and a parameter met under several names counts once, under its first. An
    empty group is left out, so that the result fits any torch optimizer.

    Args:
        model: its modules may have an attribute `weight_decay_rules`, a mapping from names of their own
            parameters to whether they decay; all others go by shape and name.
        weight_decay: decay of the first group, ≥ 0.

    Raises:
        UserError: no parameter is trainable.
    """
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        rules = getattr(module, "weight_decay_rules", {})
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_decayed = rules.get(name, parameter.ndim >= 2 and name != "bias")
            (decayed if is_decayed else plain).append(parameter)
    if not seen:
        raise UserError("the model has no trainable parameter: set requires_grad on at least one")
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
