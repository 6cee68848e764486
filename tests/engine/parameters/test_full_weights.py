import pytest
import torch

from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.full_weights import full_numel, full_state_dict, numel
from megalowbit.layers.tensor_parallel.linear import Sharding


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathered_weights_are_full_copies_on_the_host_and_tied_ones_share_memory(stage):
    model = Tied()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "megalowbit": {"precision": "bf16"},
    }
    engine, *_ = initialize(model=model, config=config)
    assert sum(map(numel, engine.module.parameters())) == 16 + 4 + 4 + 8
    found = full_state_dict(engine)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        is_buffer = name.startswith("norm.running") or name.endswith("tracked")
        wanted = expected[name] if is_buffer else expected[name].bfloat16()
        assert torch.equal(value, wanted), name
        assert value.device.type == "cpu"
    assert found["first.weight"] is found["second.weight"]
    found["first.weight"].zero_()
    assert full_state_dict(engine)["first.weight"].any()


def test_elements_of_a_full_tensor_are_counted_from_a_shard_or_a_piece_of_it():
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    assert full_numel(parameter) == 24
    parameter.sharding = Sharding(0, (6, 6))
    assert full_numel(parameter) == 48
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, torch.Size((6, 4)), 24
    parameter.data = torch.zeros(1)
    assert full_numel(parameter) == 48
