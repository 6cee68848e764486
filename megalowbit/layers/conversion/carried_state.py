"""State that low-bit layers carry from micro-batch to micro-batch, as snapshots and as state dicts.

A repeated step must round with the same numbers and start its splits from the same directions. A snapshot
therefore records the micro-batch of the shared random stream and the states of the splits (with their counts,
so a step counts once). Restoring it also resets how often each layer was used in the micro-batch, and clears
the cached quantised weights, so they are counted again. `take_layers` copies no tensor.

Files hold the states of splits. The directions of inputs and output gradients depend on a rank's data, so
every rank saves its own. Those of weights are equal on all ranks and must stay equal: otherwise ranks would
multiply by different quantised weights. They are saved once, and every rank continues from them, including
ranks that are new. A state of another recipe or model does no harm: entries that do not fit start cold, and
this is counted. Counts are saved too, and continue when a run resumes.

A model may have several streams: its parts were converted one by one, or it has layers that were not made by
`convert`, each with a stream of its own. All are saved, by the name of their first layer. Snapshots have the
streams that layers share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megalowbit.errors import UserError, shown
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.matmul.quantizations import quantizations_of
from megalowbit.layers.matmul.use_counter import UseCounter
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.state import SplitState

OWN_ROLES = ("input", "grad_output")
SHARED_ROLES = ("weight",)
ROLES = (*OWN_ROLES, *SHARED_ROLES)


@dataclass(frozen=True)
class LayerSnapshot:
    """State of a model's layers between two steps.

    Attributes:
        streams: states of the shared random streams, by the name of their first layer.
        splits: states of split operands, by layer and operand.
    """

    streams: dict[str, dict[str, int]]
    splits: dict[str, dict[str, SplitState]]


def take_layers(model: nn.Module) -> LayerSnapshot:
    """Take a snapshot of the layers, between two steps."""
    splits = {
        name: {role: state.copy() for role, state in layer.split_states.items()}
        for name, layer in bit_layers(model).items()
    }
    streams = {names[0]: stream.state_dict() for names, stream in _shared_streams(model)}
    return LayerSnapshot(streams, splits)


def restore_layers(model: nn.Module, snapshot: LayerSnapshot) -> None:
    """Restore the layers from a snapshot, which can be used several times."""
    for names, stream in _shared_streams(model):
        stream.load_state_dict(snapshot.streams[names[0]])
    for name, layer in bit_layers(model).items():
        # copies, because the layers change their states and the snapshot must not change
        layer.split_states = {role: state.copy() for role, state in snapshot.splits[name].items()}
    forget_uses(model)


def forget_uses(model: nn.Module) -> None:
    """Reset the use counters and cached weights, if a micro-batch number is used again.

    Without this, the first use of the repeated micro-batch would count as a second one.
    """
    for layer in bit_layers(model).values():
        layer._uses = UseCounter()
        if layer.weight_slot is not None:
            layer.weight_slot.clear()


def stream_states(model: nn.Module) -> dict[str, dict[str, int]]:
    """States of all random streams, by the name of their first layer; a layer's own from its first use on."""
    states = {names[0]: stream.state_dict() for names, stream in _shared_streams(model)}
    for name, layer in bit_layers(model).items():
        own = layer._layer_stream.stream
        if layer.random_stream is None and own is not None:
            states[name] = own.state_dict()
    return states


def continue_stream(model: nn.Module, state: Mapping[str, int]) -> list[str]:
    """Let the first shared random stream continue from a saved position; nothing without a stream.

    Returns:
        Names of layers that draw from other streams, one of each: their positions are unknown.

    Raises:
        UserError: `state` is not that of a stream.
    """
    shared, layers = _shared_streams(model), bit_layers(model)
    if shared:
        shared[0][1].load_state_dict(state)
        forget_uses(model)
    first_layers = [names[0] for names, _ in shared[1:]]
    own = [name for name, layer in layers.items() if layer.random_stream is None]
    return [name for name in (*first_layers, *own) if _draws(layers[name])]


