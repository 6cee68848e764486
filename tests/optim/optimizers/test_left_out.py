import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.optimizers.left_out import LeftOutParameters
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer


def group_of(*is_trained, **other):
    parameters = [torch.nn.Parameter(torch.ones(index + 1), is_in) for index, is_in in enumerate(is_trained)]
    return {"params": parameters, **other}


def test_names_stay_with_their_parameters():
    group = group_of(True, False, True, param_names=["a", "b", "c"])
    LeftOutParameters().drop_from(group, 0)
    assert group["param_names"] == ["a", "c"]
    assert [each.numel() for each in group["params"]] == [1, 3]


@pytest.mark.parametrize(
    ("names", "known", "name"),
    [({}, {}, "parameter 1 of group 4"), ({"param_names": ["a", "b"]}, {}, "b"), ({}, {1: "x.b"}, r"x\.b")],
)
def test_the_error_has_the_best_name_there_is(names, known, name):
    group = group_of(True, False, **names)
    frozen = group["params"][1]
    left_out = LeftOutParameters()
    left_out.drop_from(group, 4)
    left_out.rename({id(frozen): value for value in known.values()})
    left_out.check()
    frozen.requires_grad_(True)
    with pytest.raises(UserError, match=rf"^{name} requires a gradient, but was frozen"):
        left_out.check()


def test_only_frozen_parameters_are_left_out():
    trained, frozen = group_of(True, False)["params"]
    left_out = LeftOutParameters()
    left_out.add_frozen([("a", trained), ("b", frozen)])
    left_out.check()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_optimizers_keep_the_names_of_what_they_train(precision):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    inner = torch.optim.AdamW(model.named_parameters())
    if precision == "fp32":
        optimizer = FP32Optimizer(inner, clip_grad=0.0)
    else:
        optimizer = Float16OptimizerWithFloat16Params(
            inner, grad_scaler=None, bf16=True, cast_parameters=True, clip_grad=0.0
        )
    (group,) = optimizer.param_groups
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert group["param_names"] == ["0.weight", "1.weight", "1.bias"]
    pairs = zip(group["param_names"], group["params"], strict=True)
    assert all(parameter.shape == shapes[name] for name, parameter in pairs)
    model[0].bias.requires_grad_(True)
    with pytest.raises(UserError, match=r"^0\.bias requires a gradient"):
        optimizer.step()


@pytest.mark.parametrize("make", [FP32Optimizer, Float16OptimizerWithFloat16Params])
def test_a_wrong_type_is_refused_with_its_place_among_all(make):
    group = group_of(False, True)
    group["params"].append(torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
    arguments = {} if make is FP32Optimizer else {"grad_scaler": None, "bf16": True}
    with pytest.raises(TypeError, match=r"^parameter 2 of group 0, shape"):
        make(torch.optim.SGD([group]), clip_grad=0.0, **arguments)
