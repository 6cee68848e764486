"""What an engine really holds, in bytes on this rank, to compare an estimate with."""


def held_bytes(engine):
    """Of parameters, fp32 masters beside them, and moments; after a step."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    parameters = list(engine.module.parameters())
    if stage == 0:
        own = {id(parameter) for parameter in parameters}
        masters = [
            each for group in optimizer.param_groups for each in group["params"] if id(each) not in own
        ]
    elif stage < 3:
        masters = optimizer.single_partition_of_fp32_groups
    else:
        masters = optimizer.fp32_partitioned_groups_flat
    states = (optimizer if stage == 0 else optimizer.optimizer).state.values()
    return {
        "parameters": size_of(getattr(each, "ds_tensor", each) for each in parameters),
        "master_parameters": size_of(masters),
        "optimizer_moments": size_of(
            s[name] for s in states for name in ("exp_avg", "exp_avg_sq") if name in s
        ),
    }


def size_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
