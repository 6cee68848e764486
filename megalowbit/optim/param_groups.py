"""Parameter groups: which parameters are pulled towards zero.

Weight decay is for matrices. Biases and gains of norms (every 1-D parameter) get none, as in Megatron and the
GPT papers: decaying them changes the function without regularising it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megalowbit.errors import UserError


def weight_decay_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters into a group with weight decay and one without.

    Frozen parameters are left out and a parameter met under several names counts once. An empty group is
    left out, so that the result fits any torch optimizer.

    Args:
        named_parameters: as from `model.named_parameters()`.
        weight_decay: decay of the first group, ≥ 0.

    Raises:
        UserError: no parameter is trainable.
    """
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        is_decayed = parameter.ndim >= 2 and name.rpartition(".")[2] != "bias"
        (decayed if is_decayed else plain).append(parameter)
    if not seen:
        raise UserError("the model has no trainable parameter: set requires_grad on at least one")
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
