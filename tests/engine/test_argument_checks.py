import pytest
import torch

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.engine.argument_checks import check_arguments
from megalowbit.errors import UserError


def check(model, *, precision="bf16", optimizer=None, model_parameters=None, lr_scheduler=None):
    settings = EngineSettings.model_validate({"precision": precision})
    check_arguments(model, settings, optimizer, model_parameters, lr_scheduler)


def test_fp32_and_the_configured_precision_pass_and_others_are_named():
    check(torch.nn.Linear(2, 2))
    check(torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(UserError, match="parameter weight is float16 but precision is bf16"):
        check(torch.nn.Linear(2, 2).half())
    with pytest.raises(UserError, match="parameter weight is bfloat16 but precision is fp32"):
        check(torch.nn.Linear(2, 2).bfloat16(), precision="fp32")


def test_an_optimizer_has_its_own_parameters_and_a_bound_scheduler_its_own_optimizer():
    model = torch.nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check(model, optimizer=optimizer, lr_scheduler=scheduler)
    with pytest.raises(UserError, match="not both"):
        check(model, optimizer=optimizer, model_parameters=model.parameters())
    for wrong in (other, None):
        with pytest.raises(UserError, match="belongs to another optimizer"):
            check(model, optimizer=wrong, lr_scheduler=scheduler)
