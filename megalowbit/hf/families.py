"""What differs between model families, as a table: GPT-2 and LLaMA.

A row names the classes, where the blocks live, the projections inside a block and the fields of the
configuration that sizes are read from. A new family is one more row. `check_config` says what would fail
later, inside transformers, with a traceback or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalowbit.errors import Problems, UserError, shown, unknown_name
from megalowbit.json_text import is_finite_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        model_type: as `config.json` says it.
        config_class: name of its configuration in transformers.
        model_class: name of its causal language model in transformers.
        blocks: dotted name of the list of blocks in the model.
        projections: names of the linear projections inside a block.
        num_layers, hidden_size, num_heads, position_limit, activation: names of configuration fields.
        sizes: further fields that are whole numbers ≥ 1.
        optional_sizes: likewise, or `None`.
        numbers: fields that are numbers > 0, with the largest that makes sense.
        dropouts: fields that are probabilities.
        further_fields: fields that are understood when read, and stored under another name.
    """

    model_type: str
    config_class: str
    model_class: str
    blocks: str
    projections: tuple[str, ...]
    num_layers: str
    hidden_size: str
    num_heads: str
    position_limit: str
    activation: str
    sizes: tuple[str, ...]
    dropouts: tuple[str, ...]
    numbers: dict[str, float]
    optional_sizes: tuple[str, ...] = ()
    further_fields: tuple[str, ...] = ()

    def load_config_class(self) -> Any:
        """The configuration class, imported now."""
        import transformers

        return getattr(transformers, self.config_class)

    def load_model_class(self) -> Any:
        """The model class, imported now."""
        import transformers

        return getattr(transformers, self.model_class)


FAMILIES = (
    Family(
        model_type="gpt2",
        config_class="GPT2Config",
        model_class="GPT2LMHeadModel",
        blocks="transformer.h",
        projections=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        num_layers="n_layer",
        hidden_size="n_embd",
        num_heads="n_head",
        position_limit="n_positions",
        activation="activation_function",
        sizes=("vocab_size",),
        dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        numbers={"layer_norm_epsilon": 1.0, "initializer_range": 10.0},
        optional_sizes=("n_inner",),
    ),
    Family(
        model_type="llama",
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        blocks="model.layers",
        projections=(
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        ),
        num_layers="num_hidden_layers",
        hidden_size="hidden_size",
        num_heads="num_attention_heads",
        position_limit="max_position_embeddings",
        activation="hidden_act",
        sizes=("vocab_size", "intermediate_size", "num_key_value_heads", "head_dim"),
        dropouts=("attention_dropout",),
        numbers={"rms_norm_eps": 1.0, "initializer_range": 10.0, "rope_theta": 1e12},
        further_fields=("rope_theta", "rope_scaling"),
    ),
)


# Beyond any model there is. A slip of the keyboard is refused here, not after minutes of building.
MAX_LAYERS = 10_000
MAX_WIDTH = 2**20  # of the residual stream
MAX_HEADS = 2**16
MAX_POSITIONS = 2**26
MAX_SIZE = 2**28  # anything else: vocabulary, MLP


def family(model_type: object) -> Family:
    """The family of a `model_type`.

    Raises:
        UserError: it is none of the table's.
    """
    for row in FAMILIES:
        if row.model_type == model_type:
            return row
    raise unknown_name("model_type", model_type, [row.model_type for row in FAMILIES])


def expected_projections(config: PretrainedConfig) -> list[str]:
    """Full module names of all attention and MLP projections of a model with this configuration."""
    row = family(config.model_type)
    blocks = range(getattr(config, row.num_layers))
    return [f"{row.blocks}.{block}.{name}" for block in blocks for name in row.projections]


def position_limit(config: PretrainedConfig) -> int:
    """The longest sequence, in tokens, the model was configured for."""
    return int(getattr(config, family(config.model_type).position_limit))


