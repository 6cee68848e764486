"""Runs with megatron-core alone: saves small GPT models as Megatron-LM does, and their logits.

Arguments: a folder, and names of cases. `RANK` and `WORLD_SIZE` are those of tensor parallelism. The `args`
of Megatron-LM are an `argparse.Namespace` that also holds enumerations and dtypes; its files hold the results
of `model.state_dict_for_save_checkpoint()`.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

COMMON = {"num_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 32, "padded_vocab_size": 64}
GPT2 = {
    **COMMON,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "swiglu": False,
    "add_bias_linear": True,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 8,
    "untie_embeddings_and_output_weights": False,
    "bias_gelu_fusion": False,
}
LLAMA = {
    **COMMON,
    "hidden_size": 36,
    "ffn_hidden_size": 40,
    "position_embedding_type": "rope",
    "rotary_base": 5000,
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "untie_embeddings_and_output_weights": True,
    "bias_gelu_fusion": False,
}
CASES = {
    "gpt2": GPT2,
    "gpt2 with fused gelu": {**GPT2, "bias_gelu_fusion": True},
    "llama": LLAMA,
    "llama with biases, tied": {
        **LLAMA,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "group_query_attention": False,
    },
    "llama 3.1": {**LLAMA, "use_rope_scaling": True, "rope_scaling_factor": 8.0, "rotary_base": 500_000},
    "qwen3": {**LLAMA, "qk_layernorm": True},
}


def build(case):
    a = argparse.Namespace(**CASES[case])
    a.params_dtype, a.model_type, a.attention_backend = (
        torch.float32,
        ModelType.encoder_or_decoder,
        AttnBackend.auto,
    )
    a.tensor_model_parallel_size, a.pipeline_model_parallel_size = dist.get_world_size(), 1
    groups = a.num_query_groups if a.group_query_attention else a.num_attention_heads
    qk_layernorm = getattr(a, "qk_layernorm", False)
    config = TransformerConfig(
        num_layers=a.num_layers, hidden_size=a.hidden_size, ffn_hidden_size=a.ffn_hidden_size,
        num_attention_heads=a.num_attention_heads, num_query_groups=groups, kv_channels=a.kv_channels,
        normalization=a.normalization, layernorm_epsilon=a.norm_epsilon, add_bias_linear=a.add_bias_linear,
        gated_linear_unit=a.swiglu, qk_layernorm=qk_layernorm, use_cpu_initialization=True,
        activation_func=torch.nn.functional.silu if a.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=a.bias_gelu_fusion, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_dtype=torch.float32, apply_rope_fusion=False, persist_layer_norm=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=a.tensor_model_parallel_size,
    )  # fmt: skip
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=qk_layernorm, normalization=a.normalization
        ),
        vocab_size=a.padded_vocab_size, max_sequence_length=a.max_position_embeddings,
        share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
        position_embedding_type=a.position_embedding_type, rotary_base=getattr(a, "rotary_base", 10_000),
        parallel_output=False,  # whole logits on every rank
        rope_scaling=getattr(a, "use_rope_scaling", False), rope_scaling_factor=8.0,
    )  # fmt: skip
    return a, model


def add_noise(model, rank):
    """Change all weights, also norms and biases; copies on several ranks stay equal."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(1000 * number + rank * is_cut)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def main():
    folder = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.current_device = lambda: "cpu"  # where megatron-core allocates its buffers
    get_cuda_rng_tracker().fork = nullcontext  # of dropout, which is off
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for case in sys.argv[2:] or CASES:
        torch.manual_seed(0)
        arguments, model = build(case)
        add_noise(model, rank)
        tokens = torch.arange(24).view(2, 12) * 5 % 64
        positions = torch.arange(12).expand(2, 12)
        mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            logits = model.eval()(tokens, positions, mask)
        place = folder / case / "iter_0000007" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True, exist_ok=True)
        content = {
            "args": arguments, "checkpoint_version": 3.0, "iteration": 7,
            "model": model.state_dict_for_save_checkpoint(),
        }  # fmt: skip
        torch.save(content, place / "model_optim_rng.pt")
        if rank == 0:
            (folder / case / "latest_checkpointed_iteration.txt").write_text("7")
            torch.save((tokens, logits.float()), folder / case / "logits.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
