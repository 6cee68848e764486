"""Parameters in place of those on the meta device, in one process; several ranks are in tests/distributed."""

import inspect
import json

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from quick_cases import every_value
from tiny_models import tiny_config
from torch import nn

from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.initial_weights import InitialWeights, check_weights, copy_value
from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.start.weights import StartWeights, start_model

CPU = torch.device("cpu")


def made(model, weights, *, stage=0, names=None, dtype=torch.float32):
    return InitialWeights(model, weights, stage=stage, dtype=dtype, device=CPU, names=names or {})


def start_weights(**values):
    return StartWeights({name: tuple(value.shape) for name, value in values.items()}, lambda: values)


def test_parameters_keep_their_attributes_hooks_and_ties():
    model = nn.ModuleDict(
        {"a": nn.Linear(3, 3, bias=False, device="meta"), "b": nn.Linear(3, 3, device="meta")}
    )
    model["b"].weight = model["a"].weight
    model["a"].weight.note = "kept"
    model["b"].bias.requires_grad_(False)
    model["a"].weight.register_hook(lambda gradient: gradient * 5)
    values = {"a.weight": torch.arange(9.0).view(3, 3), "b.bias": torch.ones(3)}
    initial = made(model, start_weights(**values))
    initial.allocate()
    initial.fill(copy_value)
    assert model["b"].weight is model["a"].weight
    assert model["a"].weight.note == "kept"
    assert not model["b"].bias.requires_grad
    assert torch.equal(model["a"].weight, values["a.weight"])
    assert torch.equal(model["b"].bias, values["b.bias"])
    model["b"](torch.ones(1, 3)).sum().backward()
    assert torch.equal(model["a"].weight.grad, torch.full((3, 3), 5.0))


LINEAR = {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        (nn.Linear(3, 3, device="meta"), LINEAR, "^weights is a dict: pass those that start_model has"),
        (nn.Linear(3, 3), start_weights(**LINEAR), "parameter weight has values already: pass those"),
        (
            nn.Linear(3, 3, device="meta"),
            start_weights(weight=torch.zeros(3, 3)),
            "^weights have no bias: pass those",
        ),
        (
            nn.Linear(3, 3, bias=False, device="meta"),
            start_weights(**LINEAR),
            "^weights have bias, which the model does not have: pass those",
        ),
        (
            nn.BatchNorm1d(3, device="meta"),
            start_weights(weight=torch.zeros(3), bias=torch.zeros(3)),
            "buffer running_mean, which they do not have, has no values: pass",
        ),
    ],
)
def test_weights_of_another_model_are_refused(model, weights, message):
    with pytest.raises(UserError, match=message):
        check_weights(model, weights)


def test_weights_of_another_shape_are_refused():
    values = {**LINEAR, "weight": torch.zeros(3, 4)}
    model = nn.Linear(3, 3, device="meta")
    check_weights(model, start_weights(**values))
    with pytest.raises(UserError, match=r"weight in shape \(3, 4\), the model in \(3, 3\)"):
        made(model, start_weights(**values)).allocate()


@pytest.mark.parametrize("values", [{"weight": torch.zeros(3, 3)}, {**LINEAR, "scale": torch.zeros(3)}])
def test_values_under_other_names_than_the_shapes_are_refused(values):
    weights = StartWeights(start_weights(**LINEAR).shapes, lambda: values)
    initial = made(nn.Linear(3, 3, device="meta"), weights)
    initial.allocate()
    with pytest.raises(UserError, match=r"shapes and values of weights differ in (bias|scale): pass those"):
        initial.fill(copy_value)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_refuses_weights_beside_those_that_the_model_has(tmp_path, stage):
    """The masters would silently be those that the model has, perhaps rounded to its precision."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    settings = ModelSettings(config=tmp_path / "config.json")
    _, weights = start_model(settings, seed=1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": "bf16", "recipe": "nvfp4"},
    }
    with pytest.raises(UserError, match=r"parameter model\.embed_tokens\.weight has values already"):
        initialize(model=build_model(settings, seed=1), config=config, weights=weights)


def test_memory_is_not_written_where_torch_computes_deterministically():
    """Otherwise the memory of a whole model would be in use at ZeRO 3."""
    size = 2**24
    model = nn.Linear(size, 1, bias=False, device="meta")
    torch.use_deterministic_algorithms(True)
    try:
        made(model, start_weights(weight=torch.empty(1, size, device="meta")), stage=3).allocate()
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not model.weight.detach()[0, :: 2**20].isnan().any()


def test_at_stage_3_an_engine_moves_buffers_only():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with made(model, start_weights(), stage=3).placed_by_engine():
        assert model.to(torch.device("meta")) is model
        assert all(buffer.is_meta for buffer in model.buffers())
        assert not any(parameter.is_meta for parameter in model.parameters())
    assert "to" not in vars(model)
    with made(model, start_weights(), stage=2).placed_by_engine():
        assert "to" not in vars(model)


def test_deepspeed_moves_a_model_at_once_and_partitions_one_parameter_at_a_time():
    """What `placed_by_engine` replaces, and what makes it possible."""
    assert "self.module.to(self.device)" in inspect.getsource(DeepSpeedEngine._configure_distributed_model)
    source = inspect.getsource(Init._convert_to_zero_parameters)
    assert "param.data = param.data.to(self.local_device)" in source


@every_value(stage=[0, 1, 3], precision=["fp32", "fp16"])
def test_an_engine_trains_a_model_that_began_without_weights(tmp_path, stage, precision):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    settings = ModelSettings(config=tmp_path / "config.json")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": precision, "recipe": "nvfp4", "grad_scaler": {"initial_scale": 256.0}},
    }
    if precision == "fp32":
        del config["megalowbit"]["grad_scaler"]
    tokens = torch.arange(32).view(2, 16) % 7
    losses = []
    for is_late in (True, False):
        model, weights = start_model(settings, seed=1)
        if not is_late:
            model, weights = build_model(settings, seed=1), None
        engine, *_ = initialize(model=model, config=config, weights=weights)
        losses.append([])
        for _ in range(3):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
