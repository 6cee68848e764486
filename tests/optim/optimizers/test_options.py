from dataclasses import MISSING, fields

import pytest
import torch

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.optimizers.megatron import OptimizerConfig
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.optimizers.options import StepOptions, options_in
from megalowbit.optim.timers import StepTimers

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


def test_only_clipping_has_to_be_given():
    assert VALUES.keys() == {field.name for field in fields(StepOptions)}  # the tests below leave none out
    required = {field.name for field in fields(StepOptions) if field.default is MISSING}
    assert required == {"clip_grad"}


def test_options_are_read_from_a_configuration_under_the_same_names():
    config = OptimizerConfig(lr=1.0, clip_grad=0.5, log_num_zeros_in_grad=True)
    expected = {"clip_grad": 0.5, "log_num_zeros_in_grad": True, "params_have_main_grad": True}
    assert options_in(config) == expected
    settings = EngineSettings(gradient_norm="sum_of_norms")
    assert options_in(settings) == {"gradient_norm": "sum_of_norms", "log_num_zeros_in_grad": False}


@pytest.mark.parametrize("cls", [Float16OptimizerWithFloat16Params, FP32Optimizer])
@pytest.mark.parametrize("name", VALUES)
def test_both_optimizers_take_every_option(cls, name):
    optimizer = build(cls, {"clip_grad": 0.0, name: VALUES[name]})
    # the first is used when it is built, not kept; of the other, None means all ranks there are
    if name not in ("named_parameters", "training_group"):
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
