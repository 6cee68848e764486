"""Two ranks of FSDP 2 (`fully_shard`); see test_sharded_parameters.py."""

import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import megalowbit as mlb
from megalowbit.layers.conversion.convert import plain_state_dict

RANKS, STEPS, LR = 2, 3, 1e-2
RECIPES = ("nvfp4", "nvfp4-first-block-fp8", "metis-seed", "quartet-2")
SPLIT = {"base": "nvfp4", "name": "split", "parameter_split": {"rank": 8}}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
REGULARIZER = mlb.RegularizerSettings(strength=1e-3)


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=0, eos_token_id=0))


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=16, use_cache=False))


def converted(make, recipe, rank=None):
    model = make()
    mlb.convert(model, recipe, seed=7, rank=rank)
    return model


def sharded(model, **options):
    """Blocks and the rest apart, as FSDP's users do it."""
    for block in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def ids(step, rank):
    generator = torch.Generator().manual_seed(step * RANKS + rank)
    return torch.randint(64, (2, 16), generator=generator)


def backward(model, step, rank):
    tokens = ids(step, rank)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


def train(model, optimizer, rank, steps):
    losses = []
    for step in steps:
        losses.append(backward(model, step, rank))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR)


def full(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def first_step(make, recipe, rank, **options):
    """The loss of each rank, and gradients that are not, bit for bit, the mean of two unsharded models'."""
    model = sharded(converted(make, recipe), **options)
    loss = backward(model, 0, rank)
    found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    losses, sums = [], dict.fromkeys(found, 0.0)
    for each_rank in range(RANKS):
        whole = converted(make, recipe, rank=each_rank)
        if options:  # parameters only: rotary frequencies stay in fp32
            for parameter in whole.parameters():
                parameter.data = parameter.data.bfloat16()
        losses.append(backward(whole, 0, each_rank))
        sums = {name: sums[name] + each.grad.float() for name, each in whole.named_parameters()}
    different = [name for name, total in sums.items() if not torch.equal(found[name], total / RANKS)]
    are_nonzero = all(each.any().item() for name, each in found.items() if name.endswith("weight"))
    return {"loss": loss, "expected": losses[rank], "different": different, "are_nonzero": are_nonzero}


def other_numbers(rank):
    """How far gradients are from those that two ranks with the same random numbers would have."""
    model = sharded(converted(gpt2, "nvfp4"))
    backward(model, 0, rank)
    name = "transformer.h.1.mlp.c_fc.weight"
    found = model.get_parameter(name).grad.full_tensor()
    total = 0.0
    for each_rank in range(RANKS):
        same = converted(gpt2, "nvfp4", rank=0)
        backward(same, 0, each_rank)
        total = total + same.get_parameter(name).grad
    return ((found - total / RANKS).norm() / found.norm()).item()


def exported(rank, folder):
    """Whether full state dict and saved model are those of a plain GPT-2 after the same steps."""
    model = sharded(converted(gpt2, "nvfp4"))
    train(model, adamw(model), rank, range(STEPS))
    state = full(model)  # on rank 0
    shapes = {name: value.shape for name, value in state.items()}
    if rank == 0:
        model.save_pretrained(folder / "hf", state_dict=state)
    dist.barrier()
    read = GPT2LMHeadModel.from_pretrained(folder / "hf")
    again = sharded(converted(gpt2, "nvfp4"))
    set_model_state_dict(again, read.state_dict(), options=StateDictOptions(full_state_dict=True))
    losses = []
    for each in (model, again):
        each.eval()
        with torch.no_grad():
            losses.append(each(input_ids=ids(9, 0), labels=ids(9, 0)).loss.item())
    mlb.convert(read, "nvfp4", seed=7)
    read.eval()
    with torch.no_grad():
        losses.append(read(input_ids=ids(9, 0), labels=ids(9, 0)).loss.item())
    are_shapes_equal = rank > 0 or shapes == {
        name: value.shape for name, value in gpt2().state_dict().items()
    }
    return {"losses": losses, "are_shapes_equal": are_shapes_equal}


def resumed(rank, folder, recipe):
    """Losses after a checkpoint of torch's, and those of a model that has loaded it."""
    model = sharded(converted(gpt2, recipe))
    optimizer = adamw(model)
    train(model, optimizer, rank, range(STEPS))
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "rounding": mlb.random_stream(model).state_dict()}
    dcp.save(saved, checkpoint_id=folder / f"dcp-{recipe}")
    expected = train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    other = sharded(converted(gpt2, recipe))
    optimizer = adamw(other)
    weights, moments = get_state_dict(other, optimizer)
    state = {"model": weights, "optimizer": moments, "rounding": mlb.random_stream(other).state_dict()}
    dcp.load(state, checkpoint_id=folder / f"dcp-{recipe}")
    set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    mlb.random_stream(other).load_state_dict(state["rounding"])
    return {"expected": expected, "found": train(other, optimizer, rank, range(STEPS, 2 * STEPS))}


