"""The held-out loss of trained weights, in bf16 and in the recipe's own precision.

The difference of the two is the noise of the forward pass; the loss in bf16 shows what training has done to
the weights. The evaluation is exact: the last, partial sequence of the text is dropped, and each other token
after the first is predicted once, from at most `sequence_length` tokens before it. The sum is in float64.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalowbit.data.packing import pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import open_corpus
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.tokenize import build_tokenizer
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.conversion.precision_switch import switched
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.checks import this_device
from megalowbit.pretrain.components.late_switch import LateSwitchSettings
from megalowbit.pretrain.config import PretrainConfig

BATCH = 16  # sequences


def heldout_losses(config: PretrainConfig, weights: Path, heldout: Path) -> dict[str, Any]:
    """Held-out losses in nats per token of a run's exported weights.

    Args:
        config: the run's resolved configuration.
        weights: a Hugging Face folder.
        heldout: the held-out text.

    Returns:
        `bf16` and `own`, None if not finite, and the number of `tokens` that were predicted.
    """
    tokens = read_tokens(config.settings.data, heldout)
    length = config.settings.data.sequence_length
    losses: dict[str, float | None] = {}
    for name, recipe in (("bf16", recipe_of("bf16")), ("own", final_recipe(config))):
        model = build_model(ModelSettings(checkpoint=weights), seed=0)
        model = model.to(device=this_device(), dtype=torch.bfloat16).eval()
        convert(model, recipe, seed=config.settings.run.seed, rank=0)
        loss = mean_loss(model, tokens, length)
        losses[name] = loss if math.isfinite(loss) else None
    return {**losses, "tokens": len(tokens) - 1}


def final_recipe(config: PretrainConfig) -> Recipe:
    """The recipe at the end of the run, after a late switch."""
    recipe = recipe_of(config.recipe)
    switch = config.settings.of(LateSwitchSettings)
    return switched(recipe, switch.scope) if switch is not None and recipe.quantizes else recipe


def read_tokens(settings: DataSettings, heldout: Path) -> torch.Tensor:
    """The held-out tokens in whole sequences, int64 (tokens,); the tokenizer is that of the training text."""
    tokenizer = build_tokenizer(settings, open_corpus(settings))
    corpus = LocalCorpus(heldout, text_field=settings.text_field)
    dataset = pack(corpus, tokenizer, settings.sequence_length, settings.cache_dir)
    return dataset.batch(np.arange(dataset.num_samples)).flatten()


@torch.no_grad()
def mean_loss(model: Any, tokens: torch.Tensor, length: int) -> float:
    """Mean cross-entropy in nats of every token after the first.

    Args:
        model: a causal language model.
        tokens: (tokens,).
        length: largest number of tokens in a forward pass.
    """
    device = next(model.parameters()).device
    inputs, targets = tokens[:-1].to(device), tokens[1:].to(device)
    whole = len(inputs) // length * length
    shape = (-1, length)
    batches = (inputs[:whole].view(shape).split(BATCH), targets[:whole].view(shape).split(BATCH))
    pieces = [*zip(*batches, strict=True), (inputs[None, whole:], targets[None, whole:])]
    total = 0.0
    for each_inputs, each_targets in pieces:
        if not each_inputs.numel():
            continue
        logits = model(input_ids=each_inputs, use_cache=False).logits.flatten(0, 1).float()
        losses = torch.nn.functional.cross_entropy(logits, each_targets.flatten(), reduction="none")
        total += losses.double().sum().item()
    return total / len(inputs)
