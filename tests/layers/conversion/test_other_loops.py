"""Checks of a converted model in a loop of others; in stock engines: tests/engine/test_stock_engine.py."""

import json
import os
from types import SimpleNamespace

import accelerate.state  # noqa: F401  # a test replaces its functions
import pytest
import torch
from checked_loops import net, refusal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.conversion.other_loops import _stream_problems, check_training, find_engine


def test_a_converted_model_with_a_plain_optimizer_passes():
    model = net()
    check_training(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    check_training(
        model, config={"megalowbit": {"recipe": "nvfp4", "precision": "bf16", "run": {"steps": 3}}}
    )
    check_training(model, config={"megalowbit": {"late_switch": None, "autocast": False}})
    check_training(model, config={"train_batch_size": 1})


def test_a_model_without_low_bit_layers_is_rejected_unless_its_recipe_does_not_quantise():
    assert "Sequential has no low-bit layers" in refusal(net(None))
    assert "has no low-bit layers" in refusal(net(None), config={"megalowbit": {"recipe": "nvfp4"}})
    check_training(net(None), config={"megalowbit": {"recipe": "bf16"}})


def test_layers_of_another_recipe_are_refused():
    line = refusal(net("mxfp4"), config={"megalowbit": {"recipe": "nvfp4"}})
    assert line.startswith("megalowbit.recipe is 'nvfp4', and layer 0 has 'mxfp4'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grad_scaler", {"type": "dynamic"}), ("autocast", True), ("fp32_norms", True),
        ("late_switch", {"at": 0.9}), ("layer_scaling", {"enabled": True}), ("gradient_norm", "sum_of_norms"),
        ("watchdog", {"timeout": 9}), ("regularizer", {"strength": 1e-6}), ("rescipe", "nvfp4"),
    ],
)  # fmt: skip
def test_settings_that_another_loop_does_not_apply_are_rejected(key, value):
    config = {"megalowbit": {"recipe": "nvfp4", key: value}}
    line = refusal(net(), config=config)
    assert line.startswith(f"megalowbit.{key} = ")
    assert "megalowbit.initialize" in line


def test_all_mistakes_are_reported_in_one_error():
    block = {"recipe": "mxfp4", "fp32_norms": True, "late_switch": {"at": 1}}
    assert refusal(net(), config={"megalowbit": block}).count("; ") == 2


def test_a_configuration_is_read_from_its_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"megalowbit": {"recipe": "mxfp4"}}))
    assert "megalowbit.recipe is 'mxfp4'" in refusal(net(), config=path)
    path.write_text(json.dumps({"megalowbit": "mxfp4"}))
    assert "must be an object" in refusal(net(), config=str(path))


@pytest.mark.parametrize(
    ("mixed_precision", "dtype", "message"),
    [
        ("bf16", torch.float16, "the weights are float16, and mixed precision bf16 would"),
        ("fp16", torch.bfloat16, "the weights are bfloat16, and mixed precision fp16 would"),
        ("fp16", torch.float16, "torch's GradScaler cannot unscale"),
        ("bf16", torch.bfloat16, None),
        ("bf16", torch.float32, None),
        ("no", torch.float16, None),
    ],
)
def test_autocast_must_not_override_half_precision(monkeypatch, mixed_precision, dtype, message):
    state = SimpleNamespace(mixed_precision=mixed_precision)
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: True)
    monkeypatch.setattr("accelerate.state.AcceleratorState", lambda: state)
    model = net().to(dtype)
    if message is None:
        check_training(model)
    else:
        assert message in refusal(model)


def test_the_random_stream_of_another_rank_is_rejected(monkeypatch):
    # another test may have left a process group
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    line = refusal(net(rank=3))
    assert "random stream belongs to rank 3 and this is rank 0" in line
    assert "treats each process as the only one" in line
    assert "docs/other-loops.md" in line
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    assert refusal(net(rank=3)).endswith("random numbers: leave rank= out of megalowbit.convert")


def test_the_stream_may_have_the_data_parallel_rank_of_an_engine(monkeypatch):
    monkeypatch.setattr("megalowbit.layers.conversion.other_loops.own_rank", lambda: 5)
    layers = bit_layers(net(rank=2))
    engine = SimpleNamespace(mpu=SimpleNamespace(get_data_parallel_rank=lambda: 2))
    assert _stream_problems(layers, engine) == []
    assert len(_stream_problems(layers, SimpleNamespace(mpu=None))) == 1
    assert len(_stream_problems(bit_layers(net(rank=3)), engine)) == 1


def test_a_configuration_that_is_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "ds.json")
    assert "is a FIFO" in refusal(net(), config=tmp_path / "ds.json")


def test_dataparallel_copies_on_many_devices_are_rejected():
    assert "nn.DataParallel" in refusal(nn.DataParallel(net()))


def test_the_model_inside_a_compiled_one_is_checked():
    check_training(torch.compile(net()))
    assert "has no low-bit layers" in refusal(torch.compile(net(None)))


def test_without_an_engine_the_hook_does_nothing_and_other_hooks_are_not_engines(caplog):
    model = net()
    model.register_forward_pre_hook(lambda module, inputs: None)
    assert find_engine(model) is None
    model(torch.ones(2, 16)).sum().backward()
    assert mlb.random_stream(model).step == 1
    assert not caplog.records


def test_replacing_all_low_bit_layers_is_reported_at_the_next_training_forward():
    model = net()
    model[0], model[1] = nn.Linear(16, 16), nn.Linear(16, 16)
    model.eval()
    model(torch.ones(2, 16))
    with pytest.raises(UserError, match=r"2 of 2 low-bit layers were replaced .*\(0 is Linear\)"):
        model.train()(torch.ones(2, 16))


class Adapter(nn.Module):
    """As adapters of low rank do: the layer stays, and something is added to its output."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.added = base_layer, nn.Linear(16, 16)

    def forward(self, input):
        return self.base_layer(input) + self.added(input)


@pytest.mark.parametrize("wrapper", [Adapter, checkpoint_wrapper])
def test_layers_inside_wrappers_do_not_count_as_replaced(wrapper):
    model = net()
    model[0], model[1] = wrapper(model[0]), wrapper(model[1])
    model(torch.ones(2, 16)).sum().backward()
    check_training(model, config={"megalowbit": {"recipe": "nvfp4"}})


def test_a_single_layer_restored_by_hand_and_a_restored_model_pass():
    model = net()
    model[1] = nn.Linear(16, 16)
    model(torch.ones(2, 16))
    mlb.restore(model)
    model(torch.ones(2, 16))
