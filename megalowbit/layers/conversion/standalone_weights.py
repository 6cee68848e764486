"""Matrices of a model outside linear layers, such as the experts of Mixtral and Qwen3-MoE.

transformers stores the experts of a layer as one parameter with three axes and multiplies with it directly,
so no `BitLinear` can replace it. Without running the model it is unknown which parameters take part in a
product. Here every parameter with two axes longer than 1 counts, except embeddings, norms, biases and the
output head. Such a parameter is reported as *missed*, unless there is a reason to keep it:

- A convolution is not a projection.
- Routers stay in high precision in low-precision training (as in DeepSeek-V3, arXiv:2412.19437, section 3.3),
  because their output decides which expert sees a token, and they cost little.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NO_MATRIX = re.compile(r"bias$|emb|^w[tp]e$|^pos")  # parameter names: biases of experts, positions
ROUTER = re.compile(r"router|moe_?gate$|top_?k_?gate$", re.IGNORECASE)  # class names


class StandaloneWeight(NamedTuple):
    """A parameter of one or several matrices that is outside linear layers.

    Attributes:
        owner: the module that holds it.
        owner_name: its name; empty for the model itself.
        shape: shape of the full parameter.
        reason: why it may stay in high precision; None: no reason.
    """

    owner: nn.Module
    owner_name: str
    shape: tuple[int, ...]
    reason: str | None

    @property
    def kind(self) -> str:
        """Name of the owner's class."""
        return type(self.owner).__name__


def standalone_weights(
    model: nn.Module, layers: Mapping[str, nn.Module], heads: Collection[int]
) -> dict[str, StandaloneWeight]:
    """Matrices outside a model's linear layers and output heads (`heads`: their ids), by name, each once."""
    outside = {id(module) for layer in layers.values() for module in layer.modules()}
    outside |= {id(module) for module in model.modules() if _is_outside(module) or id(module) in heads}
    seen = {
        id(parameter)
        for module in model.modules()
        if id(module) in outside
        for parameter in module.parameters(recurse=False)
    }
    found = {}
    for owner_name, owner in model.named_modules():
        if id(owner) in outside:
            continue
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen and _is_matrix(name, parameter):
                full = f"{owner_name}.{name}" if owner_name else name
                found[full] = StandaloneWeight(owner, owner_name, _shape(parameter), _reason_to_keep(owner))
                seen.add(id(parameter))
    return found


def _is_outside(module: nn.Module) -> bool:
    kind = type(module).__name__
    return isinstance(module, EMBEDDINGS) or "Norm" in kind or "Embedding" in kind


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    is_long = [size > 1 for size in _shape(parameter)]
    return parameter.is_floating_point() and sum(is_long) >= 2 and not NO_MATRIX.search(name)


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the full parameter; under ZeRO 3 the parameter itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _reason_to_keep(owner: nn.Module) -> str | None:
    if isinstance(owner, _ConvNd):
        return "a convolution"
    return "a router" if ROUTER.search(type(owner).__name__) else None