def check_config(config: PretrainedConfig, where: str) -> None:
    """Refuse sizes and names that no model can be built from.

    Args:
        config: of one of the families.
        where: file the configuration was read from, for the message.

    Raises:
        UserError: naming field, value and what is allowed.
    """
    row = family(config.model_type)
    problems = Problems()
    _check_sizes(config, row, where, problems)
    for field in row.dropouts:
        value = getattr(config, field)
        if not is_finite_number(value) or not 0 <= value <= 1:
            message = f"{where}: {field} must be a probability, 0 … 1, not {shown(value)}"
            problems.add(UserError(message))
    for field, limit in row.numbers.items():
        value = config.rope_parameters.get(field) if field == "rope_theta" else getattr(config, field)
        if not is_finite_number(value) or not 0 < value <= limit:
            message = f"{where}: {field} must be a number > 0, at most {limit:g}, not {shown(value)}"
            problems.add(UserError(message))
    problems.raise_any()
    _check_heads(config, row, where)
    activation = getattr(config, row.activation)
    from transformers.activations import ACT2FN

    if activation not in ACT2FN:
        raise UserError(f"{where}: {unknown_name(row.activation, activation, ACT2FN)}")
    _check_token_ids(config, where)


def _check_sizes(config: PretrainedConfig, row: Family, where: str, problems: Problems) -> None:
    limits = dict.fromkeys((*row.sizes, *row.optional_sizes), MAX_SIZE) | {
        row.num_layers: MAX_LAYERS,
        row.hidden_size: MAX_WIDTH,
        row.num_heads: MAX_HEADS,
        row.position_limit: MAX_POSITIONS,
    }
    for field, limit in limits.items():
        value = getattr(config, field)
        if value is None and field in row.optional_sizes:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.add(UserError(f"{where}: {field} must be a whole number ≥ 1, not {shown(value)}"))
        elif value > limit:
            message = f"{where}: {field} {shown(value)} is beyond any model: write {limit} at most"
            problems.add(UserError(message))


def _check_token_ids(config: PretrainedConfig, where: str) -> None:
    defaults = type(config)()  # GPT-2's end of text is 50256 where nobody said so, whatever the vocabulary
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, field)
        if value == getattr(defaults, field):
            continue
        for token in value if isinstance(value, list) else [value]:
            if token is not None and (isinstance(token, bool) or not 0 <= token < config.vocab_size):
                raise UserError(
                    f"{where}: {field} {shown(token)} is outside vocab_size {config.vocab_size}: "
                    "correct it, or use null for none"
                )


def _check_heads(config: PretrainedConfig, row: Family, where: str) -> None:
    hidden_size, num_heads = getattr(config, row.hidden_size), getattr(config, row.num_heads)
    if hidden_size % num_heads:
        raise UserError(f"{where}: {row.num_heads} {num_heads} must divide {row.hidden_size} {hidden_size}")
    if row.model_type != "llama":
        return
    if num_heads % config.num_key_value_heads:
        raise UserError(
            f"{where}: num_key_value_heads must divide {row.num_heads}: "
            f"{config.num_key_value_heads} does not divide {num_heads}"
        )


def check_fits(config: PretrainedConfig, *, vocab_size: int, sequence_length: int) -> None:
    """Refuse data that a model of this configuration cannot read.

    Args:
        config: of one of the families.
        vocab_size: of the tokenizer.
        sequence_length: of the samples.

    Raises:
        UserError: token ids beyond the embedding, or sequences beyond the position limit.
    """
    if vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size} tokens, the model's vocab_size is only {config.vocab_size}: "
            f"set model.overrides.vocab_size to {vocab_size} or more"
        )
    limit = position_limit(config)
    if sequence_length > limit:
        field = family(config.model_type).position_limit
        raise UserError(
            f"data.sequence_length {sequence_length} is longer than the model's {field} {limit}: "
            f"lower it or set model.overrides.{field}"
        )
