"""Joins the tensors of Megatron-LM's ranks, and gives them Hugging Face's names and layout.

Two generations of names exist: the former `language_model.encoder.layers.0.self_attention.query_key_value`,
and Megatron Core's `decoder.layers.0.self_attention.linear_qkv`, whose layer norms may be fused into the
projection that follows. Both become the names of `PARTS`.

Over tensor-parallel ranks, embeddings, qkv and fc1 are cut along their outputs, proj and fc2 along their
inputs; norms and the biases of proj and fc2 are copies. Rows of qkv on one rank (g: its groups, h: query
heads of a group, d: size of a head):

- version 2.0 and later: (g, h + 2, d), the last two of every group being its key and its value
- version 1.0: (heads, d, 3)
- version 0: (3, heads, d)

Rows of fc1 with SwiGLU on one rank: the gate, which goes through SiLU, then the other factor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from megalowbit.errors import UserError
from megalowbit.hf.importers.base import LazyTensor
from megalowbit.hf.importers.file_tensors import FileTensor

logger = logging.getLogger(__name__)

Parts = Sequence[FileTensor]
Tensors = Sequence[torch.Tensor]
Join = Callable[[Tensors], torch.Tensor]

TOKENS, POSITIONS, HEAD, FINAL = "tokens.weight", "positions.weight", "head.weight", "final"
LAYER = re.compile(r"(?:decoder|encoder|transformer)\.layers\.(\d+)\.(.+)\.([a-z_]+)")
# module → part of a layer
PARTS = {
    "input_layernorm": "norm1",
    "input_norm": "norm1",
    "attention.query_key_value": "qkv",
    "attention.linear_qkv": "qkv",
    "attention.dense": "proj",
    "attention.linear_proj": "proj",
    "attention.q_layernorm": "q_norm",
    "attention.k_layernorm": "k_norm",
    "post_attention_layernorm": "norm2",
    "post_attention_norm": "norm2",
    "pre_mlp_layernorm": "norm2",
    "mlp.dense_h_to_4h": "fc1",
    "mlp.linear_fc1": "fc1",
    "mlp.dense_4h_to_h": "fc2",
    "mlp.linear_fc2": "fc2",
}
FUSED_NORMS = {"qkv": "norm1", "fc1": "norm2"}
OUTSIDE = {
    "embedding.word_embeddings.weight": TOKENS,
    "embedding.position_embeddings.weight": POSITIONS,
    "output_layer.weight": HEAD,
    "word_embeddings_for_head.weight": HEAD,
    "decoder.final_layernorm.weight": f"{FINAL}.weight",
    "decoder.final_layernorm.bias": f"{FINAL}.bias",
    "encoder.final_layernorm.weight": f"{FINAL}.weight",
    "encoder.final_layernorm.bias": f"{FINAL}.bias",
    "encoder.final_norm.weight": f"{FINAL}.weight",
    "encoder.final_norm.bias": f"{FINAL}.bias",
    "transformer.final_layernorm.weight": f"{FINAL}.weight",
    "transformer.final_layernorm.bias": f"{FINAL}.bias",
}
# computed, or about numbers of a lower precision; not weights
IGNORED = re.compile(r".*(?:_extra_state|inv_freq|rotary_pos_emb\..*|\.attention\.bias|masked_bias)")


class Sizes(NamedTuple):
    """What decides how tensors are joined.

    Attributes:
        heads: query heads of the model.
        groups: key and value heads of the model.
        head_size: elements of a head.
        vocab_size: tokens without padding.
        version: `checkpoint_version`.
        family: `model_type` of the result.
    """

    heads: int
    groups: int
    head_size: int
    vocab_size: int
    version: float
    family: str


def layer_and_part(name: str) -> tuple[int | None, str] | None:
    """A tensor's layer on its rank (None: outside of the layers) and part; None if it is not a weight.

    Raises:
        UserError: the name is not one of a supported model.
    """
    if IGNORED.fullmatch(name):
        return None
    name = name.removeprefix("language_model.")
    if name in OUTSIDE:
        return None, OUTSIDE[name]
    match = LAYER.fullmatch(name)
    if match is not None:
        part = PARTS.get(match[2].removeprefix("self_"))
        if part in FUSED_NORMS and match[3].startswith("layer_norm_"):
            return int(match[1]), f"{FUSED_NORMS[part]}.{match[3].removeprefix('layer_norm_')}"
        if part is not None and match[3] in ("weight", "bias"):
            return int(match[1]), f"{part}.{match[3]}"
    reason = "experts are not supported" if "expert" in name or "router" in name else "it is not supported"
    raise UserError(f"weight {name} belongs to none of gpt2, llama and qwen3: {reason}")


def outside_weights(parts: Mapping[str, Parts], sizes: Sizes) -> dict[str, LazyTensor]:
    """Weights outside of the layers, by their Hugging Face names."""
    is_gpt2 = sizes.family == "gpt2"
    names = {
        TOKENS: "transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight",
        POSITIONS: "transformer.wpe.weight" if is_gpt2 else POSITIONS,
        HEAD: "lm_head.weight",
        f"{FINAL}.weight": "transformer.ln_f.weight" if is_gpt2 else "model.norm.weight",
        f"{FINAL}.bias": "transformer.ln_f.bias" if is_gpt2 else "model.norm.bias",
    }
    vocabulary = partial(_vocabulary, size=sizes.vocab_size)
    joins = {TOKENS: vocabulary, HEAD: vocabulary}
    return {
        names[part]: _stored(part, parts[part], joins.get(part, partial(_copy, part=part))) for part in parts
    }


def layer_weights(index: int, parts: Mapping[str, Parts], sizes: Sizes) -> dict[str, LazyTensor]:
    """Weights of one layer, by their Hugging Face names."""
    table = _gpt2_names if sizes.family == "gpt2" else _llama_names
    prefix = f"transformer.h.{index}." if sizes.family == "gpt2" else f"model.layers.{index}."
    found: dict[str, LazyTensor] = {}
    for part, tensors in parts.items():
        for name, join in table(part, sizes).items():
            found[prefix + name] = _stored(f"layers.{index}.{part}", tensors, join)
    return found


def _gpt2_names(part: str, sizes: Sizes) -> dict[str, Join]:
    """Name and join of the weights made of one part. GPT-2's linear weights have shape (inputs, outputs)."""
    module, kind = part.split(".")
    names = {
        "norm1": "ln_1",
        "qkv": "attn.c_attn",
        "proj": "attn.c_proj",
        "norm2": "ln_2",
        "fc1": "mlp.c_fc",
        "fc2": "mlp.c_proj",
    }
    join = _join_of(part, sizes)
    is_matrix = kind == "weight" and module in ("qkv", "proj", "fc1", "fc2")
    return {f"{names.get(module, module)}.{kind}": (partial(_transposed, join=join) if is_matrix else join)}


