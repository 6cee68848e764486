"""What low-bit layers carry from micro-batch to micro-batch, taken and put back within one process.

A step that is done again must round with the numbers of the first time and start its splits from the same
directions. Four things say where a model's layers are: the micro-batch of the shared random stream, how
often each layer was used in it, the states of its splits (with their counts, so a step counts once), and the
quantised weights kept for the step, which are forgotten so that they are counted again. No tensor is copied.
For files there is `split_states`. Not covered: layers without a shared stream (`convert` gives them one).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalowbit.layers.conversion.convert import bit_layers, random_stream
from megalowbit.layers.matmul.use_counter import UseCounter
from megalowbit.spectral.state import SplitState


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
