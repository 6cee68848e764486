"""Two ranks of FSDP 2 (`fully_shard`); see test_sharded_parameters.py."""

import json
import os
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
from megalowbit.engine.parameters.split import split_weights

RANKS, STEPS, LR = 2, 3, 1e-2
RECIPES = ("nvfp4", "nvfp4-first-block-fp8", "metis-seed", "quartet-2")


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


def first_step(make, recipe, rank):
    """The loss of each rank and all gradients, beside those of an unsharded model for each rank."""
    model = sharded(converted(make, recipe))
    loss = backward(model, 0, rank)
    found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    expected_loss, sums = [], dict.fromkeys(found, 0.0)
    for each_rank in range(RANKS):
        whole = converted(make, recipe, rank=each_rank)
        expected_loss.append(backward(whole, 0, each_rank))
        sums = {name: sums[name] + each.grad for name, each in whole.named_parameters()}
    errors = [
        ((found[name] - total / RANKS).norm() / (total / RANKS).norm().clamp(min=1e-12)).item()
        for name, total in sums.items()
    ]
    return {
        "loss": loss,
        "expected_loss": expected_loss[rank],
        "error": max(errors),
        "num_weights": len(errors),
    }


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


def resumed(rank, folder):
    """Losses after a checkpoint of torch's, and those of a model that has loaded it."""
    model = sharded(converted(gpt2, "nvfp4"))
    optimizer = adamw(model)
    train(model, optimizer, rank, range(STEPS))
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "rounding": mlb.random_stream(model).state_dict()}
    dcp.save(saved, checkpoint_id=folder / "dcp")
    expected = train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    other = sharded(converted(gpt2, "nvfp4"))
    optimizer = adamw(other)
    weights, moments = get_state_dict(other, optimizer)
    state = {"model": weights, "optimizer": moments, "rounding": mlb.random_stream(other).state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    mlb.random_stream(other).load_state_dict(state["rounding"])
    return {"expected": expected, "found": train(other, optimizer, rank, range(STEPS, 2 * STEPS))}


def mixed(rank):
    """Under a policy of bf16: dtype of the weights, losses of some steps on one batch, and products."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(converted(gpt2, "nvfp4"), mp_policy=policy)
    optimizer = adamw(model)
    mlb.check_training(model, optimizer=optimizer)
    losses = [train(model, optimizer, rank, [0])[0] for _ in range(8)]
    weight = model.transformer.h[0].mlp.c_fc.weight
    return {"dtype": str(weight.dtype), "losses": losses, "products": mlb.product_counts(model)}


def message(action):
    try:
        action()
    except mlb.UserError as error:
        return str(error)
    return None


def refused():
    plain, model = sharded(gpt2()), converted(gpt2, "nvfp4")
    early = adamw(model)
    sharded(model)
    regularizer = mlb.DualRangeRegularizer(mlb.bit_layers(model), mlb.RegularizerSettings(strength=1e-3))
    return {
        "convert": message(lambda: mlb.convert(plain, "nvfp4")),
        "restore": message(lambda: mlb.restore(model)),
        "optimizer": message(lambda: mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(lr=LR))),
        "local_ddp": message(lambda: mlb.LocalDDP(model)),
        "regularizer": message(regularizer.add_gradients),
        "split": message(lambda: split_weights(model, adamw(model))),
        "early_optimizer": message(lambda: mlb.check_training(model, optimizer=early)),
    }


def main():
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(os.environ["RESULTS"])
    result = {
        "gpt2": {recipe: first_step(gpt2, recipe, rank) for recipe in RECIPES},
        "llama": first_step(llama, "nvfp4-attention-fp8", rank),
        "other_numbers": other_numbers(rank),
        "exported": exported(rank, folder),
        "resumed": resumed(rank, folder),
        "mixed": mixed(rank),
        "refused": refused(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
