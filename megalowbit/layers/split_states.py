"""What the splits of a model's layers carry from micro-batch to micro-batch, as one state to save.

Directions of inputs and output gradients are those of a rank's own data, so every rank saves its own. A
state of another recipe or another model does no harm: what does not fit starts cold, and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megalowbit.errors import UserError, shown
from megalowbit.layers.surgery import bit_layers
from megalowbit.spectral.state import SplitState

ROLES = ("input", "weight", "grad_output")


def has_splits(model: nn.Module) -> bool:
    """Whether any layer splits an operand as it goes."""
    return any(_split_roles(layer.recipe) for layer in bit_layers(model).values())


def split_state_dict(model: nn.Module) -> dict[str, dict[str, Any]]:
    """States of this rank: layer → operand → `SplitState.state_dict()`."""
    return {
        name: {role: state.state_dict() for role, state in layer.split_states.items()}
        for name, layer in bit_layers(model).items()
        if layer.split_states
    }


def load_split_state_dict(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Continue from saved states; operands without one start cold.

    Raises:
        UserError: `saved` is no such state, or of a model with other layers.
    """
    layers = bit_layers(model)
    for name, roles in saved.items():
        if name not in layers or not isinstance(roles, Mapping) or not roles.keys() <= set(ROLES):
            raise UserError(
                f"split state holds {shown(name)}: {shown(roles)}, which is no layer of this model: "
                "resume with the model it was saved with"
            )
    for name, layer in layers.items():
        layer.split_states = {}
        for role, state in saved.get(name, {}).items():
            layer.split_states[role] = SplitState()
            layer.split_states[role].load_state_dict(state)


def split_counts(model: nn.Module) -> dict[str, int]:
    """How factors were found so far, over all layers: `{"cold": 16, "warm": 9584, …}`."""
    total: dict[str, int] = {}
    for layer in bit_layers(model).values():
        for state in layer.split_states.values():
            for how, count in state.counts.items():
                total[how] = total.get(how, 0) + count
    return total


def _split_roles(recipe: Any) -> list[str]:
    return [role for role in ROLES if getattr(recipe, f"split_{role}") is not None]
