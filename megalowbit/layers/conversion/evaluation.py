"""Evaluates a model in training: nothing that training depends on changes, and results repeat.

A loss on held-out text should depend on the weights and the text. In a training process, low-bit layers also
depend on their history: on the position of the random stream, on directions that splits have kept, and on
their rank. During an evaluation

- a batch has a number, and its random numbers depend on the seed and on this number, as on rank 0;
- splits start without directions, as in a model that was just loaded;
- quantised weights are cached for the evaluation only (split ones not at all), and products are counted
  elsewhere.

So a batch gives the same loss at any step of a run with these weights, on any rank, and after a resume. At
the end everything is as it was: training mode of each module, stream, splits, caches, counts, recipes.

Not covered: compiled models, whose graphs would be compiled again; dropout and other generators of torch,
from which modules in evaluation mode draw nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megalowbit.layers.bitlinear import SLOTS, BitLinear
from megalowbit.layers.conversion.convert import bit_layers, random_stream
from megalowbit.layers.conversion.precision_switch import quantizes_in, switched
from megalowbit.layers.matmul.use_counter import ProductCounts, UseCounter
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.layers.seed_sizes import needed_blocks

FIRST_NUMBER = 2**62  # micro-batches of training have smaller numbers


@contextmanager
def evaluation(
    model: nn.Module, numbers: Iterable[int], *, is_quantized: bool = True, keeps_weights: bool = True
) -> Iterator[None]:
    """Context in which forwards of `model` evaluate batches, one after the other, without gradients.

    Args:
        model: converted or not, between two optimizer steps.
        numbers: of the batches, one for each forward.
        is_quantized: whether low-bit layers quantise; if not, they run as in the recipe `bf16`.
        keeps_weights: whether quantised weights are kept until the end; needs the memory of a weight cache.
    """
    modes = [(module, module.training) for module in model.modules()]
    layers = list(bit_layers(model).values())
    saved = [{name: layer.__dict__[name] for name in SLOTS} for layer in layers]
    hook = model.register_forward_pre_hook(_NextBatch(model, numbers))
    stream = random_stream(model)
    position = None if stream is None else (stream.state_dict(), stream.given_rank)
    try:
        model.eval()
        if stream is not None:
            stream.rank = 0
        for layer in layers:
            _set_up(layer, is_quantized=is_quantized, keeps_weights=keeps_weights)
        with torch.no_grad():
            yield
    finally:
        hook.remove()
        for layer, slots in zip(layers, saved, strict=True):
            layer.__dict__.update(slots)
        if stream is not None and position is not None:
            stream.load_state_dict(position[0])
            stream.given_rank = position[1]
        for module, is_training in modes:
            module.training = is_training


def _set_up(layer: BitLinear, *, is_quantized: bool, keeps_weights: bool) -> None:
    """Give a layer empty state for the evaluation."""
    layer.split_states, layer._uses, layer._product_counts = {}, UseCounter(), ProductCounts()
    layer.input_record = None  # of training
    # a split weight depends on the batch for which it was split
    is_kept = keeps_weights and layer.recipe.split_weight is None
    layer.weight_slot = WeightSlot() if is_kept else None
    if is_quantized:
        return
    layer.chooser = None
    if quantizes_in(layer.recipe, "all"):
        # not the property, which would register the layer again for compiled graphs
        layer._recipe = switched(layer.recipe, "all")
        layer._needed_blocks = needed_blocks(layer._recipe)


class _NextBatch:
    """Forward pre-hook that moves the random stream to the next batch's numbers."""

    def __init__(self, model: nn.Module, numbers: Iterable[int]) -> None:
        self._stream, self._numbers = random_stream(model), iter(numbers)

    def __call__(self, *_: Any) -> None:
        number = next(self._numbers)
        if self._stream is not None:
            step = FIRST_NUMBER + number
            self._stream.load_state_dict({"seed": self._stream.seed, "step": step})
