"""Qwen3 (dense): LLaMA with norms on each head's q and k; some blocks may use a sliding window."""

from dataclasses import replace

from megalowbit.families.llama import LLAMA

QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    config_class="Qwen3Config",
    model_class="Qwen3ForCausalLM",
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    attention=lambda config: list(config.layer_types),
    optional_sizes=("sliding_window",),
)
