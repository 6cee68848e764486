"""DeepSpeed's functions for masters, moments and gradients return the same values at every ZeRO stage."""

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from deepspeed.utils.tensor_fragment import safe_update_full_grad_vectorized
from staged_engines import S, backward, every_stage_and_precision, make, masters

from megalowbit.errors import UserError


@every_stage_and_precision
def test_deepspeeds_functions_read_and_write_full_values(stage, precision):
    engine, twin = make(stage, precision), make("0", precision)
    for one in (engine, twin):
        backward(one)
    scale = S if precision == "fp16" else 1.0
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    exact = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    exact(x.double()).square().sum().backward()
    tolerance = 1e-5 if precision == "fp32" else 0.1
    for one in (engine, twin):
        for parameter, reference in zip(one.module.parameters(), exact.parameters(), strict=True):
            found = safe_get_full_grad(parameter)
            assert found.dtype == torch.float32
            torch.testing.assert_close(
                found.double(), reference.grad * scale, rtol=tolerance, atol=tolerance * scale
            )
            master = safe_get_full_fp32_param(parameter)
            assert (master.dtype, master.shape) == (torch.float32, reference.shape)
            assert torch.equal(master, reference.detach().float())
            safe_set_full_grad(parameter, torch.ones_like(found) * scale)
    for one in (engine, twin):
        one.step()
        count = sum(parameter.numel() for parameter in exact.parameters())
        assert one.get_global_grad_norm() == pytest.approx(count**0.5, rel=1e-6)
        for parameter in one.module.parameters():
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            torch.testing.assert_close(moment, torch.full_like(moment, 0.1 * 0.1 / count**0.5))
            safe_set_full_fp32_param(parameter, torch.full_like(moment, 2.0))
            safe_set_full_optimizer_state(parameter, torch.full_like(moment, 3.0), "exp_avg")
            assert torch.equal(safe_get_full_fp32_param(parameter), torch.full_like(moment, 2.0))
            assert torch.equal(
                safe_get_full_optimizer_state(parameter, "exp_avg"), torch.full_like(moment, 3.0)
            )
    for one in (engine, twin):
        backward(one)
        safe_update_full_grad_vectorized(
            list(one.module.parameters()), lambda gradient, _: torch.zeros_like(gradient)
        )
        one.step()
        assert one.get_global_grad_norm() == 0.0
    for one, two in zip(masters(engine), masters(twin), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", ["0", "1", "2", "1 offload"])
def test_deepspeeds_functions_for_local_pieces_need_stage_3(stage):
    engine = make(stage)
    backward(engine)
    parameter = next(engine.module.parameters())
    for function in (safe_get_local_grad, safe_get_local_fp32_param):
        with pytest.raises(AssertionError, match="only defined for ZeRO-3"):
            function(parameter)


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_full_gradients_are_available_only_between_backward_and_step(stage):
    engine = make(stage)
    parameter = next(engine.module.parameters())
    for _ in range(2):
        with pytest.raises(
            ValueError, match="only available immediately after backward and before engine step"
        ):
            safe_get_full_grad(parameter)
        backward(engine)
        assert safe_get_full_grad(parameter).any()
        engine.step()


def test_values_of_another_shape_or_an_unknown_name_are_rejected_at_stage_0():
    engine = make("0")
    parameter = next(engine.module.parameters())
    with pytest.raises(UserError, match=r"0\.weight has shape \(5, 6\), not \(1,\)"):
        safe_set_full_fp32_param(parameter, torch.ones(1))
    with pytest.raises(UserError, match=r"no state 'exp_avg' for 0\.weight.*after the first step"):
        safe_get_full_optimizer_state(parameter, "exp_avg")
