"""A causal language model as a sequence of parts, so that a pipeline can give each stage some of them.

Embedding, blocks one by one, final norm with head: each part is an ordinary module in which the model's own
modules stand under the names they have in the model, so `state_dict` keys of all parts together are the
model's. Nothing is copied: parts and model share their modules. What all blocks need alike (causal mask,
rotary angles) is computed once a stage, not once a block, from what travels along with the hidden states.
Not covered: cross attention, key-value caches, Hugging Face's own gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError
from megalowbit.hf.families import family
from megalowbit.hf.pipeline_batches import IGNORED_LABEL, BatchLimits, Inputs, mask_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BlockOptions = dict[str, Any]
RunBlocks = Callable[[Sequence["Block"], Tensor, BlockOptions], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Names:
    """Where a family keeps what is not in a block; dotted, None where it has none."""

    tokens: str
    positions: str | None
    dropout: str | None
    rotary: str | None
    norm: str
    head: str = "lm_head"


_NAMES = {
    "gpt2": _Names(
        tokens="transformer.wte",
        positions="transformer.wpe",
        dropout="transformer.drop",
        rotary=None,
        norm="transformer.ln_f",
    ),
    "llama": _Names(
        tokens="model.embed_tokens",
        positions=None,
        dropout=None,
        rotary="model.rotary_emb",
        norm="model.norm",
    ),
}


class Part(nn.Module):
    """Some modules of a model, each under its own name in it.

    Args:
        modules: dotted name in the model → module.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(modules)
        for name, module in modules.items():
            place(self, name, module)


class Embedding(Part):
    """Token ids to hidden states."""

    def __init__(self, model: PreTrainedModel, names: _Names) -> None:
        super().__init__(_found(model, (names.tokens, names.positions, names.dropout)))
        self._where = names

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """(batch, tokens) → (batch, tokens, hidden)."""
        where = self._where
        hidden: Tensor = self.get_submodule(where.tokens)(input_ids)
        if where.positions is not None:
            hidden = hidden + self.get_submodule(where.positions)(position_ids)
        return self.get_submodule(where.dropout)(hidden) if where.dropout is not None else hidden


class Block(Part):
    """One transformer block."""

    def forward(self, hidden: Tensor, options: BlockOptions) -> Tensor:
        """(batch, tokens, hidden) → the same; `options` as `BlockInputs.options` makes them."""
        found: Tensor = self.get_submodule(self.names[0])(hidden, use_cache=False, **options)
        return found


class Head(Part):
    """Final norm and output projection."""

    def __init__(self, model: PreTrainedModel, names: _Names) -> None:
        super().__init__(_found(model, (names.norm, names.head)))

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, tokens, hidden) → logits (batch, tokens, vocabulary)."""
        for name in self.names:
            hidden = self.get_submodule(name)(hidden)
        return hidden


class BlockInputs:
    """What every block of a stage gets beside the hidden states.

    Args:
        model: whose configuration and rotary angles are used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        names = _names_of(model.config)
        self._config = model.config
        self.rotary = None if names.rotary is None else model.get_submodule(names.rotary)

    def options(self, hidden: Tensor, mask: Tensor | None, position_ids: Tensor) -> BlockOptions:
        """Arguments of a block; `mask` is (batch, tokens), 1 where a token is attended to, or None."""
        from transformers.masking_utils import create_causal_mask

        options: BlockOptions = {
            "position_ids": position_ids,
            "attention_mask": create_causal_mask(
                config=self._config,
                inputs_embeds=hidden,
                attention_mask=mask,
                past_key_values=None,
                position_ids=position_ids,
            ),
        }
        if self.rotary is not None:
            options["position_embeddings"] = self.rotary(hidden, position_ids=position_ids)
        return options


def parts_of(model: PreTrainedModel) -> list[Embedding | Block | Head]:
    """The parts of a model in the order of its forward; they share its modules.

    Raises:
        UserError: the model's family is not known here, or it recomputes activations by itself.
    """
    names, row = _names_of(model.config), family(model.config.model_type)
    if getattr(model, "is_activation_checkpointing", False):
        raise UserError(
            "activation checkpointing is on in the model, but stages recompute by themselves: turn it off "
            "and set pipeline.activation_checkpoint_interval"
        )
    blocks = (f"{row.blocks}.{index}" for index in range(getattr(model.config, row.num_layers)))
    return [
        Embedding(model, names),
        *(Block(_found(model, (name,))) for name in blocks),
        Head(model, names),
    ]


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output projection's weight is the embedding's."""
    names = _names_of(model.config)
    head, tokens = model.get_submodule(names.head), model.get_submodule(names.tokens)
    return head.weight is tokens.weight


def tied_names(config: PretrainedConfig) -> tuple[str, str]:
    """Names of the embedding's weight and of the output projection's."""
    names = _names_of(config)
    return f"{names.tokens}.weight", f"{names.head}.weight"


def run_parts(
    parts: Sequence[nn.Module], inputs: Inputs, block_inputs: BlockInputs, run: RunBlocks | None = None
) -> Inputs:
    """Run consecutive parts of one model.

    Args:
        parts: some of `parts_of`.
        inputs: token ids if the embedding is among the parts, else hidden states; alone, or in a tuple with
            mask and positions, as `as_inputs_and_labels` orders them.
        block_inputs: of the same model.
        run: runs the blocks; `run_blocks` by default.

    Returns:
        Logits if the head is among the parts, else what the next parts take.
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
        options = block_inputs.options(values, mask, position_ids)
        values = (run or run_blocks)(blocks, values, options)
    if isinstance(parts[-1], Head):
        logits: Tensor = parts[-1](values)
        return logits
    return (values, *extras) if extras else values


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the next token, in fp32.

    Args:
        logits: (batch, tokens, vocabulary).
        labels: (batch, tokens) token ids; −100 is not predicted.
    """
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch_limits(config: PretrainedConfig) -> BatchLimits:
    """What the first and the last stage of a model have rows for."""
    is_learned = _names_of(config).positions is not None
    positions = config.max_position_embeddings if is_learned else None
    return BatchLimits(vocabulary=config.vocab_size, positions=positions)


def place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` below `root` under a dotted name, with empty modules on the way."""
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


def _names_of(config: PretrainedConfig) -> _Names:
    return _NAMES[family(config.model_type).model_type]
