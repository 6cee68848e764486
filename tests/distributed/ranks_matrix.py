"""Two ranks train cells of the matrix; see test_matrix.py.

Arguments: the tensor-parallel size, and `quick` for the representative cells or `rest` for the others.
"""

import sys

import torch
import torch.distributed as dist
from held_bytes import held_bytes
from matrix_cells import (
    BAD_PARAMETER,
    BAD_STEP,
    CELLS,
    FAMILY_CELLS,
    OFFLOADED_CELLS,
    QUICK_CELLS,
    QUICK_FAMILY_CELLS,
    QUICK_OFFLOADED_CELLS,
    STEPS,
    batch_of,
    config_of,
    key_of,
    make_model,
)
from tiny_training import make, rank_and_size, report

from megalowbit.engine.parameters.full_weights import full_state_dict

tensor_size, part = int(sys.argv[1]), sys.argv[2]
rank, world_size = rank_and_size()
data_rank, data_size = rank // tensor_size, world_size // tensor_size


def spoiled(engine, bad_rank):
    """Make one parameter's gradient infinite on one rank."""
    parameter = dict(engine.module.named_parameters())[BAD_PARAMETER]
    return parameter.register_hook(lambda gradient: gradient * (torch.inf if rank == bad_rank else 1.0))


def train(settings, bad_rank, kind="llama"):
    engine, optimizer, _, _ = make(make_model(kind), settings)
    seen = {"losses": [], "norms": [], "scales": [], "applied": []}
    for step in range(STEPS):
        loss_sum = torch.zeros((), dtype=torch.float64)
        hook = spoiled(engine, bad_rank) if step == BAD_STEP else None
        for micro_batch in range(engine.gradient_accumulation_steps()):
            loss = engine(**batch_of(step, micro_batch, data_rank)).loss
            engine.backward(loss)
            engine.step()
            loss_sum += loss.detach().double()
        if hook is not None:
            hook.remove()
        dist.all_reduce(loss_sum)
        seen["losses"].append(loss_sum.item() / engine.gradient_accumulation_steps() / world_size)
        seen["norms"].append(optimizer.report.grad_norm)
        seen["applied"].append(optimizer.report.is_applied)
        seen["scales"].append(optimizer.loss_scale)
    seen["bytes"] = held_bytes(engine)
    seen["skipped_steps"] = engine.skipped_steps
    whole = full_state_dict(engine)
    if rank == 0:
        seen["weights"] = {name: value.double().flatten().tolist() for name, value in whole.items()}
    engine.destroy()
    return seen


def is_wanted(cell, quick_cells):
    return ((tensor_size, cell) in quick_cells) == (part == "quick")


found = {}
for index, cell in enumerate(CELLS):
    if not is_wanted(cell, QUICK_CELLS):
        continue
    # over stages and precisions each kind of cell has the bad gradient on either rank
    bad_rank = (index + index // 4) % 2
    found[key_of(*cell)] = train(config_of(*cell, tensor_size=tensor_size), bad_rank)
for cell in OFFLOADED_CELLS:
    if not is_wanted(cell, QUICK_OFFLOADED_CELLS):
        continue
    stage, _, accumulation, _ = cell
    offload = ["offload_optimizer", *(["offload_param"] if stage == 3 else [])]
    found[f"offload, {key_of(*cell)}"] = train(
        config_of(*cell, tensor_size=tensor_size, offload=offload), bad_rank=(stage + accumulation) % 2
    )
for kind, cell in FAMILY_CELLS:
    if not is_wanted((kind, cell), QUICK_FAMILY_CELLS):
        continue
    found[f"{kind}, {key_of(*cell)}"] = train(config_of(*cell, tensor_size=tensor_size), cell[0] % 2, kind)
report(found)
