"""Vocabularies that are padded to a multiple, for GEMMs whose sizes tiles divide.

Embedding and output projection have further rows, which stand for no token. They are never inputs or labels.
As in Megatron, training does not mask their logits, so they take part in the softmax, and training lowers
them. They begin as the mean of the other rows: the logit of one is then at most the mean of the exponentials,
so n of them add at most log(1 + n / vocabulary) to the loss. Rows of zeros would do harm: the logits of GPT-2
are far below 0. Validation leaves them out, and exported models do not have them.

The configuration of a padded model holds the number of tokens in a field that transformers does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megalowbit.families.registry import family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FIELD = "unpadded_vocab_size"


def unpadded_size(config: PretrainedConfig) -> int | None:
    """The size of a padded vocabulary without its padding; None: it is not padded."""
    return getattr(config, FIELD, None)


def num_tokens(config: PretrainedConfig) -> int:
    """The size of the vocabulary without padding."""
    return unpadded_size(config) or int(config.vocab_size)


def pad_config(config: PretrainedConfig, multiple: int | None) -> None:
    """Round the vocabulary up to a multiple; it may be padded already. None: without padding."""
    size = num_tokens(config)
    config.vocab_size = -(-size // multiple) * multiple if multiple else size
    if config.vocab_size != size:
        setattr(config, FIELD, size)
    elif hasattr(config, FIELD):
        delattr(config, FIELD)


def padding_multiple(size: int, rows: int) -> int | None:
    """The least multiple to which `size` tokens are padded to have `rows`; None: there is no padding."""
    if rows == size:
        return None
    return next(each for each in range(rows - size + 1, rows + 1) if rows % each == 0)


def pad_vocabulary(model: PreTrainedModel, multiple: int | None) -> None:
    """Pad embedding and output projection of a plain model like `pad_config`; None: remove the padding."""
    config, names = model.config, family(model.config.model_type)
    size = num_tokens(config)
    pad_config(config, multiple)
    tokens, head = model.get_submodule(names.tokens), model.get_submodule(names.head)
    is_tied = head.weight is tokens.weight
    tokens.weight = _resized(tokens.weight, size, config.vocab_size)
    head.weight = tokens.weight if is_tied else _resized(head.weight, size, config.vocab_size)
    tokens.num_embeddings = head.out_features = config.vocab_size
    for each in (model, model.base_model):
        if hasattr(each, "vocab_size"):
            each.vocab_size = config.vocab_size


def _resized(weight: Tensor, size: int, padded: int) -> nn.Parameter:
    return nn.Parameter(padded_rows(weight, size, padded), requires_grad=weight.requires_grad)


@torch.no_grad()
def padded_rows(weight: Tensor, size: int, padded: int) -> Tensor:
    """(rows, hidden) → (padded, hidden): the first `size` rows, which are those of tokens, and their mean."""
    rows = weight[:size]
    # in fp32: a sum of many half-precision rows rounds
    mean = rows.float().mean(0, keepdim=True).to(rows.dtype)
    return torch.cat([rows, mean.expand(padded - size, -1)])