def continue_streams(model: nn.Module, saved: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Let all random streams continue from saved positions, as `stream_states` returns them.

    Returns:
        Names of the first layers of shared streams that `saved` lacks and that draw numbers.

    Raises:
        UserError: `saved` does not hold states of streams.
    """
    if not isinstance(saved, Mapping):
        raise UserError(f"states of random streams are {shown(saved)}: use those of a checkpoint")
    layers, missing = bit_layers(model), []
    for names, stream in _shared_streams(model):
        found = next((name for name in names if name in saved), None)  # a stage may lack the first layer
        if found is not None:
            stream.load_state_dict(saved[found])
        elif any(_draws(layers[name]) for name in names):
            missing.append(names[0])
    for name, layer in layers.items():
        if layer.random_stream is None and name in saved:  # one that is not saved had not been used
            layer._layer_stream.load_state_dict(saved[name])
    forget_uses(model)
    return missing


def has_one_stream(model: nn.Module) -> bool:
    """Whether all low-bit layers share one random stream."""
    return len({id(layer.random_stream or layer) for layer in bit_layers(model).values()}) <= 1


def _shared_streams(model: nn.Module) -> list[tuple[list[str], RandomStream]]:
    """The shared random streams in the model's order, each with the names of its layers."""
    found: dict[int, tuple[list[str], RandomStream]] = {}
    for name, layer in bit_layers(model).items():
        stream = layer.random_stream
        if stream is not None:
            found.setdefault(id(stream), ([], stream))[0].append(name)
    return list(found.values())


def draws_numbers(model: nn.Module) -> bool:
    """Whether what any layer computes depends on the position of a shared random stream."""
    return any(_draws(layer) for layer in bit_layers(model).values() if layer.random_stream is not None)


def _draws(layer: BitLinear) -> bool:
    return (
        layer.recipe.redraws_signs
        or any(each.quantizer.is_stochastic for each in quantizations_of(layer.recipe))
        or any(_draws_factors(getattr(layer.recipe, f"split_{role}")) for role in ROLES)
    )


def _draws_factors(split: OperandSplit | None) -> bool:
    """Whether factors start from, or are rounded by, random numbers; a mean row is not."""
    return split is not None and split.method != "mean"


def has_splits(model: nn.Module, roles: Collection[str] = ROLES) -> bool:
    """Whether any layer splits one of these operands at each use."""
    return any(
        getattr(layer.recipe, f"split_{role}") is not None
        for layer in bit_layers(model).values()
        for role in roles
    )


def split_state_dict(model: nn.Module, roles: Collection[str] = ROLES) -> dict[str, dict[str, Any]]:
    """States of these operands: layer → operand → `SplitState.state_dict()`.

    Every rank saves `OWN_ROLES`; one rank saves `SHARED_ROLES` for all.
    """
    states = {
        name: {role: state.state_dict() for role, state in layer.split_states.items() if role in roles}
        for name, layer in bit_layers(model).items()
    }
    return {name: found for name, found in states.items() if found}


def load_split_state_dict(model: nn.Module, saved: Mapping[str, Any], roles: Collection[str] = ROLES) -> None:
    """Continue from saved states; operands of these roles without one start cold, others do not change.

    Raises:
        UserError: `saved` is not a split state, or belongs to a model with other layers.
    """
    layers = bit_layers(model)
    for name, states in saved.items():
        if name not in layers or not isinstance(states, Mapping) or not states.keys() <= set(roles):
            raise UserError(
                f"split state holds {shown(name)}: {shown(states)}, which is not a layer of this model: "
                "resume with the model it was saved with"
            )
    for name, layer in layers.items():
        for role in roles:
            layer.split_states.pop(role, None)
        for role, state in saved.get(name, {}).items():
            layer.split_states[role] = SplitState()
            layer.split_states[role].load_state_dict(state)


def split_counts(model: nn.Module) -> dict[str, int]:
    """How often factors were found in each way so far, over all layers: `{"cold": 16, "warm": 9584, …}`."""
    total: dict[str, int] = {}
    for layer in bit_layers(model).values():
        for state in layer.split_states.values():
            for how, count in state.counts.items():
                total[how] = total.get(how, 0) + count
    return total