def _llama_names(part: str, sizes: Sizes) -> dict[str, Join]:
    """Name and join of the weights made of one part."""
    module, kind = part.split(".")
    if module == "qkv":
        return {
            f"self_attn.{which}_proj.{kind}": partial(_projection, which=which, sizes=sizes)
            for which in "qkv"
        }
    if module == "fc1":
        halves = {"gate_proj": 0, "up_proj": 1}
        return {f"mlp.{name}.{kind}": partial(_half, which=which) for name, which in halves.items()}
    names = {
        "norm1": "input_layernorm",
        "proj": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "norm2": "post_attention_layernorm",
        "fc2": "mlp.down_proj",
    }
    return {f"{names[module]}.{kind}": _join_of(part, sizes)}


def _join_of(part: str, sizes: Sizes) -> Join:
    """How the ranks' tensors of a part become one, in Megatron-LM's orientation."""
    if part.startswith("qkv."):
        return partial(_all_projections, sizes=sizes)
    if part.startswith("fc1."):
        return _rows
    if part in ("proj.weight", "fc2.weight"):
        return _columns
    return partial(_copy, part=part)


def _stored(what: str, tensors: Parts, join: Join) -> LazyTensor:
    shapes = ", ".join(str(each.shape) for each in tensors)
    if len({each.shape for each in tensors}) > 1:
        raise UserError(f"{what} has different shapes on its ranks, {shapes}: use a complete checkpoint")
    try:
        return LazyTensor.joined(tensors, join)
    except (RuntimeError, IndexError) as error:  # a view of another size
        raise UserError(
            f"{what} has shape {shapes} on its ranks, which does not fit the configuration's heads"
        ) from error


def _rows(tensors: Tensors) -> torch.Tensor:
    return torch.cat(list(tensors), dim=0)


def _columns(tensors: Tensors) -> torch.Tensor:
    return torch.cat(list(tensors), dim=1)


def _half(tensors: Tensors, which: int) -> torch.Tensor:
    """The gate (0) or the other factor (1) of SwiGLU."""
    return torch.cat([each.unflatten(0, (2, -1))[which] for each in tensors], dim=0)


def _vocabulary(tensors: Tensors, size: int) -> torch.Tensor:
    return _rows(tensors)[:size]


def _transposed(tensors: Tensors, join: Join) -> torch.Tensor:
    return join(tensors).t().contiguous()


def _copy(tensors: Tensors, part: str) -> torch.Tensor:
    """A tensor of which every rank has a copy; rank 0's is used."""
    first = tensors[0]
    if first.device.type != "meta":
        for rank, other in enumerate(tensors[1:], start=1):
            if not torch.equal(first, other):
                logger.warning(
                    "tensor-parallel ranks 0 and %d have different values of %s: rank 0's are used",
                    rank,
                    part,
                )
    return first


def _all_projections(tensors: Tensors, sizes: Sizes) -> torch.Tensor:
    """All queries, then all keys, then all values."""
    return torch.cat([_projection(tensors, which, sizes) for which in "qkv"], dim=0)


def _projection(tensors: Tensors, which: str, sizes: Sizes) -> torch.Tensor:
    """The rows of q, k or v of all ranks, in the order of the heads."""
    position, ranks = "qkv".index(which), len(tensors)
    if sizes.groups % ranks:
        raise UserError(
            f"{sizes.groups} key and value heads on {ranks} tensor-parallel ranks are not supported"
        )
    groups, size = sizes.groups // ranks, sizes.head_size
    rows = []
    for tensor in tensors:
        if sizes.version >= 2:
            grouped = tensor.unflatten(0, (groups, sizes.heads // sizes.groups + 2, size))
            queries, keys, values = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            chosen: Any = {"q": queries, "k": keys, "v": values}[which]
            rows.append(chosen.flatten(0, -1 - len(tensor.shape[1:])))
        elif sizes.version == 1:
            rows.append(tensor.unflatten(0, (groups, size, 3))[:, :, position].flatten(0, 1))
        else:
            rows.append(tensor.unflatten(0, (3, groups, size))[position].flatten(0, 1))
    return torch.cat(rows, dim=0)
