"""Checks of a model's configuration for errors that transformers reports late or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalowbit.errors import Problems, UserError, shown, unknown_name
from megalowbit.families.base import FULL, SLIDING, Family
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import num_tokens
from megalowbit.json_text import is_finite_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Beyond any existing model, so a typing error is rejected here, not after minutes of building.
MAX_LAYERS = 10_000
MAX_WIDTH = 2**20  # of the residual stream
MAX_HEADS = 2**16
MAX_POSITIONS = 2**26
MAX_SIZE = 2**28  # other sizes: vocabulary, MLP


def check_config(config: PretrainedConfig, where: str) -> None:
    """Reject sizes and names that no model can be built from; `where` is the file they were read from.

    Raises:
        UserError: names the field, its value and the allowed values.
    """
    names = family(config.model_type)
    problems = Problems()
    _check_sizes(config, names, where, problems)
    for field in names.dropouts:
        value = getattr(config, field)
        if not is_finite_number(value) or not 0 <= value <= 1:
            message = f"{where}: {field} must be a probability, 0 … 1, not {shown(value)}"
            problems.add(UserError(message))
    for field, limit in names.numbers.items():
        value = config.rope_parameters.get(field) if field == "rope_theta" else getattr(config, field)
        if not is_finite_number(value) or not 0 < value <= limit:
            message = f"{where}: {field} must be a number > 0, at most {limit:g}, not {shown(value)}"
            problems.add(UserError(message))
    problems.raise_any()
    _check_heads(config, names, where)
    _check_attention(config, names, where)
    _check_activation(config, names, where)
    _check_token_ids(config, where)


def _check_sizes(config: PretrainedConfig, names: Family, where: str, problems: Problems) -> None:
    limits = dict.fromkeys((*names.sizes, *names.optional_sizes), MAX_SIZE) | {
        names.num_layers: MAX_LAYERS,
        names.hidden_size: MAX_WIDTH,
        names.num_heads: MAX_HEADS,
        names.position_limit: MAX_POSITIONS,
    }
    for field, limit in limits.items():
        value = getattr(config, field)
        if value is None and field in names.optional_sizes:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.add(UserError(f"{where}: {field} must be a whole number ≥ 1, not {shown(value)}"))
        elif value > limit:
            message = f"{where}: {field} {shown(value)} is larger than in any model: the maximum is {limit}"
            problems.add(UserError(message))


def _check_activation(config: PretrainedConfig, names: Family, where: str) -> None:
    activation = getattr(config, names.activation)
    if activation == getattr(type(config)(), names.activation):
        return  # a default is known to exist, and importing the list takes 4 s

    from transformers.activations import ACT2FN

    if activation not in ACT2FN:
        raise UserError(f"{where}: {unknown_name(names.activation, activation, ACT2FN)}")


def _check_token_ids(config: PretrainedConfig, where: str) -> None:
    defaults = type(config)()  # unset, GPT-2's end of text is 50256, whatever the size of the vocabulary
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


def _check_heads(config: PretrainedConfig, names: Family, where: str) -> None:
    hidden_size, num_heads = getattr(config, names.hidden_size), getattr(config, names.num_heads)
    # the head size is free; if unset, it is this quotient
    head_dim = getattr(config, "head_dim", None)
    if hidden_size % num_heads and head_dim in (None, hidden_size // num_heads):
        raise UserError(
            f"{where}: {names.num_heads} {num_heads} must divide {names.hidden_size} {hidden_size}"
        )
    if names.num_key_value_heads is None:
        return
    num_key_value_heads = getattr(config, names.num_key_value_heads)
    if num_heads % num_key_value_heads:
        raise UserError(
            f"{where}: {names.num_key_value_heads} must divide {names.num_heads}: "
            f"{num_key_value_heads} does not divide {num_heads}"
        )


def _check_attention(config: PretrainedConfig, names: Family, where: str) -> None:
    """Reject attention kinds that the family's blocks do not have, and a window without a size."""
    for kind in names.attention(config):
        if kind not in (FULL, SLIDING):
            raise UserError(f"{where}: {unknown_name('kind in layer_types', kind, (FULL, SLIDING))}")
        if kind == SLIDING and config.sliding_window is None:
            raise UserError(
                f'{where}: layer_types has "{SLIDING}" but sliding_window is null: set it to a size'
            )


def check_fits(config: PretrainedConfig, *, vocab_size: int, sequence_length: int) -> None:
    """Reject a tokenizer size or sample length that a model of this configuration cannot process.

    Raises:
        UserError: token ids exceed the embedding, or sequences exceed the position limit.
    """
    if vocab_size > num_tokens(config):
        raise UserError(
            f"the tokenizer has {vocab_size} tokens, the model's vocab_size is only {num_tokens(config)}: "
            f"set model.overrides.vocab_size to {vocab_size} or more"
        )
    field = family(config.model_type).position_limit
    limit = getattr(config, field)
    if sequence_length > limit:
        raise UserError(
            f"data.sequence_length {sequence_length} is longer than the model's {field} {limit}: "
            f"lower it or set model.overrides.{field}"
        )
