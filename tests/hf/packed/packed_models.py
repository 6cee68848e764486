"""Converted models whose layers differ in scale, and the same models as a server computes them."""

import copy

import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from megalowbit.hf.model import save_hf
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.quantize.names import quantizer

SIZES = {"hidden_size": 64, "intermediate_size": 96, "positions": 128}
SHAPES = {  # name → family and its sizes; all sizes that are summed over are whole blocks
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-odd-heads": ("llama", {"hidden_size": 96, "num_heads": 3, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"num_key_value_heads": 1, "sliding_window": 16}),
    "qwen3": ("qwen3", {"max_window_layers": 2}),
    "qwen3-wide-heads": (
        "qwen3",
        {"num_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "hidden_size": 32},
    ),
}
PROMPT = torch.tensor([[5, 17, 3, 60], [1, 2, 3, 4]])


def converted_model(shape="llama", recipe="nvfp4", *, dtype=torch.bfloat16, **more):
    kind, sizes = SHAPES[shape]
    model = tiny_model(kind, **{**SIZES, **sizes, **more}).to(dtype)
    with (
        torch.no_grad()
    ):  # q, k and v, gate and up get other tensor scales; a trained head prefers some tokens
        for name, parameter in model.named_parameters():
            parameter.mul_({"k_proj": 0.3, "v_proj": 0.07, "up_proj": 4.0}.get(name.split(".")[-2], 1.0))
            parameter.mul_(3.0 if name.endswith("proj.weight") else 1.0)
    convert(model, recipe)
    return model


def emulated(model, folder):
    """The model with plain layers whose weights are those of the forward, loaded from its own folder.

    Loaded, because casting a model also rounds the frequencies of its positions.
    """
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer in bit_layers(copied).values():
            layer.weight.copy_(quantizer(layer.recipe.q_forward_weight)(layer.weight))
    save_hf(copied.to(torch.bfloat16), folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def greedy(model):
    """64 tokens after the prompt, and the logits of all."""
    with torch.no_grad():
        tokens = model.generate(
            PROMPT, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return tokens, model(tokens).logits
