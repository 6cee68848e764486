"""Save as fast as possible until killed, or check. Arguments: checkpoint folder, `save` or `check`, stage."""

import sys

import torch
from tiny_training import TinyModel, config, make, report

from megalowbit.engine.checkpoints.store import CheckpointStore

stage = int(sys.argv[3])
store = CheckpointStore(sys.argv[1], keep=2)
settings = {**config("bf16"), "zero_optimization": {"stage": stage}}
engine, *_ = make(TinyModel(vocabulary=20_000), settings)


def masters():
    """All that this rank has of them."""
    if stage == 0:
        return [master for group in engine.optimizer.fp32_from_float16_groups for master in group]
    if stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return engine.optimizer.single_partition_of_fp32_groups


path = store.latest()
step = store.load(engine, path)["step"] if path is not None else 0
values = {float(value) for master in masters() for value in master.detach().unique()}
# padding keeps its zeros in checkpoints that leave it out
if path is not None and values - {0.0} != {float(step)}:
    sys.exit(f"checkpoint {path} holds {values}")
while sys.argv[2] == "save":
    step += 1
    with torch.no_grad():
        for master in masters():
            master.fill_(step)  # every weight says which save it is of
    store.save(engine, step, {"step": step})
report({"step": step})
