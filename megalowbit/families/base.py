"""What the other rooms need to know of a model family, in one description.

Names of modules and of configuration fields are those of transformers. A new family is a file that makes a
`Family`, and a line in `registry`. Conversion finds linear layers by their type, so it needs no description;
the list of projections is there to notice one that was not found.
Not covered: encoders, cross-attention, mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # as `layer_types` of transformers says it


class Projection(NamedTuple):
    """How tensor-parallel ranks share a projection.

    Attributes:
        is_row: each has some of the input features; otherwise some of the output features.
        num_parts: parts of equal size side by side in the output features (3: q, k and v in one projection);
            each rank gets its share of every part.
    """

    is_row: bool = False
    num_parts: int = 1


COLUMN, ROW = Projection(), Projection(is_row=True)


def full_attention(config: PretrainedConfig) -> list[str]:
    """Every block attends to all earlier tokens."""
    return [FULL] * config.num_hidden_layers


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        model_type: as `config.json` says it.
        config_class: name of its configuration in transformers.
        model_class: name of its causal language model in transformers.

        blocks: dotted name of the list of blocks in the model.
        projections: linear layers by their names in a block, and how tensor ranks share them.
        head_norms: norms by their names in a block that work on each attention head; under tensor
            parallelism a rank has them whole and applies them to its own heads.
        tokens, positions, dropout, rotary, norm, head: dotted names of what is in no block: token embedding,
            learned positions, dropout after the embedding, rotary angles, final norm, output projection;
            None where the family has none.
        attention: kind of each block's mask, `FULL` or `SLIDING`, from the configuration.

        divided: fields of the configuration that the number of tensor ranks must divide.
        attention_sizes: attributes of attention modules that a rank's share of the heads makes smaller.
        refused_when_divided: fields that must be false or unset under tensor parallelism.

        num_layers, hidden_size, num_heads, position_limit, activation: names of configuration fields.
        num_key_value_heads: likewise; None: as many as heads.
        sizes: further fields that are whole numbers ≥ 1.
        optional_sizes: likewise, or `None`.
        dropouts: fields that are probabilities.
        numbers: fields that are numbers > 0, with the largest that makes sense.
        further_fields: fields that are understood when read, and stored under another name.
    """

    model_type: str
    config_class: str
    model_class: str

    blocks: str
    projections: Mapping[str, Projection]
    head_norms: tuple[str, ...] = ()
    tokens: str
    positions: str | None = None
    dropout: str | None = None
    rotary: str | None = None
    norm: str
    head: str = "lm_head"
    attention: Callable[[PretrainedConfig], list[str]] = full_attention

    divided: tuple[str, ...]
    attention_sizes: tuple[str, ...] = ()
    refused_when_divided: tuple[str, ...] = ()

    num_layers: str
    hidden_size: str
    num_heads: str
    position_limit: str
    activation: str
    num_key_value_heads: str | None = None
    sizes: tuple[str, ...]
    optional_sizes: tuple[str, ...] = ()
    dropouts: tuple[str, ...]
    numbers: Mapping[str, float]
    further_fields: tuple[str, ...] = ()

    def load_config_class(self) -> Any:
        """The configuration class, imported now."""
        import transformers

        return getattr(transformers, self.config_class)

    def load_model_class(self) -> Any:
        """The model class, imported now."""
        import transformers

        return getattr(transformers, self.model_class)

    def block_names(self, config: PretrainedConfig) -> list[str]:
        """Dotted names of the blocks of a model, in order."""
        return [f"{self.blocks}.{index}" for index in range(config.num_hidden_layers)]

    def projection_names(self, config: PretrainedConfig) -> list[str]:
        """Dotted names of all projections of a model."""
        return [f"{block}.{name}" for block in self.block_names(config) for name in self.projections]

    def projection(self, module_name: str) -> Projection | None:
        """How tensor ranks share the module of this dotted name; None if it is no projection."""
        return next(
            (found for name, found in self.projections.items() if module_name.endswith(f".{name}")), None
        )
