"""Two ranks start models whose weights arrive one by one; see test_start_weights.py.

Argument: `quick` or `rest`. Tensor parallelism comes last: DeepSpeed keeps its groups for the process.
"""

import json
import os
import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param
from tiny_models import tiny_config, tiny_model
from tiny_training import rank_and_size, report

from megalowbit.distributed.agreement import agree
from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.full_weights import full_state_dict
from megalowbit.engine.pipeline.setup import gather_weights, pipeline_module
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.model import save_hf
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.start.weights import StartWeights, start_model

SEED = 3
ROWS = 50
SIZES = {"vocab_size": ROWS, "hidden_size": 64, "num_layers": 3}
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "3 persistent": {"stage": 3},
    "2 offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3 offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
# layout → stage, and what is added to the configuration
LAYOUTS = {
    **{stage: (stage, {}) for stage in STAGES},
    "pipeline": ("0", {"pipeline": {"stages": 2}}),
    "pipeline 1": ("1", {"pipeline": {"stages": 2}}),
    "tensor": ("0", {"tensor_parallel": {"autotp_size": 2}}),
    "tensor 1": ("1", {"tensor_parallel": {"autotp_size": 2}}),
    "tensor 3": ("3", {"tensor_parallel": {"autotp_size": 2}}),
}
QUICK = ("0", "2", "3", "pipeline", "tensor")
rank, world_size = rank_and_size()
folder = Path(os.environ["RESULTS"])


def sources():
    """Name → settings of a model; rank 0 writes their files."""

    def write():
        for kind in ("gpt2", "llama"):
            is_tied = kind == "gpt2"
            config = tiny_config(kind, **SIZES, tie_word_embeddings=is_tied)
            (folder / f"{kind}.json").write_text(json.dumps(config.to_dict()))
            model = tiny_model(kind, **SIZES, tie_word_embeddings=is_tied)
            model.save_pretrained(folder / kind, max_shard_size="40KB")

    agree(write)
    return {
        "random gpt2, tied and padded": ModelSettings(
            config=folder / "gpt2.json", pad_vocab_to_multiple_of=64
        ),
        "random llama": ModelSettings(config=folder / "llama.json"),
        "folder of gpt2": ModelSettings(checkpoint=folder / "gpt2"),
        "folder of llama, padded": ModelSettings(checkpoint=folder / "llama", pad_vocab_to_multiple_of=64),
    }


def configuration(layout, precision):
    stage, more = LAYOUTS[layout]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": STAGES[stage],
        **more,
        "megalowbit": {"precision": precision, "recipe": "fp8"},
    }


def started(settings, layout, precision="bf16", changed=lambda weights: weights, **more):
    """The engine of a model that begins without weights."""
    model, weights = start_model(settings, seed=SEED, **more)
    if "pipeline" in layout:
        model = pipeline_module(model, num_stages=2)
    config = configuration(layout, precision)
    engine, *_ = initialize(model=model, config=config, weights=changed(weights))
    assert not any(parameter.is_meta for parameter in engine.module.parameters())
    return engine


def master(engine, parameter):
    """The fp32 master of a parameter or shard, in full; collective."""
    if engine.zero_optimization_stage():
        return safe_get_full_fp32_param(parameter)
    return engine.optimizer.master_of(parameter)


def own_part(module, name, full):
    """What this rank has of a weight of the plain model."""
    layer = module.get_submodule(name.rpartition(".")[0])
    if getattr(layer, "is_transposed", False) and name.endswith("weight"):
        full = full.t()
    sharding = getattr(module.get_parameter(name), "sharding", None)
    if sharding is None:
        return full
    return sharding.shard(full, layer.tensor_group.rank, layer.tensor_group.size)


def whole_weights(engine):
    """The weights of the plain model in the precision of the run; on rank 0."""
    if engine.process_grid.pipeline_size > 1:
        return gather_weights(engine.module) or {}
    return full_state_dict(engine)


def differences(engine, settings):
    """What differs from the model that is built in one process: masters, weights, an export; collective."""
    plain = build_model(settings, seed=SEED)
    values = plain.state_dict()
    wrong = []
    for name, parameter in engine.module.named_parameters():
        expected, found = own_part(engine.module, name, values[name]), master(engine, parameter)
        if not torch.equal(found.view_as(expected), expected):
            wrong.append(f"master of {name}")
    found = whole_weights(engine)
    if rank == 0:
        lacking = values.keys() - found.keys()
        assert lacking <= {"lm_head.weight"}  # tied, in a pipeline
        wrong += [name for name in found if not torch.equal(found[name], values[name].bfloat16())]
        wrong += [] if "lm_head.weight" in lacking else exported(engine, found, values)
    return wrong


def exported(engine, found, values):
    """What differs in the folder that `save_hf` writes, which has no padding."""
    place = folder / f"saved-{len(list(folder.glob('saved-*')))}"
    save_hf(engine.module, place, whole=found)
    saved = build_model(ModelSettings(checkpoint=place), seed=0).state_dict()
    return [
        f"saved {name}"
        for name, value in saved.items()
        if not torch.equal(value, values[name].bfloat16().float()[: len(value)])
    ]


class Failing(dict):
    """Weights of which some cannot be read."""

    def __getitem__(self, name):
        if "layers.1." in name:
            raise UserError(f"weight {name} is damaged: use another folder")
        return super().__getitem__(name).detach()


def error_of(layout, settings, opened):
    """The error of a start whose weights fail on the rank that reads."""
    try:
        started(settings, layout, changed=lambda weights: StartWeights(weights.shapes, opened))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def error_where_ranks_differ(settings):
    """The error where rank 1 has built its model with weights and passes none."""
    model, weights = (build_model(settings, seed=SEED), None) if rank else start_model(settings, seed=SEED)
    try:
        initialize(model=model, config=configuration("1", "bf16"), weights=weights)
    except UserError as error:
        return str(error)
    return "none"


def unopened():
    raise UserError("the folder is gone: bring it back")


def main():
    start_process_group()
    is_quick = sys.argv[1] == "quick"
    seen = {}
    found = sources()
    llama = found["random llama"]
    for layout in (name for name in LAYOUTS if (name in QUICK) == is_quick or name == "0"):
        kept = list(found) if layout in QUICK else ["random gpt2, tied and padded", "folder of llama, padded"]
        seen[layout] = {name: differences(started(found[name], layout), found[name]) for name in kept}
    seen["zeros"] = [
        float(parameter.detach().abs().sum())
        for parameter in started(llama, "0", reads_weights=False).module.parameters()
    ]
    values = dict(build_model(llama, seed=SEED).named_parameters())
    seen["errors"] = {
        f"{name} {stage}": error_of(stage, llama, opened)
        for stage in ("0", "3")
        for name, opened in {
            "gone": unopened,
            "damaged": lambda: Failing(values),
            "defect": lambda: dict.fromkeys(values),
        }.items()
    }
    seen["errors"]["one rank has none"] = error_where_ranks_differ(llama)
    report(seen)


main()
