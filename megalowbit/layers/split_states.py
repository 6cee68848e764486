"""What the splits of a model's layers carry from micro-batch to micro-batch, as states to save.

Directions of inputs and output gradients are those of a rank's own data, so every rank saves its own. Those
of weights are alike on all ranks and have to stay so: ranks that quantised one weight from different
directions would multiply by different matrices. They are saved once, and every rank goes on from them, also
one that was not there. A state of another recipe or another model does no harm: what does not fit starts
cold, and is counted. Counts go along, so that they cover a run that was resumed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from megalowbit.errors import UserError, shown
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.spectral.state import SplitState

OWN_ROLES = ("input", "grad_output")
SHARED_ROLES = ("weight",)
ROLES = (*OWN_ROLES, *SHARED_ROLES)


def has_splits(model: nn.Module, roles: Collection[str] = ROLES) -> bool:
    """Whether any layer splits one of these operands as it goes."""
    return any(
        getattr(layer.recipe, f"split_{role}") is not None
        for layer in bit_layers(model).values()
        for role in roles
    )


def split_state_dict(model: nn.Module, roles: Collection[str] = ROLES) -> dict[str, dict[str, Any]]:
    """States of these operands: layer → operand → `SplitState.state_dict()`.

    Args:
        model: with low-bit layers.
        roles: `OWN_ROLES` for what each rank has to save, `SHARED_ROLES` for what one saves for all.
    """
    states = {
        name: {role: state.state_dict() for role, state in layer.split_states.items() if role in roles}
        for name, layer in bit_layers(model).items()
    }
    return {name: found for name, found in states.items() if found}


def load_split_state_dict(model: nn.Module, saved: Mapping[str, Any], roles: Collection[str] = ROLES) -> None:
    """Continue from saved states; operands of these roles without one start cold, others are left alone.

    Raises:
        UserError: `saved` is no such state, or of a model with other layers.
    """
    layers = bit_layers(model)
    for name, states in saved.items():
        if name not in layers or not isinstance(states, Mapping) or not states.keys() <= set(roles):
            raise UserError(
                f"split state holds {shown(name)}: {shown(states)}, which is no layer of this model: "
                "resume with the model it was saved with"
            )
    for name, layer in layers.items():
        for role in roles:
            layer.split_states.pop(role, None)
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
