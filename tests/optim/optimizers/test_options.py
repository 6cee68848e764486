import inspect

import pytest
import torch

from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.optimizers.options import StepOptions
from megalowbit.optim.timers import StepTimers

NOT_SHARED = {"self", "optimizer", "grad_scaler"}
VALUES = {
    "clip_grad": 2.0,
    "log_num_zeros_in_grad": True,
    "params_have_main_grad": False,
    "model_parallel_group": None,
    "tensor_parallel_group": None,
    "training_group": None,
    "is_flag_shared": True,
    "gradient_norm": "sum_of_norms",
    "before_step": lambda scale: None,
    "named_parameters": [],
    "instruments": Instruments(),
    "timers": StepTimers(),
}


def build(cls, options):
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    more = {} if cls is FP32Optimizer else {"grad_scaler": ConstantGradScaler(1.0), "cast_parameters": True}
    return cls(inner, **more, **options)


def test_the_options_are_the_keyword_arguments_that_both_optimizers_share():
    parameters = inspect.signature(MegatronOptimizer.__init__).parameters
    assert StepOptions.__annotations__.keys() == parameters.keys() - NOT_SHARED
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in VALUES)
    assert VALUES.keys() == StepOptions.__annotations__.keys()  # the tests below leave none out


def test_only_clipping_has_to_be_given():
    parameters = inspect.signature(MegatronOptimizer.__init__).parameters
    required = {name for name in VALUES if parameters[name].default is inspect.Parameter.empty}
    assert required == {"clip_grad"}
    assert "Required" in str(StepOptions.__annotations__["clip_grad"])


@pytest.mark.parametrize("cls", [Float16OptimizerWithFloat16Params, FP32Optimizer])
@pytest.mark.parametrize("name", VALUES)
def test_both_optimizers_take_every_option(cls, name):
    optimizer = build(cls, {"clip_grad": 0.0, name: VALUES[name]})
    # the first two are used when it is built, not kept; of the last, None means all ranks there are
    if name not in ("named_parameters", "tensor_parallel_group", "training_group"):
        assert getattr(optimizer, name) == VALUES[name]


def test_the_training_group_is_all_ranks_unless_it_is_given():
    everyone = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    assert build(FP32Optimizer, {"clip_grad": 0.0}).training_group is everyone
    group = object()  # none is used before a step
    assert build(FP32Optimizer, {"clip_grad": 0.0, "training_group": group}).training_group is group


@pytest.mark.parametrize("cls", [Float16OptimizerWithFloat16Params, FP32Optimizer])
def test_an_unknown_option_is_refused(cls):
    with pytest.raises(TypeError, match="clip_gradient"):
        build(cls, {"clip_grad": 0.0, "clip_gradient": 1.0})
