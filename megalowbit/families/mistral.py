"""Mistral: LLaMA, but if `sliding_window` is set, blocks attend to the last `sliding_window` tokens only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megalowbit.families.base import FULL, SLIDING
from megalowbit.families.llama import LLAMA

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _attention(config: PretrainedConfig) -> list[str]:
    kind = FULL if config.sliding_window is None else SLIDING
    return [kind] * config.num_hidden_layers


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    config_class="MistralConfig",
    model_class="MistralForCausalLM",
    attention=_attention,
    optional_sizes=("sliding_window",),
)
