"""What quantising some layers does to a model: to its loss, or to its gradient.

The loss rises with the noise of the forward pass. The error of the gradient is the noise of the backward
products, while the forward is exact. Both are differences to the same model without any quantisation, on the
same text, and have one number for each sequence or batch, so that differences between recipes have errors.

The error of the gradient is that of one draw. Rounding to nearest has less of it than stochastic rounding,
whose errors, however, cancel over the steps, while those of nearest rounding add up. So only recipes that
round the output gradient in the same way can be compared, or those of which one is much finer.

Each measure sees its own half. The loss does not rise under a recipe with an exact forward, nor has the
gradient an error under one that quantises the forward only. A forward that is exact saturates nothing: the
masks of `quest` (recipe quartet) are missing from the error of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError
from megalowbit.families.config_checks import check_fits
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.conversion.evaluation import evaluation
from megalowbit.layers.conversion.precision_switch import quantizes_in, switched
from megalowbit.layers.recipe import Recipe

Measure = Literal["loss", "gradient"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
NOTHING = "bf16"  # the recipe of all other layers
BATCH = 16  # sequences
FEWEST = 8  # sequences, or batches
Assignment = Mapping[str, Recipe]  # layer → its recipe; all others quantise nothing
Progress = Callable[[int, int], None]  # measurements done, and all


def split_into_sequences(tokens: Tensor, length: int, measure: Measure) -> Tensor:
    """The whole sequences of a text: (sequences, length + 1), each token of which but the first is predicted.

    Raises:
        UserError: there are too few to know the error of a mean.
    """
    count = (len(tokens) - 1) // length
    least = FEWEST if measure == "loss" else FEWEST * BATCH
    if count < least:
        raise UserError(
            f"the text has {len(tokens)} tokens, {count} sequences of {length}: "
            f"give at least {least}, better some hundred"
        )
    starts = torch.arange(count)[:, None] * length
    return tokens[starts + torch.arange(length + 1)]


def check_text(model: Any, tokens: Tensor, length: int) -> None:
    """Check that a Hugging Face model has all tokens and as many positions.

    Raises:
        UserError: it has not.
    """
    check_fits(model.config, vocab_size=int(tokens.max()) + 1, sequence_length=length)


def measured(
    model: nn.Module,
    assignments: Sequence[Assignment],
    sequences: Tensor,
    measure: Measure,
    progress: Progress = lambda *_: None,
) -> tuple[Tensor, float]:
    """What each assignment does, and the loss without any: float64 (assignments, sequences or batches), nats.

    Args:
        model: a converted causal language model; its layers end with the recipe `bf16`.
        assignments: the recipes to try.
        sequences: see `split_into_sequences`.
        measure: "loss": rise of each sequence's loss, in nats per token. "gradient": of each batch, the power
            of the gradient's error as a share of the gradient's power, with an exact forward.
        progress: called after each measurement.

    Raises:
        UserError: the loss of the model without quantisation is not finite.
    """
    assign(model, {})
    losses = sequence_losses(model, sequences)
    if not losses.isfinite().all():
        raise UserError("the loss of the unquantised model is not finite: choose the weights of another run")
    rises = []
    if measure == "loss":
        for done, assignment in enumerate(assignments, 1):
            assign(model, assignment)
            rises.append(sequence_losses(model, sequences) - losses)
            progress(done, len(assignments))
        found = torch.stack(rises)
    else:
        found = _gradient_errors(model, assignments, sequences, progress)
    assign(model, {})
    return found, losses.mean().item()


def assign(model: nn.Module, assignment: Assignment) -> None:
    """Give the layers of a converted model these recipes, and all others `bf16`."""
    for name, layer in bit_layers(model).items():
        layer.recipe = assignment.get(name, NOTHING)
        layer.split_states.clear()


@torch.no_grad()
def sequence_losses(model: Any, sequences: Tensor) -> Tensor:
    """The mean cross-entropy of each sequence in nats per token: float64 (sequences,)."""
    device, found = next(model.parameters()).device, []
    with evaluation(model, itertools.count()):
        for batch in sequences.to(device).split(BATCH):
            losses = _token_losses(model, batch)
            found.append(losses.double().mean(1).cpu())
    return torch.cat(found)


def _gradient_errors(
    model: nn.Module, assignments: Sequence[Assignment], sequences: Tensor, progress: Progress
) -> Tensor:
    """The relative error of the gradient: (assignments, whole batches)."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    device = parameters[0].device
    exact_forwards = [
        {
            name: switched(each, "forward") if quantizes_in(each, "forward") else each
            for name, each in one.items()
        }
        for one in assignments
    ]
    columns: list[Tensor] = []
    batches = sequences.to(device).split(BATCH)[: len(sequences) // BATCH]
    for batch in batches:
        assign(model, {})
        exact = _gradient(model, batch, parameters)
        power = _power(exact)
        column = []
        for assignment in exact_forwards:
            assign(model, assignment)
            rounded = _gradient(model, batch, parameters)
            column.append(_power([a - b for a, b in zip(rounded, exact, strict=True)]) / power)
            progress(len(columns) * len(assignments) + len(column), len(batches) * len(assignments))
        columns.append(torch.stack(column))
    return torch.stack(columns, 1).cpu()


def _gradient(model: nn.Module, batch: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    for layer in bit_layers(model).values():
        layer.train()  # the others stay in evaluation mode, without dropout
    try:
        loss = _token_losses(model, batch).mean()
        return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
    finally:
        model.eval()


def _power(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.double().square().sum() for each in tensors]).sum()


def _token_losses(model: Any, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
