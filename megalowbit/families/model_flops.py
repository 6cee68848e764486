"""FLOPs that a model needs for one token of training, by two formulas.

Both count a multiplication and an addition as two, and the backward pass as twice the forward pass:

- `palm`: 6·N + 12·L·H·Q·T, from appendix B of PaLM (Chowdhery et al. 2022, arXiv:2204.02311). N are all
  parameters, L blocks, H heads of size Q, T the sequence length. It is what other reports quote.
- `counted`: 6·(weights of the projections and of the output projection) + 12·H·Q·(attended positions), summed
  over blocks: the matrix products of this model, and nothing else. Embeddings, norms and biases multiply no
  matrices, so they do not count; a tied output projection does. A block with a sliding window attends to at
  most as many positions as its window has. For GPT-2 this is Megatron's 72·L·h²·(1 + T/6h + V/12Lh)
  (Narayanan et al. 2021, arXiv:2104.04473, section 5.1, without its recomputed forward pass).

They are FLOPs of the *model*. What is computed beyond it does not count: activations that are recomputed, the
scores that fused attention recomputes, quantisation, splits. Utilisation from these figures is therefore MFU,
not HFU. Causal masks halve nothing in either formula, as in both papers. Fewer key and value heads change the
projections, not the attention: each query head has its products.

Where tokens attend to their own document only, `of_documents` counts d² pairs for d tokens, with a window
d · min(d, window). The model needs no others, also where a mask hides pairs that have been computed. PaLM's
formula stays that of the sequence length, as in other reports.
Not covered: mixtures of experts, encoders.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megalowbit.families.base import SLIDING
from megalowbit.families.registry import family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORWARD_AND_BACKWARD = 3  # times the forward pass
FLOPS_PER_WEIGHT = 2 * FORWARD_AND_BACKWARD
FLOPS_PER_PAIR = 4 * FORWARD_AND_BACKWARD  # of a query's and a key's element: scores, then weighted values


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one token of training.

    Attributes:
        matrices: of the products with weights.
        pair: of a query and a key in one block.
        spans: the most positions to which a token attends, in each block.
        palm: by PaLM's formula.
    """

    matrices: int
    pair: int
    spans: tuple[int, ...]
    palm: int

    @property
    def counted(self) -> int:
        """Of the model's matrix products, in a sample that is one document."""
        return self.matrices + self.pair * sum(self.spans)

    def of_documents(self, positions: NDArray[np.int64]) -> float:
        """The mean of the same in samples of separate documents.

        Args:
            positions: of the tokens in their documents, of any shape.
        """
        # the sum over a document of d tokens is d · min(d, span): 2p + 1 is the difference of two squares
        pairs = sum(
            count * int(np.where(positions < span, 2 * positions + 1, span).sum())
            for span, count in Counter(self.spans).items()
        )
        return self.matrices + self.pair * pairs / positions.size

    @classmethod
    def of(cls, model: PreTrainedModel, sequence_length: int) -> ModelFlops:
        """FLOPs of a full model of a known family, before it is sharded, divided or converted.

        The model's weights are not read: it may be on the `meta` device.
        """
        config = model.config
        names = family(config.model_type)
        matrices = [*names.projection_names(config), names.head]
        num_weights = sum(model.get_submodule(name).weight.numel() for name in matrices)
        num_heads = getattr(config, names.num_heads)
        head_dim = getattr(config, "head_dim", None) or getattr(config, names.hidden_size) // num_heads
        kinds = names.attention(config)
        pair = FLOPS_PER_PAIR * num_heads * head_dim
        num_parameters = sum(parameter.numel() for parameter in model.parameters())  # a tied one counts once
        return cls(
            matrices=FLOPS_PER_WEIGHT * num_weights,
            pair=pair,
            spans=tuple(
                min(sequence_length, config.sliding_window) if kind == SLIDING else sequence_length
                for kind in kinds
            ),
            palm=FLOPS_PER_WEIGHT * num_parameters + pair * sequence_length * len(kinds),
        )
