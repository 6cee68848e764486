import itertools

import pytest
import torch

from megalowbit.distributed import process_group
from megalowbit.errors import UserError
from megalowbit.optim.local_ddp import LocalDDP, is_expert
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params

# Broadcast and averages over two ranks are in tests/distributed/test_local_ddp.py.


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(5, 4)
        self.head = torch.nn.Linear(4, 2)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x, *, factor=1.0):
        return self.head(self.body(x)) * factor


def test_it_computes_what_the_module_computes():
    model = Model()
    x = torch.randn(3, 5)
    assert torch.equal(LocalDDP(model)(x, factor=2.0), model(x, factor=2.0))


def test_a_rank_without_a_process_group_is_rejected(monkeypatch):
    monkeypatch.setattr(
        process_group, "is_initialized", lambda: False
    )  # remove variables left by earlier tests
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"WORLD_SIZE is 2.*: call torch.distributed.init_process_g"):
        LocalDDP(Model())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert LocalDDP(Model())(torch.ones(1, 5)).shape == (1, 2)


def test_gradients_of_micro_batches_add_up_in_fp32():
    model, twin = LocalDDP(Model().half()), Model().double()
    twin.load_state_dict(model.state_dict())
    for step in range(3):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step)).half()
        model(x).float().square().sum().backward()
        twin(x.double()).square().sum().backward()
    model.allreduce_gradients()
    for parameter, exact in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad.data_ptr() == parameter.main_grad.data_ptr()
        assert parameter.main_grad.dtype == torch.float32
        torch.testing.assert_close(parameter.main_grad.double(), exact.grad, rtol=1e-2, atol=1e-2)


def test_main_grads_are_adjacent_in_one_buffer():
    model = LocalDDP(Model())
    views = [parameter.main_grad for parameter in model.parameters()]
    starts = sorted((view.data_ptr(), view.numel()) for view in views)
    for (start, numel), (following, _) in itertools.pairwise(starts):
        assert start + 4 * numel == following


def test_zeroing_the_buffer_clears_all_gradients():
    model = LocalDDP(Model())
    model(torch.ones(1, 5)).sum().backward()
    assert any(parameter.main_grad.any() for parameter in model.parameters())
    model.zero_grad_buffer()
    assert not any(parameter.main_grad.any() for parameter in model.parameters())


def test_a_parameter_without_gradient_keeps_zeros_after_an_optimizer_step():
    model = LocalDDP(Model().half())
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(model.parameters(), lr=1.0), clip_grad=0.0, grad_scaler=ConstantGradScaler(8.0)
    )
    x = torch.ones(1, 5, dtype=torch.float16)
    before = model.module.head.bias.detach().clone()
    optimizer.scale_loss(model(x).sum()).backward()
    model.allreduce_gradients()
    assert optimizer.step()[0]
    assert torch.equal(before - model.module.head.bias, torch.ones(2).half())
    body = model.module.body.weight.detach().clone()
    hidden = torch.ones(1, 4, dtype=torch.float16)
    optimizer.scale_loss(model.module.head(hidden).sum()).backward()  # the body is not used
    model.allreduce_gradients()
    assert optimizer.step()[0]
    assert torch.equal(model.module.body.weight, body)
    assert torch.equal(before - model.module.head.bias, 2 * torch.ones(2).half())


def test_states_have_the_inner_modules_names():
    model, other = LocalDDP(Model()), Model()
    assert list(model.state_dict()) == list(other.state_dict())
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    model.load_state_dict(other.state_dict())
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_frozen_parameters_get_no_main_grad():
    model = Model()
    model.body.requires_grad_(False)
    LocalDDP(model)
    assert hasattr(model.head.weight, "main_grad")
    assert not hasattr(model.body.weight, "main_grad")


def test_experts_are_recognised_by_megatrons_attribute():
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert not is_expert(parameter)
    parameter.allreduce = True
    assert not is_expert(parameter)
    parameter.allreduce = False
    assert is_expert(parameter)


def test_a_model_on_two_devices_is_refused():
    model = Model()
    model.head.to("meta")
    with pytest.raises(UserError, match="several devices"):
        LocalDDP(model)
