"""Divides a causal language model into parts, from which a pipeline builds its stages.

The parts are the embedding, each block, and the final norm with the head. A part is an ordinary module that
holds the model's modules under their names in the model, so together the parts have the model's `state_dict`
keys. Nothing is copied: parts and model share their modules. Inputs that several blocks need (masks, rotary
angles) are computed once per stage, from tensors that are sent along with the hidden states.
Not covered: cross attention, key-value caches, Hugging Face's gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalowbit.engine.pipeline.micro_batches import BatchLimits, Inputs, mask_of
from megalowbit.errors import UserError
from megalowbit.families.base import FULL, SLIDING, Family
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import num_tokens
from megalowbit.hf.batches.separate_documents import document_bounds, uses_flash_attention
from megalowbit.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BlockOptions = dict[str, Any]
RunBlocks = Callable[[Sequence["Block"], Tensor, BlockOptions], Tensor]


class Part(nn.Module):
    """Some modules of a model, each under its dotted name in the model."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(modules)
        for name, module in modules.items():
            place(self, name, module)


class Embedding(Part):
    """Token ids to hidden states."""

    def __init__(self, model: PreTrainedModel, names: Family) -> None:
        super().__init__(_found(model, (names.tokens, names.positions, names.dropout)))
        self._family = names

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """(batch, tokens) → (batch, tokens, hidden)."""
        names = self._family
        hidden: Tensor = self.get_submodule(names.tokens)(input_ids)
        if names.positions is not None:
            hidden = hidden + self.get_submodule(names.positions)(position_ids)
        return self.get_submodule(names.dropout)(hidden) if names.dropout is not None else hidden


class Block(Part):
    """One transformer block; `attention` is the kind of its mask."""

    def __init__(self, modules: Mapping[str, nn.Module], attention: str = FULL) -> None:
        super().__init__(modules)
        self.attention = attention

    def forward(self, hidden: Tensor, options: BlockOptions) -> Tensor:
        """(batch, tokens, hidden) → the same shape; `options` are from `BlockInputs.options`."""
        mask = options["attention_mask"][self.attention]
        found: Tensor = self.get_submodule(self.names[0])(
            hidden, use_cache=False, **{**options, "attention_mask": mask}
        )
        return found


class Head(Part):
    """Final norm and output projection."""

    def __init__(self, model: PreTrainedModel, names: Family) -> None:
        super().__init__(_found(model, (names.norm, names.head)))

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, tokens, hidden) → logits (batch, tokens, vocabulary)."""
        for name in self.names:
            hidden = self.get_submodule(name)(hidden)
        return hidden


class BlockInputs:
    """Computes the arguments that every block of a stage gets in addition to the hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        rotary = family(model.config.model_type).rotary
        self._config = model.config
        self.rotary = None if rotary is None else model.get_submodule(rotary)

    def options(
        self, hidden: Tensor, mask: Tensor | None, position_ids: Tensor, kinds: Iterable[str]
    ) -> BlockOptions:
        """Arguments of the blocks.

        Args:
            hidden: (batch, tokens, hidden).
            mask: (batch, tokens), 1 for tokens to attend to; None: all.
            position_ids: (batch or 1, tokens).
            kinds: `FULL` or `SLIDING`; the result has a mask for each under `"attention_mask"`.
        """
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        makers = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}
        options: BlockOptions = {
            "position_ids": position_ids,
            "attention_mask": {
                kind: makers[kind](
                    config=self._config,
                    inputs_embeds=hidden,
                    attention_mask=mask,
                    past_key_values=None,
                    position_ids=position_ids,
                )
                for kind in dict.fromkeys(kinds)
            },
        }
        if self.rotary is not None:
            options["position_embeddings"] = self.rotary(hidden, position_ids=position_ids)
        return options

    def document_options(self, hidden: Tensor, position_ids: Tensor) -> BlockOptions:
        """More arguments of the blocks, if flash attention, which takes no mask, keeps documents apart.

        The host waits for the device: middle stages get positions from there only.
        """
        if not uses_flash_attention(self._config):
            return {}
        return document_bounds(position_ids.expand(hidden.shape[:2]))