def trained(rank):
    """Under a policy of bf16: losses of some steps on one batch, and the number of products."""
    model = sharded(converted(gpt2, "nvfp4"), mp_policy=BF16)
    optimizer = adamw(model)
    mlb.check_training(model, optimizer=optimizer)
    losses = [train(model, optimizer, rank, [0])[0] for _ in range(8)]
    products = mlb.product_counts(model)
    return {"losses": losses, "products": {name: sum(counts.values()) for name, counts in products.items()}}


def accumulated(rank):
    """Gradients of two micro-batches that differ from those without checkpointing, reduced once."""
    gradients = []
    for is_checkpointed in (False, True):
        model = converted(gpt2, "nvfp4")
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        sharded(model)
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            backward(model, step, rank)
        gradients.append({name: each.grad.full_tensor() for name, each in model.named_parameters()})
    plain, checkpointed = gradients
    return [name for name, each in plain.items() if not torch.equal(each, checkpointed[name])]


def message(action):
    try:
        action()
    except mlb.UserError as error:
        return str(error)
    return None


def evaluated(model):
    """Afterwards FSDP has whole weights in the root module."""
    model.eval()
    with torch.no_grad():
        model(input_ids=ids(0, 0))
    return model.train()


def refused(*, is_evaluated):
    """What each call says."""
    later = evaluated if is_evaluated else (lambda model: model)
    plain, model, split = later(sharded(gpt2())), converted(gpt2, "nvfp4"), converted(gpt2, SPLIT)
    early, early_of_ours = adamw(model), mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(lr=LR))
    later(sharded(model))
    later(sharded(split))
    return {
        "convert": message(lambda: mlb.convert(plain, "nvfp4")),
        "initialize": message(lambda: mlb.initialize(model=plain, config={})),
        "pipeline": message(lambda: mlb.pipeline_module(plain, num_stages=1)),
        "restore": message(lambda: mlb.restore(model)),
        "optimizer": message(lambda: mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(lr=LR))),
        "local_ddp": message(lambda: mlb.LocalDDP(model)),
        "regularizer": message(lambda: mlb.DualRangeRegularizer(mlb.bit_layers(model), REGULARIZER)),
        "keep_fp32": message(lambda: mlb.keep_fp32(model)),
        "cache": message(lambda: mlb.cache_weights(model)),
        "plain_state": message(lambda: plain_state_dict(model)),
        "split": message(lambda: mlb.split_weights(split, adamw(split))),
        "split_in_training": message(lambda: mlb.check_training(split)),
        "early_optimizer": message(lambda: mlb.check_training(model, optimizer=early)),
        "early_optimizer_of_ours": message(lambda: mlb.check_training(model, optimizer=early_of_ours)),
    }


def refused_without_a_model():
    """Calls that see layers or parameters only."""
    model = converted(gpt2, "nvfp4")
    regularizer = mlb.DualRangeRegularizer(mlb.bit_layers(model), REGULARIZER)
    layer, x = sharded(model).transformer.h[0].mlp.c_fc, torch.ones(1, 32)
    return {
        "regularizer": message(regularizer.add_gradients),
        "layer": message(lambda: layer(x)),
        "optimizer": message(lambda: mlb.FP32Optimizer(adamw(model), clip_grad=1.0)),
    }


def checked_after_an_evaluation():
    """What `check_training` says of an optimizer with the shards, and of one with gathered weights."""
    model = sharded(converted(gpt2, "nvfp4"))
    right = adamw(model)
    wrong = adamw(evaluated(model))
    return [message(partial(mlb.check_training, model, optimizer=each)) for each in (right, wrong)]


def main():
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(os.environ["RESULTS"])
    steps = {recipe: first_step(gpt2, recipe, rank) for recipe in RECIPES}
    steps["llama"] = first_step(llama, "nvfp4-attention-fp8", rank)
    steps["bf16"] = first_step(gpt2, "nvfp4", rank, mp_policy=BF16)
    steps["llama, bf16"] = first_step(llama, "nvfp4", rank, mp_policy=BF16)
    result = {
        "steps": steps,
        "other_numbers": other_numbers(rank),
        "exported": exported(rank, folder),
        "resumed": {recipe: resumed(rank, folder, recipe) for recipe in ("nvfp4", "metis-qb")},
        "trained": trained(rank),
        "accumulated": accumulated(rank),
        "refused": [refused(is_evaluated=False), refused(is_evaluated=True)],
        "refused_without_a_model": refused_without_a_model(),
        "checked": checked_after_an_evaluation(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
