"""The cases of test_tensor_parallel.py: small models, settings and data, for tests and launched ranks."""

import os

import torch
from tiny_models import FURTHER_KINDS, tiny_model

STEPS = 4
NEAREST = {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
MX = {"base": "mxfp4", "q_backward_outputgrad": "mxfp4e2m1bnosr"}
MIXED = {
    **dict.fromkeys(("q_forward_input", "q_forward_weight"), "int8e5m2b:block32"),
    **dict.fromkeys(("q_backward_input", "q_backward_weight"), "int8e5m2b:block32"),
    "q_backward_outputgrad": "int8e5m2b:block32",
}
PER_GEMM = {"base": "nvidia-nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr", "keep_last": 0}
# family, recipe, precision, ZeRO stage and so on; what is left out has the defaults of `config_of`
CASES = {
    "llama": {"family": "llama", "recipe": NEAREST},
    "llama, no recipe": {"family": "llama", "recipe": "bf16"},
    "llama per_gemm": {"family": "llama", "recipe": PER_GEMM},
    "llama, all products transformed": {
        "family": "llama",
        "recipe": {**PER_GEMM, "hadamard": ["output", "grad_input", "grad_weight"]},
    },
    "llama tied, stage 3": {"family": "llama", "recipe": NEAREST, "is_tied": True, "stage": 3},
    "gpt2": {"family": "gpt2", "recipe": NEAREST, "regularizer": True},
    "gpt2 tied": {"family": "gpt2", "recipe": NEAREST, "is_tied": True, "checkpointing": True},
    "gpt2 mxfp4": {"family": "gpt2", "recipe": MX, "stage": 1, "regularizer": True},
    "gpt2 mxfp4 in FP8": {"family": "gpt2", "recipe": {**MX, "gemm": "fp8"}},
    "gpt2 fp8": {"family": "gpt2", "recipe": "fp8", "stage": 2},
    "gpt2 int8 or e5m2": {"family": "gpt2", "recipe": MIXED, "stage": 2},
    "gpt2 stochastic": {"family": "gpt2", "recipe": "nvfp4"},
    "llama bf16": {"family": "llama", "recipe": NEAREST, "precision": "bf16"},
    "llama fp16": {"family": "llama", "recipe": NEAREST, "precision": "fp16", "scale": 256.0},
    "gpt2 switched": {"family": "gpt2", "recipe": NEAREST, "switch_before": 2},
    "llama, first block kept": {"family": "llama", "recipe": {**NEAREST, "keep_first": 1}},
    "gpt2, a model for each rank": {"family": "gpt2", "recipe": NEAREST, "is_seeded_by_rank": True},
    "gpt2 norms and zeros": {
        "family": "gpt2",
        "recipe": "bf16",
        "block": {"gradient_norm": "sum_of_norms", "log_num_zeros_in_grad": True},
        "counts_zeros": True,
    },
    "llama fp32 norms": {
        "family": "llama",
        "recipe": NEAREST,
        "precision": "bf16",
        "block": {"fp32_norms": True},
    },
    "gpt2 layer scaling": {
        "family": "gpt2",
        "recipe": "bf16",
        "precision": "fp16",
        "scale": 256.0,
        "block": {"layer_scaling": {"enabled": True, "smoothing": 0.0}},
    },
    "gpt2 chosen": {"family": "gpt2", "recipe": "fp8", "has_chooser": True},
    "llama chosen, stage 3": {"family": "llama", "recipe": "fp8", "has_chooser": True, "stage": 3},
    "llama, loss in chunks": {
        "family": "llama",
        "recipe": NEAREST,
        "block": {"chunked_cross_entropy": True, "activation_checkpointing": {"every": 2}},
    },
    "gpt2, kept by name": {"family": "gpt2", "recipe": {**NEAREST, "keep": ["*.mlp.*", "*.1.attn.c_proj"]}},
}
CASES |= {kind: {"family": kind, "recipe": NEAREST} for kind in FURTHER_KINDS}
CASES |= {
    f"{kind} bf16, stage 3": {"family": kind, "recipe": NEAREST, "precision": "bf16", "stage": 3}
    for kind in FURTHER_KINDS
}
SCALERS = {
    "constant": {"scale": 128.0},
    "max_value": {"initial_scale": 64.0, "update_every": 1},
    "norm_ratio": {"initial_scale": 2.0**-16, "min_scale": 2.0**-20, "update_every": 1, "probe_every": 1},
    "max_norm": {"initial_scale": 64.0, "update_every": 1},
    "controller": {"initial_scale": 64.0, "update_every": 1},
}
CASES |= {
    f"llama, scaler {name}": {
        "family": "llama",
        "recipe": "bf16",
        "precision": "fp16",
        "block": {"grad_scaler": {"type": name, **arguments}},
    }
    for name, arguments in SCALERS.items()
}
QUICK = {
    "llama", "llama fp16", "llama tied, stage 3", "llama, scaler constant", "gpt2", "gpt2 tied", "gpt2 fp8",
    "gpt2 chosen", "gpt2 norms and zeros", "gpt2, kept by name",
}  # fmt: skip
STOCHASTIC = {"family": "gpt2", "recipe": "nvfp4"}
# what a chooser makes of the layers in turn: products at unlike precisions, and a step later all alike
CHOSEN = (
    {
        "q_forward_input": "int8",
        "q_forward_weight": "int8",
        "q_backward_weight": "nvfp4e2m1bnosr",
        "q_backward_outputgrad": "nvfp4e2m1bnosr",
        "q_backward_input": "fp8e4m3",
        "q_backward_outputgrad_for_weight": "int8",
    },
    {"q_backward_outputgrad_for_weight": "fp32", "q_backward_input": "fp32"},
)


def make_model(case):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(int(os.environ["RANK"]) if case.get("is_seeded_by_rank") else 0)
    tied = {"tie_word_embeddings": case.get("is_tied", False), "bos_token_id": 0, "eos_token_id": 0}
    if case["family"] in FURTHER_KINDS:
        return tiny_model(
            case["family"], vocab_size=128, hidden_size=64, intermediate_size=128, **case.get("model", {})
        )
    if case["family"] == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), case.get("dropout", 0.0))
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops, **tied))
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 32,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**sizes, **case.get("model", {})}, **tied)
    )


def config_of(case, tensor_size):
    block = {"precision": case.get("precision", "fp32"), "recipe": case["recipe"]}
    if case.get("regularizer"):
        block["regularizer"] = {"strength": 1e-2}
    if case.get("scale"):
        block["grad_scaler"] = {"initial_scale": case["scale"]}
    block |= case.get("block", {})
    zero = {"stage": case.get("stage", 0)}
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # or none is so large that it is partitioned
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "megalowbit": block,
    }
    return {**settings, **({"tensor_parallel": {"autotp_size": tensor_size}} if tensor_size > 1 else {})}


def batch(step, data_rank):
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    tokens = torch.randint(0, 128, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens}