def parts_of(model: PreTrainedModel) -> list[Embedding | Block | Head]:
    """The parts of a model in the order of its forward; they share its modules.

    Raises:
        UserError: the model's family is unknown, or the model recomputes activations itself.
    """
    model_family = family(model.config.model_type)
    if getattr(model, "is_activation_checkpointing", False):
        raise UserError(
            "activation checkpointing is on in the model, but pipeline stages recompute activations "
            "themselves: turn it off and set pipeline.activation_checkpoint_interval"
        )
    names, kinds = model_family.block_names(model.config), model_family.attention(model.config)
    return [
        Embedding(model, model_family),
        *(Block(_found(model, (name,)), kind) for name, kind in zip(names, kinds, strict=True)),
        Head(model, model_family),
    ]


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output projection shares the embedding's weight."""
    tokens, head = tied_names(model.config)
    return model.get_parameter(head) is model.get_parameter(tokens)


def tied_names(config: PretrainedConfig) -> tuple[str, str]:
    """Names of the weights of the embedding and the output projection."""
    names = family(config.model_type)
    return f"{names.tokens}.weight", f"{names.head}.weight"


def run_parts(
    parts: Sequence[nn.Module], inputs: Inputs, block_inputs: BlockInputs, run: RunBlocks | None = None
) -> Inputs:
    """Run consecutive parts of a model.

    Args:
        parts: some of `parts_of` the model.
        inputs: token ids if the parts begin with the embedding, else hidden states; alone, or in a tuple with
            mask and positions, in the order of `as_inputs_and_labels`.
        block_inputs: computes the blocks' arguments.
        run: runs the blocks; by default `run_blocks`.

    Returns:
        Logits if the parts end with the head, else the inputs of the next part.
    """
    values, *extras = inputs if isinstance(inputs, tuple) else (inputs,)
    mask = mask_of(extras, values.shape[1])
    if len(extras) > 1:
        position_ids = extras[1]
    else:
        position_ids = torch.arange(values.shape[1], device=values.device).unsqueeze(0)
    if isinstance(parts[0], Embedding):
        values = parts[0](values, position_ids)
    blocks = [part for part in parts if isinstance(part, Block)]
    if blocks:
        kinds = [block.attention for block in blocks]
        options = block_inputs.options(values, mask, position_ids, kinds)
        if mask is None and len(extras) > 1:
            options |= block_inputs.document_options(values, position_ids)
        values = (run or run_blocks)(blocks, values, options)
    if isinstance(parts[-1], Head):
        logits: Tensor = parts[-1](values)
        return logits
    return (values, *extras) if extras else values


def causal_loss(logits: Tensor, labels: Tensor, num_labels: Tensor | None = None) -> Tensor:
    """Mean cross entropy of the next token, in fp32.

    `logits` are (batch, tokens, vocabulary), `labels` token ids (batch, tokens); −100 is ignored. With
    `num_labels`, the sum is divided by that instead of the number of labels.
    """
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    logits = logits.float().flatten(0, 1)
    if num_labels is None:
        return nn.functional.cross_entropy(logits, targets.flatten())
    return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / num_labels


def batch_limits(config: PretrainedConfig) -> BatchLimits:
    """The limits for token ids and positions of a model."""
    is_learned = family(config.model_type).positions is not None
    positions = config.max_position_embeddings if is_learned else None
    return BatchLimits(vocabulary=num_tokens(config), positions=positions)


def place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` below `root` under a dotted name, creating empty modules on the way."""
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(last, module)


def run_blocks(blocks: Sequence[Block], hidden: Tensor, options: BlockOptions) -> Tensor:
    """Run blocks one after the other."""
    for block in blocks:
        hidden = block(hidden, options)
    return hidden


def _found(model: nn.Module, names: Iterable[str | None]) -> dict[str, nn.Module]:
    return {name: model.get_submodule(name) for name in names if name is not None}
