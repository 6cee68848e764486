import copy

import pytest
import torch
from small_engines import config, make_engine

from megalowbit.engine.deepspeed_optimizer import DeepSpeedFloat16Optimizer, DeepSpeedFP32Optimizer
from megalowbit.engine.initialize import initialize
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler


def make(scaler=None, *, bf16=True):
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = DeepSpeedFloat16Optimizer(
        inner, clip_grad=0.0, grad_scaler=scaler, bf16=bf16, cast_parameters=True
    )
    return parameter, optimizer


@pytest.mark.parametrize("scaler", [ConstantGradScaler(8.0), DynamicGradScaler(8.0)])
def test_only_losses_are_scaled(scaler):
    parameter, optimizer = make(scaler, bf16=False)
    loss = parameter.float().sum() + 1
    assert optimizer.scale_if_loss(loss).item() == 8.0
    assert optimizer.scale_if_loss("text") == "text"
    assert torch.equal(optimizer.scale_if_loss(torch.ones(3)), torch.ones(3))
    assert optimizer.needs_scaler()
    assert optimizer.cur_scale == 8.0
    assert optimizer.dynamic_loss_scale == isinstance(scaler, DynamicGradScaler)


def test_without_a_scaler_the_loss_is_unchanged():
    parameter, optimizer = make()
    loss = parameter.float().sum()
    assert optimizer.scale_if_loss(loss) is loss
    assert not optimizer.needs_scaler()


def test_the_gradients_to_reduce_are_the_gradient_buffer():
    parameter, optimizer = make()
    (flat,), experts = optimizer.get_grads_for_reduction()
    flat.fill_(2.0)
    assert experts == {}
    assert parameter.main_grad.tolist() == [[2, 2], [2, 2]]
    empty = DeepSpeedFP32Optimizer(torch.optim.SGD([{"params": []}]), clip_grad=0.0)
    assert empty.get_grads_for_reduction() == ([], {})


def test_overflow_and_grad_norm_report_the_last_step():
    parameter, optimizer = make()
    parameter.main_grad.fill_(1.0)
    optimizer.step()
    assert (optimizer.overflow, optimizer._global_grad_norm) == (False, 2.0)
    parameter.main_grad.fill_(torch.nan)
    optimizer.step()
    assert (optimizer.overflow, optimizer._global_grad_norm) == (True, None)


def test_refresh_takes_weights_that_were_loaded_into_the_model():
    parameter, optimizer = make()
    parameter.data.fill_(3.0)
    optimizer.refresh_fp32_params()
    assert (optimizer.fp32_from_float16_groups[0][0] == 3).all()


def test_after_destroy_gradients_accumulate_in_grad_again():
    parameter, optimizer = make()
    optimizer.destroy()
    parameter.float().sum().backward()
    assert parameter.grad.tolist() == [[1, 1], [1, 1]]


def test_the_other_arguments_of_deepspeeds_load_are_accepted():
    parameter, optimizer = make()
    parameter.main_grad.fill_(1.0)
    optimizer.step()
    other, fresh = make()
    fresh.load_state_dict(optimizer.state_dict(), load_optimizer_states=False, load_from_fp32_weights=True)
    assert torch.equal(other, parameter)


@pytest.mark.parametrize("stage", [0, 2])
def test_layers_add_to_the_fp32_sums_of_stage_0_only(stage, monkeypatch):
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", "fp32")  # GEMMs that can add to fp32
    engine = make_engine(stage, recipe="nvfp4", micro_batches=2)
    weight = engine.module[0].weight
    before = weight.detach().clone()
    for seed in range(2):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        engine.backward(engine(x).float().square().mean())
        if stage == 0:
            assert weight.grad.data_ptr() == weight.main_grad.data_ptr()
            assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
        else:
            assert not hasattr(weight, "main_grad")
        assert torch.equal(weight, before)
        engine.step()
    assert not torch.equal(weight, before)
    assert weight.grad is None


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_after_destroy_no_factor_and_no_optimizer_is_left_in_the_model():
    net = Blocks()
    plain = copy.deepcopy(net).to(torch.bfloat16)
    settings = config(megalowbit={"precision": "bf16", "layer_scaling": {"enabled": True}})
    engine = initialize(model=net, config=settings)[0]
    state = engine.optimizer.layer_scaling.state_dict()
    for block in state["blocks"].values():
        block["octaves"] = 6
    engine.optimizer.layer_scaling.load_state_dict(state)
    engine.destroy()
    for model in (net, plain):
        model.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
