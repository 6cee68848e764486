"""Two ranks: each kind of disagreement planted on rank 1, then an agreed run; see test_run_checks.py."""

import copy
import logging
import os
import tempfile
from pathlib import Path

import torch
from tiny_training import TinyModel, config, facts, rank_and_size, report, train_step

from megalowbit.distributed.agreement import gather_bytes, share, succeed_together
from megalowbit.engine.initialize import initialize
from megalowbit.engine.process_start import start_process_group
from megalowbit.engine.run_checks.model import check_scaler
from megalowbit.engine.run_checks.ranks_agree import check_ranks_agree, code_digest
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler

RANK, WORLD = rank_and_size()
QUANTISED = {**config("bf16"), "megalowbit": {"precision": "bf16", "recipe": "nvfp4"}}


def caught(work):
    """What an error says, and whether all ranks are known to raise it; None if there is none."""
    try:
        work()
    except UserError as error:
        return [str(error), error.is_on_all_ranks]
    except (RuntimeError, OSError) as error:
        return [f"{type(error).__name__}: {error}", None]
    return None


def started(model=None, settings=None, **arguments):
    model = TinyModel() if model is None else model
    return initialize(model=model, config=settings or QUANTISED, **arguments)


def with_key(dotted, value):
    settings = copy.deepcopy(QUANTISED)
    *parents, last = dotted.split(".")
    node = settings
    for parent in parents:
        node = node.setdefault(parent, {})
    if RANK == 1:
        node[last] = value
    return settings


def renamed():
    model = TinyModel()
    if RANK == 1:
        model.trunk = model.body
        model.body = torch.nn.Identity()
    return model


def frozen():
    model = TinyModel()
    model.body[0].bias.requires_grad_(RANK == 0)
    return model


def backend():
    os.environ.pop("MEGALOWBIT_BACKEND", None)
    if RANK == 1:
        os.environ["MEGALOWBIT_BACKEND"] = "torch"
    try:
        started()
    finally:
        os.environ.pop("MEGALOWBIT_BACKEND", None)


def code():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "module.py").write_text(f"x = {RANK}\n")
        check_ranks_agree({"code of megalowbit": code_digest(Path(folder))})


def unreadable():
    path = Path(os.environ["RESULTS"]) / f"config{RANK}.json"
    path.write_text("{" if RANK == 1 else "{}")
    settings = path if RANK == 1 else QUANTISED
    started(settings=settings)


def lost_layer():
    """A layer is replaced on rank 1 while DeepSpeed builds the engine, as its own injection does."""
    model = TinyModel()

    def scheduler(optimizer):
        if RANK == 1:
            model.body[0] = torch.nn.Linear(8, 16).bfloat16()
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    started(model, lr_scheduler=scheduler)


class Unit:
    """Two data-parallel ranks."""

    def __init__(self, world, mine):
        self.get_data_parallel_group = lambda: world
        self.get_model_parallel_group = lambda: mine


def one_sided_mpu():
    groups = [torch.distributed.new_group([rank]) for rank in range(WORLD)]
    world = torch.distributed.new_group(range(WORLD))
    started(mpu=Unit(world, groups[RANK]) if RANK == 1 else None)


def broken_mpu():
    started(mpu=Unit(torch.distributed.group.WORLD, None) if RANK == 1 else None)


def other_parts():
    """Ranks with different parts of a model may differ, those with the same may not."""
    from megalowbit.distributed.process_grid import ProcessGrid

    cut = ProcessGrid(RANK, WORLD, tensor_size=2)
    parts = {"parameter w": f"float32 ({RANK + 1},)"}
    grids = (cut, None)
    return [caught(lambda g=grid: check_ranks_agree({}, of_this_part=parts, grid=g)) for grid in grids]


def fails_on_one(error):
    def work():
        if RANK == 1:
            raise error
        return "done"

    return caught(lambda: succeed_together(work))


def scaler():
    """A scaler that is not ours, on the optimizer of a run; then ours again."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    engine, *_ = started(settings=config("fp16"))
    own = engine.optimizer.grad_scaler
    assert isinstance(own, DynamicGradScaler)
    engine.optimizer.grad_scaler = DynamicLossScaler(2.0, 2.0, 1, 1.0, 1, False, False)
    said = caught(lambda: check_scaler(engine))
    engine.optimizer.grad_scaler = own
    return [said, caught(lambda: check_scaler(engine))]


def agreed():
    engine, *_ = started()
    losses = [train_step(engine, step) for step in range(2)]
    return {
        "losses": losses, **facts(engine), "layers": list(bit_layers(engine.module)),
        "grid": str(engine.process_grid), "data_rank": engine.process_grid.data_rank,
    }  # fmt: skip


def warnings_of_a_schedule():
    """What this rank logs at the start of a run whose loop has to act on a schedule itself."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megalowbit").addHandler(handler)
    settings = {**QUANTISED, "megalowbit": {**QUANTISED["megalowbit"], "late_switch": {"at": 0.9}}}
    started(settings=settings)
    logging.getLogger("megalowbit").removeHandler(handler)
    return [line for line in lines if "late_switch" in line]


start_process_group()
report(
    {
        "warnings": warnings_of_a_schedule(),
        "seed": caught(lambda: started(seed=RANK)),
        "recipe": caught(lambda: started(settings=with_key("megalowbit.recipe", "mxfp4"))),
        "precision": caught(lambda: started(settings=with_key("megalowbit.precision", "fp32"))),
        "configuration": caught(lambda: started(settings=with_key("optimizer.params.lr", 0.5))),
        "vocabulary": caught(lambda: started(TinyModel(vocabulary=10 + RANK))),
        "shapes": caught(lambda: started(TinyModel().half() if RANK else TinyModel(), config("fp16"))),
        "names": caught(lambda: started(renamed())),
        "frozen": caught(lambda: started(frozen())),
        "backend": caught(backend),
        "code": caught(code),
        "version": caught(lambda: check_ranks_agree({"version of torch": f"2.{RANK}", "seed": "0"})),
        "unreadable": caught(unreadable),
        "one_sided_mpu": caught(one_sided_mpu),
        "broken_mpu": caught(broken_mpu),
        "lost_layer": caught(lost_layer),
        "other_parts": other_parts(),
        "user_error": fails_on_one(UserError("mend it")),
        "defect": fails_on_one(OSError("disk")),
        "shared": share({"from": RANK}, 1),
        "rows": gather_bytes(b"ab" if RANK else b"abc").tolist(),
        "scaler": scaler(),
        "agreed": agreed(),
    }
)
