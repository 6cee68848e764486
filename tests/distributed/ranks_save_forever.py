"""Save as fast as possible until killed, or look. Arguments: checkpoint folder, `save` or `look`."""

import sys

import torch
from tiny_training import TinyModel, config, make, report

from megalowbit.engine.checkpoint import CheckpointStore

store = CheckpointStore(sys.argv[1], keep=2)
engine, *_ = make(TinyModel(vocabulary=40_000), config("bf16"))
path = store.latest()
step = store.load(engine, path)["step"] if path is not None else 0
masters = engine.optimizer.fp32_from_float16_groups[0]
values = {float(value) for master in masters for value in master.unique()}
if path is not None and values != {float(step)}:
    sys.exit(f"checkpoint {path} holds {values}")
while sys.argv[2] == "save":
    step += 1
    with torch.no_grad():
        for master in masters:
            master.fill_(step)  # every weight says which save it is of
    store.save(engine, step, {"step": step})
report({"step": step})
