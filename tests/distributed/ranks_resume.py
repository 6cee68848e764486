"""Train, save in the middle; or continue from there. Arguments: checkpoint folder, `whole` or `resume`."""

import random
import resource
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tiny_training import TinyModel, config, facts, make, rank_and_size, report, train_step, weights

from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.errors import UserError
from megalowbit.layers.conversion.carried_state import (
    OWN_ROLES,
    SHARED_ROLES,
    load_split_state_dict,
    split_counts,
    split_state_dict,
)
from megalowbit.layers.conversion.convert import random_stream

STEPS, SAVED = 9, 5
folder, mode = Path(sys.argv[1]), sys.argv[2]
rank, world_size = rank_and_size()
random.seed(rank)
np.random.seed(rank)


def build(seed):
    settings = config(
        "fp16",
        steps=2,
        clipping=1.0,
        scaler={"initial_scale": 1024.0, "growth_interval": 3},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 7}},
    )
    settings["megalowbit"]["recipe"] = {
        "base": "nvfp4",
        "split_input": {"rank": 2},
        "split_weight": {"rank": 2, "refresh_every": 4},
        "split_grad_output": {"rank": 4, "refresh_every": 3},
    }
    engine, *_ = make(TinyModel(dropout=0.3, seed=seed), settings)
    torch.manual_seed(100 * seed + rank)  # every rank draws its own dropout
    return engine


def own_state(engine):
    """What only this rank has: directions of the splits of its own data."""
    return {"splits": split_state_dict(engine.module, OWN_ROLES)}


def shared_state(engine):
    """What all ranks go on from."""
    module = engine.module
    return {
        "weight_splits": split_state_dict(module, SHARED_ROLES),
        "stream": random_stream(module).state_dict(),
    }


def restore_own_state(engine):
    saved = store.rank_state(engine, store.latest())
    if saved is not None:
        load_split_state_dict(engine.module, saved["splits"], OWN_ROLES)
    return saved is not None


def directions(engine, role):
    """The sum of each layer's."""
    states = split_state_dict(engine.module, [role]).values()
    return [float(state[role]["directions"].float().sum()) for state in states]


def message_of(action):
    try:
        action()
    except UserError as error:
        return str(error)
    return None


def save_on_a_full_disk(engine, store):
    """Rank 0 may write 8 KiB to a file, the other rank as much as it likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        return message_of(lambda: store.save(engine, 77, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_with_a_defect(engine, store):
    """On rank 1 the optimizer's state cannot be collected."""
    if rank == 1:
        engine.optimizer.state_dict = lambda: {}["gone"]
    try:
        store.save(engine, 78, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if rank == 1:
            del engine.optimizer.state_dict


store = CheckpointStore(folder)
result = {"errors": []}
if mode == "whole":
    engine, first = build(seed=1), 0
else:
    engine = build(seed=2)
    state = store.load(engine, store.latest())
    first = state["step"]
    load_split_state_dict(engine.module, state.pop("weight_splits"), SHARED_ROLES)
    random_stream(engine.module).load_state_dict(state.pop("stream"))
    result["client_state"] = state
    result["has_own_state"] = restore_own_state(engine)
result["steps"] = []
for step in range(first, STEPS):
    losses = train_step(engine, step)
    draws = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    result["steps"].append({"losses": losses, "draws": draws, **facts(engine)})
    if mode == "whole" and step + 1 == SAVED:
        client_state = {"step": SAVED, "note": {"nested": [1, 2]}, **shared_state(engine)}
        store.save(engine, SAVED, client_state, own_state(engine))
        result["errors"] = [
            message_of(lambda: store.save(engine, SAVED, {})),
            save_on_a_full_disk(engine, store),
            message_of(lambda: store.load(engine, folder / "step-00000004")),
        ]
        result["defect"] = save_with_a_defect(engine, store)
        dist.barrier()  # rank 0 removes what the failed save has left
    result["left"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
result["weights"] = weights(engine)
result["splits"] = split_counts(engine.module)
result["directions"] = directions(engine, "grad_output")
result["weight_directions"] = directions(engine, "weight")
report(result)
