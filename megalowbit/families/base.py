"""The description of a model family: names of its modules and configuration fields in transformers.

To add a family, write a file that makes a `Family`, and add a line to `registry`. Conversion finds linear
layers by their type and needs no description; the list of projections serves to detect one that was not
found.

Not covered: encoders, cross-attention, mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # values of `layer_types` in transformers


class Projection(NamedTuple):
    """How a projection is sharded over tensor-parallel ranks.

    Attributes:
        is_row: shard the input features; otherwise the output features.
        num_parts: number of parts of equal size along the output features (3: q, k and v in one projection);
            each rank gets its share of every part.
    """

    is_row: bool = False
    num_parts: int = 1


COLUMN, ROW = Projection(), Projection(is_row=True)


def full_attention(config: PretrainedConfig) -> list[str]:
    """Full attention in every block."""
    return [FULL] * config.num_hidden_layers


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        model_type: its value in `config.json`.
        config_class: name of its configuration class in transformers.
        model_class: name of its causal language model class in transformers.

        blocks: dotted name of the list of blocks in the model.
        projections: linear layers by their names in a block, and how each is sharded.
        head_norms: names of norms in a block that act on each attention head; under tensor parallelism a rank
            holds them in full and applies them to its own heads.
        tokens, positions, dropout, rotary, norm, head: dotted names of modules outside the blocks: token
            embedding, learned positions, dropout after the embedding, rotary angles, final norm, output
            projection; None if the family has none.
        former_buffers: ends of the names of buffers that checkpoints of older versions of transformers hold.
        attention: kind of each block's mask, `FULL` or `SLIDING`, from the configuration.

        divided: configuration fields that must be divisible by the number of tensor-parallel ranks.
        attention_sizes: attributes of attention modules that are smaller on a rank with a share of the heads.
        refused_when_divided: fields that must be false or unset under tensor parallelism.

        num_layers, hidden_size, num_heads, position_limit, activation: names of configuration fields.
        num_key_value_heads: the same; None: equal to the number of heads.
        sizes: further fields that are whole numbers ≥ 1.
        optional_sizes: further fields that are whole numbers ≥ 1, or `None`.
        dropouts: fields that are probabilities.
        numbers: fields that are numbers > 0, with the largest sensible value.
        further_fields: fields that are read but stored under another name.
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
    former_buffers: tuple[str, ...] = ()
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
        """Import and return the configuration class."""
        import transformers

        return getattr(transformers, self.config_class)

    def load_model_class(self) -> Any:
        """Import and return the model class."""
        import transformers

        return getattr(transformers, self.model_class)

    def block_names(self, config: PretrainedConfig) -> list[str]:
        """Dotted names of the blocks of a model, in order."""
        return [f"{self.blocks}.{index}" for index in range(config.num_hidden_layers)]

    def projection_names(self, config: PretrainedConfig) -> list[str]:
        """Dotted names of all projections of a model."""
        return [f"{block}.{name}" for block in self.block_names(config) for name in self.projections]

    def projection(self, module_name: str) -> Projection | None:
        """The sharding of the module with this dotted name; None if it is not a projection."""
        return next(
            (found for name, found in self.projections.items() if module_name.endswith(f".{name}")), None
        )
