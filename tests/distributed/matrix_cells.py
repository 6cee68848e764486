"""What the matrix of stages is made of, for its program and for its reference: model, data, cells.

A cell is a ZeRO stage, a precision, a number of micro-batches and plain or low-bit layers, and for further
families a stage; each trains a small model for `STEPS` steps, of which one has an infinite gradient on one
rank only.
"""

import itertools

import torch
from tiny_models import FURTHER_KINDS, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATIONS = (1, 2)
LAYERS = ("plain", "low-bit")
STEPS, BAD_STEP = 6, 3
VOCABULARY, LENGTH, BATCH = 96, 16, 2
LEARNING_RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIPPING = 2e-3, 0.1, (0.9, 0.95), 1e-8, 0.9
INITIAL_SCALE = 2.0**10
# nearest rounding throughout: shards and whole operands then round alike
LOW_BIT = {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
BAD_PARAMETER = "model.layers.1.mlp.up_proj.weight"  # a shard, under tensor parallelism

CELLS = list(itertools.product(STAGES, PRECISIONS, ACCUMULATIONS, LAYERS))
# of the others in `tiny_models`
FAMILY_CELLS = [(kind, (stage, "fp32", 1, "low-bit")) for kind in FURTHER_KINDS for stage in STAGES]
# the optimizer on the CPU, and at stage 3 the parameters too
OFFLOADED_CELLS = [(stage, "bf16", accumulation, "plain") for stage in (1, 2, 3) for accumulation in (1, 2)]
# tensor-parallel size and cell; every value of a setting, and each stage with low-bit layers
QUICK_CELLS = [
    (2, (0, "fp16", 2, "low-bit")),
    (1, (1, "fp32", 2, "low-bit")),
    (2, (1, "bf16", 1, "plain")),
    (1, (2, "bf16", 1, "low-bit")),
    (2, (3, "fp32", 2, "low-bit")),
    (1, (3, "fp16", 1, "plain")),
]
QUICK_FAMILY_CELLS = [(2, cell) for cell in FAMILY_CELLS[:: len(STAGES) + 1]]
QUICK_OFFLOADED_CELLS = [(1, OFFLOADED_CELLS[-1]), (2, OFFLOADED_CELLS[2])]


def key_of(stage, precision, accumulation, layers):
    return f"stage {stage}, {precision}, accumulation {accumulation}, {layers}"


def make_model(kind="llama"):
    """The same fp32 weights wherever it is called."""
    if kind in FURTHER_KINDS:
        return tiny_model(
            kind, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, positions=LENGTH
        )
    torch.manual_seed(11)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
            tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
        )
    )  # fmt: skip


def batch_of(step, micro_batch, data_rank):
    """Tokens that depend on nothing but their place in the run."""
    generator = torch.Generator().manual_seed((step * 8 + micro_batch) * 8 + data_rank)
    starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def config_of(stage, precision, accumulation, layers, *, tensor_size=1, offload=None):
    zero = {"stage": stage}
    if offload:
        zero |= {name: {"device": "cpu"} for name in offload}
    scaler = {"type": "dynamic", "initial_scale": INITIAL_SCALE, "growth_interval": 2, "hysteresis": 1}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": zero,
        **({"tensor_parallel": {"autotp_size": tensor_size}} if tensor_size > 1 else {}),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": list(BETAS), "eps": EPSILON,
            },
        },
        "megalowbit": {
            "precision": precision,
            **({"grad_scaler": scaler} if precision == "fp16" else {}),
            "recipe": LOW_BIT if layers == "low-bit" else None,
        },
    }  # fmt: skip
