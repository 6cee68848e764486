import types

import pytest
import torch

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.engine.run_checks.model import check_arguments, check_layers_kept, check_scaler
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.recipe import recipe
from megalowbit.optim.loss_scale.constant import ConstantGradScaler


def model():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16, bias=False))


def test_every_layer_that_was_converted_must_still_be_low_bit():
    net = model()
    convert(net, recipe("nvfp4"))
    names = tuple(bit_layers(net))
    assert names == ("0", "1")
    check_layers_kept(net, names)
    net[1] = torch.nn.Identity()
    with pytest.raises(
        UserError, match=r"^DeepSpeed replaced 1 of 2 low-bit layers \(1 is Identity\): turn off"
    ):
        check_layers_kept(net, names)
    restore(net)
    with pytest.raises(UserError, match=r"^DeepSpeed replaced 2 of 2 low-bit layers \(0 is Linear\)"):
        check_layers_kept(net, names)


@pytest.mark.parametrize("scaler", [None, ConstantGradScaler(8.0)])
def test_megalowbit_scalers_are_accepted(scaler):
    check_scaler(types.SimpleNamespace(optimizer=types.SimpleNamespace(grad_scaler=scaler)))


@pytest.mark.parametrize("attribute", ["grad_scaler", "loss_scaler"])
def test_another_scaler_is_rejected(attribute):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    optimizer = types.SimpleNamespace(**{"grad_scaler": ConstantGradScaler(8.0), attribute: LossScaler(8.0)})
    with pytest.raises(UserError, match=r"is a deepspeed\.runtime\.fp16\.loss_scaler\.LossScaler, not"):
        check_scaler(types.SimpleNamespace(optimizer=optimizer))


def check_call(model, *, precision="bf16", optimizer=None, model_parameters=None, lr_scheduler=None):
    settings = EngineSettings.model_validate({"precision": precision})
    check_arguments(model, settings, optimizer, model_parameters, lr_scheduler)


def test_fp32_and_the_configured_precision_pass_and_others_are_rejected():
    check_call(torch.nn.Linear(2, 2))
    check_call(torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(UserError, match="parameter weight is float16 but precision is bf16"):
        check_call(torch.nn.Linear(2, 2).half())
    with pytest.raises(UserError, match="parameter weight is bfloat16 but precision is fp32"):
        check_call(torch.nn.Linear(2, 2).bfloat16(), precision="fp32")


def test_an_optimizer_excludes_model_parameters_and_a_scheduler_must_belong_to_it():
    model = torch.nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_call(model, optimizer=optimizer, lr_scheduler=scheduler)
    with pytest.raises(UserError, match="not both"):
        check_call(model, optimizer=optimizer, model_parameters=model.parameters())
    for wrong in (other, None):
        with pytest.raises(UserError, match="belongs to another optimizer"):
            check_call(model, optimizer=wrong, lr_scheduler=scheduler)
