"""The runs of plain DeepSpeed that `ranks_deepspeed` makes."""

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}
CASES = {
    # name: kind of model, stage, settings
    "fp32 at 0": ("gpt2", 0, {}),
    "bf16 at 0": ("llama", 0, BF16),
    "fp16 at 0": ("gpt2", 0, FP16),
    "fp16 at 1": ("gpt2", 1, FP16),
    "bf16 at 1": ("llama", 1, BF16),
    "bf16 with fp32 gradients at 1": ("gpt2", 1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16 at 2": ("llama", 2, FP16),
    "bf16 at 2, round robin": (
        "gpt2",
        2,
        {**BF16, "zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    ),
    "bf16 at 2, offloaded": (
        "gpt2",
        2,
        {**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    "bf16 at 3": ("gpt2", 3, BF16),
    "fp32 at 3": ("llama", 3, {}),
    "fp16 at 3, many groups": (
        "gpt2",
        3,
        {**FP16, "zero_optimization": {"stage": 3, "sub_group_size": 1000}},
    ),
    "bf16 at 1, frozen": ("gpt2", 1, BF16),
    "bf16 at 2, frozen": ("gpt2", 2, BF16),
    "bf16 at 3, frozen": ("gpt2", 3, BF16),
}
FROZEN = ("transformer.wpe.weight", "transformer.h.0.attn.c_attn.bias", "transformer.h.1.ln_1.weight")
# sizes that two ranks do not divide: 61 tokens of width 30, and a feed-forward layer of 47
ODD = {
    "gpt2": {"vocab_size": 61, "hidden_size": 30, "num_heads": 3, "n_inner": 47, "positions": 31},
    "llama": {"vocab_size": 61, "hidden_size": 36, "num_heads": 6, "intermediate_size": 47},
}
