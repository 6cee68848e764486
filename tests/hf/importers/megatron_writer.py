"""Writes checkpoints in Megatron-LM's layouts from Hugging Face models, row by row in plain loops.

It shares nothing with the importer. The layouts are those of Megatron-LM's own code: `ParallelAttention` of
its former models, `SelfAttention` and `MLP` of Megatron Core, and `fix_query_key_value_ordering` for old
versions.
"""

import argparse

import torch

FORMER = {
    "tokens": "language_model.embedding.word_embeddings.weight",
    "positions": "language_model.embedding.position_embeddings.weight",
    "head": "language_model.output_layer.weight",
    "copy of tokens": "word_embeddings_for_head.weight",
    "final": "language_model.encoder.final_norm",
    "layer": "language_model.encoder.layers",
    "norm1": "input_norm",
    "qkv": "self_attention.query_key_value",
    "proj": "self_attention.dense",
    "norm2": "post_attention_norm",
    "fc1": "mlp.dense_h_to_4h",
    "fc2": "mlp.dense_4h_to_h",
}
OLDEST = {  # before version 2.0
    **FORMER,
    "final": "language_model.transformer.final_layernorm",
    "layer": "language_model.transformer.layers",
    "norm1": "input_layernorm",
    "qkv": "attention.query_key_value",
    "proj": "attention.dense",
    "norm2": "post_attention_layernorm",
}
CORE = {
    "tokens": "embedding.word_embeddings.weight",
    "positions": "embedding.position_embeddings.weight",
    "head": "output_layer.weight",
    "copy of tokens": "output_layer.weight",
    "final": "decoder.final_layernorm",
    "layer": "decoder.layers",
    "norm1": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "norm2": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
FUSED = {**CORE, "norm1": "self_attention.linear_qkv.layer_norm_", "norm2": "mlp.linear_fc1.layer_norm_"}


def qkv_rows(q, k, v, rank, ranks, heads, groups, version):
    """The rows of one rank; q, k and v are weights of (outputs, inputs), or biases."""
    size, rows = len(q) // heads, []
    if version >= 2:
        for group in range(rank * groups // ranks, (rank + 1) * groups // ranks):
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                rows += [q[head * size + i] for i in range(size)]
            rows += [k[group * size + i] for i in range(size)]
            rows += [v[group * size + i] for i in range(size)]
        return torch.stack(rows)
    own = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    if version == 1:
        rows = [each[head * size + i] for head in own for i in range(size) for each in (q, k, v)]
    else:
        rows = [each[head * size + i] for each in (q, k, v) for head in own for i in range(size)]
    return torch.stack(rows)


def share(tensor, rank, ranks, dim=0):
    """A rank's share of a tensor, in blocks of equal size."""
    size = tensor.shape[dim] // ranks
    return torch.stack([tensor.select(dim, rank * size + i) for i in range(size)], dim=dim)


def hf_layers(model):
    """Every layer's tensors by part, linear weights as (outputs, inputs)."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    config, layers = model.config, []
    for index in range(config.num_hidden_layers):
        if config.model_type == "gpt2":
            own = f"transformer.h.{index}."
            names = {"norm1": "ln_1", "qkv": "attn.c_attn", "proj": "attn.c_proj", "norm2": "ln_2"}
            names |= {"fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}
            parts = {}
            for part, name in names.items():
                weight = weights[f"{own}{name}.weight"]
                parts[part, "weight"] = weight.T if weight.ndim == 2 else weight
                parts[part, "bias"] = weights[f"{own}{name}.bias"]
            for kind in ("weight", "bias"):
                fused, width = parts.pop(("qkv", kind)), config.n_embd
                for position, which in enumerate("qkv"):
                    parts[which, kind] = fused[position * width : (position + 1) * width]
        else:
            own = f"model.layers.{index}."
            names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
            names |= {which: f"self_attn.{which}_proj" for which in "qkv"} | {"proj": "self_attn.o_proj"}
            names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "fc2": "mlp.down_proj"}
            parts = {
                (part, kind): weights[f"{own}{name}.{kind}"]
                for part, name in names.items()
                for kind in ("weight", "bias")
                if f"{own}{name}.{kind}" in weights
            }
        layers.append(parts)
    return layers


def layer_of_rank(parts, names, rank, ranks, heads, groups, version):
    """One layer's tensors on one rank, by Megatron-LM's names in the layer."""
    found = {}
    for kind in ("weight", "bias"):
        for norm in ("norm1", "norm2"):
            if (norm, kind) in parts:
                dot = "" if names[norm].endswith("_") else "."
                found[f"{names[norm]}{dot}{kind}"] = parts[norm, kind]
        if ("q", kind) not in parts:
            continue
        q, k, v = (parts[which, kind] for which in "qkv")
        found[f"{names['qkv']}.{kind}"] = qkv_rows(q, k, v, rank, ranks, heads, groups, version)
        for part in ("proj", "fc2"):
            value = parts[part, kind]
            found[f"{names[part]}.{kind}"] = share(value, rank, ranks, dim=1) if kind == "weight" else value
        if ("gate", kind) in parts:
            halves = [share(parts[half, kind], rank, ranks) for half in ("gate", "up")]
            found[f"{names['fc1']}.{kind}"] = torch.cat(halves)
        else:
            found[f"{names['fc1']}.{kind}"] = share(parts["fc1", kind], rank, ranks)
    return found


def nested(flat):
    """As the former models save: dictionaries for the parts of the language model, flat names below."""
    tree = {}
    for name, value in flat.items():
        pieces = name.split(".")
        depth = (
            2
            if pieces[0] == "language_model" and pieces[1] in ("encoder", "transformer")
            else len(pieces) - 1
        )
        place = tree
        for piece in pieces[:depth]:
            place = place.setdefault(piece, {})
        place[".".join(pieces[depth:])] = value
    return tree


def arguments_of(model, ranks, stages, padded, **more):
    """What Megatron-LM's `args` say about the model."""
    config = model.config
    is_gpt2 = config.model_type == "gpt2"
    values = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.hidden_size // config.num_attention_heads if is_gpt2 else config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "ffn_hidden_size": (config.n_inner or 4 * config.n_embd) if is_gpt2 else config.intermediate_size,
        "position_embedding_type": "learned_absolute" if is_gpt2 else "rope",
        "normalization": "LayerNorm" if is_gpt2 else "RMSNorm",
        "swiglu": not is_gpt2,
        "add_bias_linear": is_gpt2 or config.mlp_bias,
        "bias_gelu_fusion": True,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "padded_vocab_size": padded,
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": stages,
        "params_dtype": torch.bfloat16,
        "num_experts": None,
    }
    if is_gpt2:
        values |= {"layernorm_epsilon": config.layer_norm_epsilon}
        values |= {"attention_dropout": config.attn_pdrop, "hidden_dropout": config.resid_pdrop}
    else:
        values |= {"norm_epsilon": config.rms_norm_eps, "rotary_base": 10000, "rotary_percent": 1.0}
        values |= {"group_query_attention": True, "num_query_groups": config.num_key_value_heads}
    return argparse.Namespace(**{**values, **more})


def write(folder, model, *, names=CORE, ranks=1, stages=1, chunks=1, version=3.0, padding=0, **more):
    """Save a model; `folder/iter_0000012/…` and the tracker. `more` are further arguments of the program.

    Args:
        folder: of the run.
        model: GPT-2 or LLaMA of Hugging Face.
        names: one of the tables above.
        ranks: tensor-parallel ranks.
        stages: of the pipeline.
        chunks: of layers on every stage.
        version: `checkpoint_version`.
        padding: rows added to the vocabulary.
    """
    config, layers = model.config, hf_layers(model)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    tokens, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    extra = torch.full((padding, tokens.shape[1]), 9.0, dtype=tokens.dtype)
    tokens, head = torch.cat([tokens, extra]), torch.cat([head, extra])
    arguments = arguments_of(model, ranks, stages, len(tokens), **more)
    per_chunk = len(layers) // (stages * chunks)
    base = model.transformer.ln_f if config.model_type == "gpt2" else model.model.norm
    for stage in range(stages):
        for rank in range(ranks):
            content = {"args": arguments, "checkpoint_version": version, "iteration": 12}
            for chunk in range(chunks):
                flat, number = {}, chunk * stages + stage
                if number == 0:
                    flat[names["tokens"]] = share(tokens, rank, ranks)
                    if config.model_type == "gpt2":
                        flat[names["positions"]] = model.transformer.wpe.weight.detach()
                for index, parts in enumerate(layers[number * per_chunk : (number + 1) * per_chunk]):
                    own = layer_of_rank(parts, names, rank, ranks, heads, groups, version)
                    flat |= {f"{names['layer']}.{index}.{name}": value for name, value in own.items()}
                if number == stages * chunks - 1:
                    flat |= {
                        f"{names['final']}.{name}": value.detach() for name, value in base.named_parameters()
                    }
                    if not config.tie_word_embeddings:
                        flat[names["head"]] = share(head, rank, ranks)
                    elif stages > 1:
                        flat[names["copy of tokens"]] = share(tokens, rank, ranks)
                flat = {name: value.clone() for name, value in flat.items()}
                key = "model" if chunks == 1 else f"model{chunk}"
                content[key] = nested(flat) if names["tokens"].startswith("language_model") else flat
            place = folder / "iter_0000012" / (f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (stages > 1))
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    return folder
