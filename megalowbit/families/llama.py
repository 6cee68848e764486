"""LLaMA: rotary positions, RMSNorm, gated MLP, fewer key and value heads than query heads."""

from megalowbit.families.base import COLUMN, ROW, Family

LLAMA = Family(
    model_type="llama",
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    # modules
    blocks="model.layers",
    projections={
        "self_attn.q_proj": COLUMN,
        "self_attn.k_proj": COLUMN,
        "self_attn.v_proj": COLUMN,
        "self_attn.o_proj": ROW,
        "mlp.gate_proj": COLUMN,
        "mlp.up_proj": COLUMN,
        "mlp.down_proj": ROW,
    },
    tokens="model.embed_tokens",
    rotary="model.rotary_emb",
    norm="model.norm",
    former_buffers=("rotary_emb.inv_freq",),
    # tensor parallelism
    divided=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    # configuration
    num_layers="num_hidden_layers",
    hidden_size="hidden_size",
    num_heads="num_attention_heads",
    num_key_value_heads="num_key_value_heads",
    position_limit="max_position_embeddings",
    activation="hidden_act",
    sizes=("vocab_size", "intermediate_size", "num_key_value_heads", "head_dim"),
    dropouts=("attention_dropout",),
    numbers={"rms_norm_eps": 1.0, "initializer_range": 10.0, "rope_theta": 1e12},
    further_fields=("rope_theta", "rope_scaling"),
)
