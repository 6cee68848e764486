"""Writes checkpoints in DeepSpeed's layouts from Hugging Face models, without DeepSpeed.

It shares nothing with the importer. `ranks_deepspeed` makes real ones, which takes a minute; the layouts here
are theirs: one group of parameters, and only what readers of weights need.
"""

import argparse
from collections import OrderedDict

import torch

HALF = torch.bfloat16


def write(folder, model, *, stage=2, ranks=2):
    """Save a model as ZeRO 0, 2 or 3 does; `folder/global_step3/…`, the file latest and config.json."""
    step = folder / "global_step3"
    step.mkdir(parents=True)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    header = {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, value.shape) for name, value in weights.items())],
        "frozen_param_shapes": {},
        "shared_params": {},
        "frozen_param_fragments": {},
        "global_steps": 3,
        "dp_world_size": ranks,
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
        "module": OrderedDict((name, value.to(HALF)) for name, value in weights.items()),
    }
    if stage == 0:
        header["optimizer"] = {"fp32_groups": [[value.clone() for value in weights.values()]]}
    if stage == 3:
        header["module"] = {name: torch.empty(0, dtype=HALF) for name in weights}
    for rank in range(ranks if stage == 3 else 1):
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(header, step / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(ranks if stage else 0):
        state = shard(weights, stage, rank, ranks)
        torch.save(
            {"optimizer_state_dict": state, "ds_version": "0.19.8"},
            step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    (folder / "latest").write_text("global_step3")
    model.config.save_pretrained(folder)
    return folder


def shard(weights, stage, rank, ranks):
    """The optimizer's state on one rank."""
    values = [value.flatten() for value in weights.values()]
    if stage == 3:
        flat = torch.cat([part_of(value, rank, ranks) for value in values])
    else:
        flat = part_of(torch.cat(values), rank, ranks)
    inner = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(flat)}},
        "param_groups": [{"lr": 0.01, "params": [0]}],
    }
    state = {"zero_stage": stage, "loss_scaler": argparse.Namespace(cur_scale=1.0), "overflow": False}
    if stage == 3:
        return state | {"partition_count": ranks, "optimizer_state_dict": inner, "fp32_flat_groups": [flat]}
    return state | {
        "partition_count": [ranks],
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": [flat],
        "param_alignment_paddings": [[0] * len(values)],
    }


def part_of(flat, rank, ranks):
    """A rank's part of a flat tensor, with zeros at the end of the last one."""
    size = -(-len(flat) // ranks)
    part = flat[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - len(part))])


def write_universal(folder, model):
    """Save a model as `ds_to_universal.py` does, with copies of the files of ZeRO 2."""
    write(folder, model)
    for file in (folder / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    for name, value in model.named_parameters():
        place = folder / "global_step3" / "zero" / name
        place.mkdir(parents=True)
        torch.save({"param": value.detach().clone(), "cat_dim": 0}, place / "fp32.pt")
    (folder / "latest").rename(folder / "latest_universal")
    return folder
