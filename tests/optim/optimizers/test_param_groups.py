import copy
from types import MappingProxyType

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.optimizers.param_groups import weight_decay_groups


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


def test_matrices_decay_and_biases_and_norms_do_not():
    model = Tied()
    decayed, plain = weight_decay_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model.embedding.weight)]
    assert {id(p) for p in plain["params"]} == {
        id(model.norm.weight), id(model.norm.bias), id(model.head.bias)
    }  # fmt: skip
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_parameter_under_two_names_is_in_one_group_once():
    model = Tied()
    assert model.head.weight is model.embedding.weight
    assert sum(len(group["params"]) for group in weight_decay_groups(model, 0.1)) == 4


def test_a_two_dimensional_bias_does_not_decay():
    model = torch.nn.ParameterDict({"bias": torch.nn.Parameter(torch.zeros(2, 2))})
    assert [group["weight_decay"] for group in weight_decay_groups(model, 0.5)] == [0.0]


class Factors(torch.nn.Module):
    weight_decay_rules = MappingProxyType({"values": True, "left": False})

    def __init__(self):
        super().__init__()
        self.left = torch.nn.Parameter(torch.ones(4, 2))
        self.values = torch.nn.Parameter(torch.ones(2))
        self.right = torch.nn.Parameter(torch.ones(2, 4))


def test_rules_of_a_module_override_shapes_also_in_a_copy():
    for model in (Factors(), copy.deepcopy(torch.nn.Sequential(Factors()))[0]):
        decayed, plain = weight_decay_groups(torch.nn.Sequential(model), 0.1)
        assert [id(p) for p in decayed["params"]] == [id(model.values), id(model.right)]
        assert [id(p) for p in plain["params"]] == [id(model.left)]


def test_groups_hold_every_trainable_parameter_exactly_once():
    model = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    model.encoder.requires_grad_(False)
    grouped = [p for group in weight_decay_groups(model, 0.1) for p in group["params"]]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sorted(map(id, grouped)) == sorted(map(id, trainable))


def test_a_model_without_trainable_parameters_is_refused():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        weight_decay_groups(model, 0.1)


def test_a_condition_on_names_replaces_the_rule_of_shapes_but_not_a_modules_own():
    model = torch.nn.ModuleDict({"factors": Factors(), "plain": torch.nn.Linear(3, 3)})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    asked = []

    def condition(name, parameter):
        asked.append((name, id(parameter)))
        return name == "plain.weight"

    decayed, plain = weight_decay_groups(model, 0.1, no_weight_decay_cond=condition)
    assert {names[id(p)] for p in decayed["params"]} == {"factors.values", "factors.right", "plain.bias"}
    assert {names[id(p)] for p in plain["params"]} == {"factors.left", "plain.weight"}
    assert all(names[identity] == name for name, identity in asked)


def test_scaled_learning_rates_get_groups_of_their_own():
    model = Tied()
    groups = weight_decay_groups(
        model, 0.1, scale_lr_cond=lambda name, parameter: name.startswith("norm."), lr_mult=4.0
    )
    found = [(group["weight_decay"], group.get("lr_scale"), len(group["params"])) for group in groups]
    assert found == [(0.1, None, 1), (0.0, None, 1), (0.0, 4.0, 2)]
    with pytest.raises(UserError, match="lr_mult must be a finite number ≥ 0, not -1"):
        weight_decay_groups(model, 0.1, lr_mult=-1)


def test_chunks_of_a_model_share_their_groups():
    first, second = Tied(), torch.nn.Linear(2, 2)
    second.bias = first.norm.bias  # held by both, in a group once
    decayed, plain = weight_decay_groups([first, second], 0.1)
    assert [id(p) for p in decayed["params"]] == [id(first.embedding.weight), id(second.weight)]
    assert len(plain["params"]) == 3
