"""Two (or four) ranks train small models whole, then cut; see test_tensor_parallel.py.

All models are trained whole first: DeepSpeed keeps the groups of a tensor-parallel engine for the process.
"""

import copy
import sys

import torch
import torch.distributed as dist
from tensor_parallel_cases import CASES, STEPS, batch, config_of, make_model
from tiny_training import make, rank_and_size, report

from megalowbit.engine.whole_weights import whole_state_dict
from megalowbit.errors import UserError
from megalowbit.layers.surgery import bit_layers, plain_state_dict, restore

rank, world_size = rank_and_size()
names = sys.argv[2:] or list(CASES)
size = int(sys.argv[1])


def train(case, tensor_size, *, spoiled_step=None):
    settings = config_of(case, tensor_size)
    engine, optimizer, _, _ = make(make_model(case), settings)
    seen = {"losses": [], "norms": [], "is_applied": [], "initial": None}
    if case.get("checkpointing"):
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    data_rank = engine.process_grid.data_rank if tensor_size > 1 else rank // size
    for step in range(STEPS):
        hook = None
        if step == spoiled_step and rank == 1:
            weight = next(p for p in engine.module.parameters() if getattr(p, "tensor_model_parallel", False))
            hook = weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        loss = engine(**batch(step, data_rank)).loss
        engine.backward(loss)
        engine.step()
        if hook is not None:
            hook.remove()
        seen["losses"].append(loss.item())
        seen["norms"].append(optimizer.report.grad_norm)
        seen["is_applied"].append(optimizer.report.is_applied)
    seen["layers"] = len(bit_layers(engine.module))
    whole = [p for p in engine.module.parameters() if not getattr(p, "tensor_model_parallel", False)]
    if tensor_size > 1:
        group = engine.mpu.get_tensor_model_parallel_group()
        seen["do_copies_agree"] = all(agree(parameter.detach().double(), group) for parameter in whole)
    seen["regularizer"] = None if engine.regularizer is None else engine.regularizer.value.item()
    weights = whole_state_dict(engine)
    if rank == 0:
        exported = plain_state_dict(engine.module, weights)
        seen["exported"] = {name: list(value.shape) for name, value in exported.items()}
        seen["sums"] = {name: value.double().abs().sum().item() for name, value in exported.items()}
    return engine, seen


def agree(values, group):
    smallest, largest = values.clone(), values.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return torch.equal(smallest, largest)


def copies_and_restored(engine):
    """A deep copy computes the same; so does the model with plain layers put back, but for the quantising."""
    engine.module.eval()
    inputs = batch(0, 0)
    with torch.no_grad():
        before = engine.module(**inputs).loss.item()
        copied = copy.deepcopy(engine.module)(**inputs).loss.item()
        try:
            plain_state_dict(engine.module)
            refusal = None
        except UserError as error:
            refusal = str(error)
        restore(engine.module)
        restored = engine.module(**inputs).loss.item()
    kinds = {type(module).__name__ for module in engine.module.modules()}
    return {
        "before": before,
        "copied": copied,
        "restored": restored,
        "refusal": refusal,
        "kinds": sorted(kinds),
    }


def refusals():
    found = {}
    for name, changes, model_changes in (
        ("splits", {"recipe": "metis-nvfp4"}, {}),
        ("blocks", {"recipe": "mxfp4"}, {"num_key_value_heads": 2}),
        ("heads", {}, {"num_key_value_heads": 1}),
        ("mean", {"recipe": {"base": "nvfp4", "q_forward_weight": "1p58bit"}}, {}),
    ):
        case = {**CASES["llama"], **changes, "model": {**CASES["llama"].get("model", {}), **model_changes}}
        try:
            make(make_model(case), config_of(case, size))
            found[name] = None
        except UserError as error:
            found[name] = str(error)
    try:
        make(torch.nn.Sequential(torch.nn.Linear(16, 16)), config_of(CASES["llama"], size))
    except UserError as error:
        found["family"] = str(error)
    return found


result = {"whole": {}, "cut": {}}
for name in names:
    engine, result["whole"][name] = train(CASES[name], 1)
    engine.destroy()
for name in names:
    engine, result["cut"][name] = train(CASES[name], size)
    if name == "gpt2 tied":
        result["copies"] = copies_and_restored(engine)
    engine.destroy()
if "llama" in names and size == world_size:
    for stage in (0, 1, 2, 3):
        engine, result[f"spoiled {stage}"] = train({**CASES["llama"], "stage": stage}, size, spoiled_step=1)
        engine.destroy()
    result["refusals"] = refusals()
report(result)
