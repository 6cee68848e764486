"""Four ranks whose controllers pool their statistics and make the same decisions; see test_speculation.py.

Argument: `quick` for representative engines and all that needs none, `rest` for the other engines.
"""

import dataclasses
import sys

import torch
import torch.distributed as dist
from tensor_parallel_cases import config_of
from tiny_training import make, rank_and_size, report

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.speculation.controller import PrecisionController

STEPS, WIDE, ROWS = 7, 48, 64
SETTINGS = {
    "candidates": ["int8", "fp8", "bf16"], "threshold_db": {"int8": 32, "fp8": 20}, "every": 2,
    "lookahead": 4, "verify_every": 2, "verify_size": 16, "estimator": {"sample": 1 << 20},
    "use_alignment": False,
}  # fmt: skip


POOLED = {**SETTINGS, "threshold_db": {"int8": 27, "fp8": 20}, "verify_every": 0}


def mlp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDE, 2 * WIDE), torch.nn.GELU(), torch.nn.Linear(2 * WIDE, WIDE)
    )
    mlb.convert(model, "fp8", seed=1)
    return model


def rows_of(step, rank):
    return torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(16 * step + rank))


def spoiled(x, step, kind, is_last):
    """One rank's data from the third check on: an element a hundred times as large, or a NaN."""
    if step >= 4 and is_last:
        x[3, 5] = {"jump": 100.0, "nan": torch.nan, "none": x[3, 5].item()}[kind]
    return x


def reports_of(controller, model, steps, data):
    """Reports of steps without an optimizer, so that weights stay the same on all ranks."""
    seen = []
    for step in steps:
        controller.begin_step()
        model.zero_grad()
        model(data(step)).square().sum().backward()
        found = controller.end_step()
        if found is not None:
            seen.append(dataclasses.asdict(found))
    return seen


def pooled(kind, rank, size):
    model = mlp()
    controller = PrecisionController(model, POOLED)
    own = lambda step: spoiled(rows_of(step, rank), step, kind, rank == size - 1)  # noqa: E731
    return reports_of(controller, model, range(STEPS), own)


def one_process(kind, size):
    """The same with the data of all ranks, in a group of one."""
    alone = [dist.new_group([each]) for each in range(size)][dist.get_rank()]
    model = mlp()
    controller = PrecisionController(model, POOLED, group=alone)
    own = lambda step, rank: spoiled(rows_of(step, rank), step, kind, rank == size - 1)  # noqa: E731
    whole = lambda step: torch.cat([own(step, rank) for rank in range(size)])  # noqa: E731
    return reports_of(controller, model, range(STEPS), whole)


def refusals(rank):
    """What only one rank does differently, and all hear of."""
    found = {}
    model = mlp()
    try:
        PrecisionController(model, {**SETTINGS, "cooldown": 100 + (rank == 1)})
    except UserError as error:
        found["settings"] = str(error)
    try:
        PrecisionController(model, {**SETTINGS, "cooldown": int(rank != 1)})
    except UserError as error:
        found["invalid"] = str(error)
    if rank == 1:
        mlb.restore(model)
        mlb.convert(model, "metis-nvfp4")
    try:
        PrecisionController(model, SETTINGS)
    except UserError as error:
        found["recipe"] = str(error)
    model = mlp()
    controller = PrecisionController(model, SETTINGS)
    state = controller.state_dict()
    if rank == 1:
        state["layers"]["0"]["output"]["precision"] = "fp8"
    controller.load_state_dict(state)
    try:
        reports_of(controller, model, range(1), lambda step: rows_of(step, rank))
    except RuntimeError as error:
        found["decisions"] = str(error)
    return found


def gpt2():
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()


def tokens(step, micro_batch, data_rank):
    generator = torch.Generator().manual_seed((step * 8 + micro_batch) * 8 + data_rank)
    ids = torch.randint(0, 128, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def trained(*, stage=0, tensor_size=1, num_stages=1, accumulation=2, checkpointing=None, recipe="fp8"):
    """Engines of all kinds: losses, reports, and what this rank runs with at the end."""
    case = {"recipe": recipe, "stage": stage, "accumulation": accumulation}
    model = gpt2()
    if num_stages > 1:
        model = mlb.pipeline_module(
            model, num_stages=num_stages, activation_checkpoint_interval=int(checkpointing is not None)
        )
    engine, *_ = make(model, config_of(case, tensor_size), seed=7)
    if checkpointing is not None and num_stages == 1:
        engine.module.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        engine.module.enable_input_require_grads()
    controller = PrecisionController(engine.module, SETTINGS)
    grid_rank = engine.process_grid.data_rank
    losses, reports = [], []
    for step in range(STEPS):
        batches = [tokens(step, each, grid_rank) for each in range(accumulation)]
        controller.begin_step()
        losses.append(one_step(engine, batches, is_pipeline=num_stages > 1))
        found = controller.end_step()
        if found is not None:
            reports.append(dataclasses.asdict(found))
    local = {
        name: layer.chooser.recipe(layer.layer_name, layer.recipe).name
        for name, layer in bit_layers(engine.module).items()
    }
    state = controller.state_dict()
    engine.destroy()
    return {
        "losses": losses,
        "reports": reports,
        "layers": list(controller.layers),
        "local": local,
        "totals": dataclasses.asdict(controller.totals()),
        "state": state,
    }


def one_step(engine, batches, *, is_pipeline):
    if is_pipeline:
        return engine.train_batch(iter(batches)).item()
    total = 0.0
    for each in batches:
        loss = engine(**each).loss
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total / len(batches)


CASES = {
    "data": {},
    "non-reentrant": {"checkpointing": "non-reentrant"},
    "reentrant": {"checkpointing": "reentrant"},
    "stage 3": {"stage": 3},
    "pipeline": {"num_stages": 2},
    "pipeline, recomputed": {"num_stages": 2, "checkpointing": "non-reentrant"},
    "tensor": {"tensor_size": 2},
    "tensor, stage 2": {"tensor_size": 2, "stage": 2},
}

QUICK = ("data", "pipeline", "tensor")
REST = (
    "data",
    "non-reentrant",
    "reentrant",
    "stage 3",
    "pipeline",
    "pipeline, recomputed",
    "tensor, stage 2",
)

if __name__ == "__main__":
    rank, size = rank_and_size()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {"pooled": {}, "together": {}, "engines": {}}
    is_quick = sys.argv[1] == "quick"
    if is_quick:
        for kind in ("none", "jump", "nan"):
            result["pooled"][kind] = pooled(kind, rank, size)
            result["together"][kind] = one_process(kind, size)
        result["refusals"] = refusals(rank)
    for name in QUICK if is_quick else REST:
        result["engines"][name] = trained(**CASES[name])
    report(result)
