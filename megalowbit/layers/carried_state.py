"""What low-bit layers carry from micro-batch to micro-batch: within a process, and as states to save.

A step that is done again must round with the numbers of the first time and start its splits from the same
directions. Four things say where a model's layers are: the micro-batch of the shared random stream, how
often each layer was used in it, the states of its splits (with their counts, so a step counts once), and the
quantised weights kept for the step, which are forgotten, to be counted again. `take_layers` copies no tensor.

Files hold the states of splits. Directions of inputs and output gradients are those of a rank's data, so
every rank saves its own. Those of weights are equal on all ranks and have to stay so: ranks that quantised
one weight from different directions would multiply by different matrices. They are saved once, and every
rank goes on from them, also one that was not there. A state of another recipe or another model does no harm:
what does not fit starts cold, and is counted. Counts are saved too, and cover a run that was resumed.

Not covered: layers without a shared stream (`convert` gives them one).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megalowbit.errors import UserError, shown
from megalowbit.layers.conversion.convert import bit_layers, random_stream
from megalowbit.layers.matmul.use_counter import UseCounter
from megalowbit.spectral.state import SplitState

OWN_ROLES = ("input", "grad_output")
SHARED_ROLES = ("weight",)
ROLES = (*OWN_ROLES, *SHARED_ROLES)


@dataclass(frozen=True)
class LayerSnapshot:
    """Where the layers of a model were.

    Attributes:
        stream: state of the shared random stream; None without one.
        splits: states of split operands, by layer and operand.
    """

    stream: dict[str, int] | None
    splits: dict[str, dict[str, SplitState]]


def take_layers(model: nn.Module) -> LayerSnapshot:
    """Note where the layers are, between two steps."""
    stream = random_stream(model)
    splits = {
        name: {role: state.copy() for role, state in layer.split_states.items()}
        for name, layer in bit_layers(model).items()
    }
    return LayerSnapshot(None if stream is None else stream.state_dict(), splits)


def restore_layers(model: nn.Module, snapshot: LayerSnapshot) -> None:
    """Put the layers back where they were; a snapshot may be put back several times."""
    stream = random_stream(model)
    if stream is not None and snapshot.stream is not None:
        stream.load_state_dict(snapshot.stream)
    for name, layer in bit_layers(model).items():
        # new states each time: what is kept in the snapshot must stay as it is
        layer.split_states = {role: state.copy() for role, state in snapshot.splits[name].items()}
    forget_uses(model)


def forget_uses(model: nn.Module) -> None:
    """Call it where a micro-batch gets a number it may have had before: its first use is no second one.

    Quantised weights that were kept for it are forgotten too.
    """
    for layer in bit_layers(model).values():
        layer._uses = UseCounter()
        if layer.weight_slot is not None:
            layer.weight_slot.clear()


def has_splits(model: nn.Module, roles: Collection[str] = ROLES) -> bool:
    """Whether any layer splits one of these operands as it goes."""
    return any(
        getattr(layer.recipe, f"split_{role}") is not None
        for layer in bit_layers(model).values()
        for role in roles
    )


def split_state_dict(model: nn.Module, roles: Collection[str] = ROLES) -> dict[str, dict[str, Any]]:
    """States of these operands: layer → operand → `SplitState.state_dict()`.

    `OWN_ROLES` are what each rank has to save, `SHARED_ROLES` what one saves for all.
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
