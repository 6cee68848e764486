"""Qwen2 (dense): LLaMA with biases on q, k and v; some blocks may use a sliding window."""

from dataclasses import replace

from megalowbit.families.llama import LLAMA

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    config_class="Qwen2Config",
    model_class="Qwen2ForCausalLM",
    attention=lambda config: list(config.layer_types),
    sizes=("vocab_size", "intermediate_size", "num_key_value_heads"),  # its heads divide the hidden size
    optional_sizes=("sliding_window",),
)
