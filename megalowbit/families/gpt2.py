"""GPT-2: learned positions, LayerNorm, q, k and v in one projection; transformers' layers are `Conv1D`."""

from megalowbit.families.base import COLUMN, ROW, Family, Projection

GPT2 = Family(
    model_type="gpt2",
    config_class="GPT2Config",
    model_class="GPT2LMHeadModel",
    # modules
    blocks="transformer.h",
    projections={
        "attn.c_attn": Projection(num_parts=3),
        "attn.c_proj": ROW,
        "mlp.c_fc": COLUMN,
        "mlp.c_proj": ROW,
    },
    tokens="transformer.wte",
    positions="transformer.wpe",
    dropout="transformer.drop",
    norm="transformer.ln_f",
    former_buffers=("attn.bias", "attn.masked_bias"),  # transformers 5 warns of the second, and loads
    # tensor parallelism
    divided=("n_head", "n_embd", "n_inner"),
    attention_sizes=("num_heads", "embed_dim", "split_size"),
    refused_when_divided=("add_cross_attention", "reorder_and_upcast_attn"),
    # configuration
    num_layers="n_layer",
    hidden_size="n_embd",
    num_heads="n_head",
    position_limit="n_positions",
    activation="activation_function",
    sizes=("vocab_size",),
    optional_sizes=("n_inner",),
    dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    numbers={"layer_norm_epsilon": 1.0, "initializer_range": 10.0},
)
