"""A tiny model of each family: a line in `FIELDS` has a family tested wherever families are."""

import torch

from megalowbit.families.registry import family

LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2}
# what a family has beside the sizes that all have
FIELDS = {
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 5},
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    # heads are wider than the model divided by them, and the first block of all attends to everything
    "qwen3": {
        **LLAMA,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
}
KINDS = tuple(FIELDS)
FURTHER_KINDS = KINDS[2:]  # where GPT-2 and LLaMA have cases of their own


def tiny_config(kind, *, vocab_size=64, positions=32, hidden_size=32, num_layers=2, num_heads=4, **more):
    """A configuration; `more` are fields by the family's own names."""
    names = family(kind)
    fields = {
        "vocab_size": vocab_size,
        names.position_limit: positions,
        names.hidden_size: hidden_size,
        names.num_layers: num_layers,
        names.num_heads: num_heads,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return names.load_config_class()(**{**fields, **FIELDS[kind], **more})


def tiny_model(kind, *, seed=0, **sizes):
    """A model in fp32 with random weights; nothing in it is zero or one, which would hide a mistake."""
    torch.manual_seed(seed)
    model = family(kind).load_model_class()(tiny_config(kind, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model
