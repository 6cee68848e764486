import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer


def train(model, optimizer, batches):
    losses = []
    for x in batches:
        dtype = next(model.parameters()).dtype
        loss = model(x.to(dtype)).float().square().mean()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(dtype=torch.float16, seed=0, **arguments):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if dtype == torch.float32:
        return model, FP32Optimizer(inner, clip_grad=1.0)
    arguments.setdefault("grad_scaler", DynamicGradScaler(2.0**12, growth_interval=3))
    optimizer = Float16OptimizerWithFloat16Params(
        inner, clip_grad=1.0, bf16=dtype == torch.bfloat16, cast_parameters=True, **arguments
    )
    return model, optimizer


def batches(n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, generator=generator) for _ in range(n)]


@given(st.floats(-1e4, 1e4, width=32))
@settings(max_examples=50, deadline=None)
def test_masters_keep_the_value_from_before_the_cast(value):
    parameter = torch.nn.Parameter(torch.tensor([value]))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([parameter]), clip_grad=0.0, grad_scaler=DynamicGradScaler(), cast_parameters=True
    )
    assert parameter.dtype == torch.float16
    assert optimizer.fp32_from_float16_groups[0][0].item() == value


def test_an_update_too_small_for_half_precision_is_not_lost():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([parameter], lr=1e-4),
        clip_grad=0.0,
        grad_scaler=None,
        bf16=True,
        cast_parameters=True,
    )
    for _ in range(100):  # each moves by 1e-4; bf16 near 1 knows steps of 4e-3 only
        parameter.float().sum().backward()
        optimizer.step()
    assert optimizer.fp32_from_float16_groups[0][0].item() == pytest.approx(0.99, abs=1e-5)
    assert parameter.item() == torch.tensor(0.99).bfloat16().item()


def test_groups_are_megatrons_and_fp32_parameters_stay_if_not_cast():
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    inner = torch.optim.SGD([half, full, frozen], lr=1.0)
    optimizer = Float16OptimizerWithFloat16Params(inner, clip_grad=0.0, grad_scaler=None, bf16=True)
    assert optimizer.float16_groups == [[half]]
    assert optimizer.fp32_from_fp32_groups == [[full]]
    master = optimizer.fp32_from_float16_groups[0][0]
    assert master.dtype == torch.float32
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(master), id(full)]
    (half.float().sum() + full.sum()).backward()
    optimizer.step()
    assert (half.tolist(), full.tolist(), frozen.item()) == ([0, 0], [0, 0, 0], 1)


def test_masters_carry_the_attributes_of_parallel_parameters():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.shared = True, 1, False
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([parameter]), clip_grad=0.0, grad_scaler=None, bf16=True, cast_parameters=True
    )
    master = optimizer.fp32_from_float16_groups[0][0]
    assert (master.tensor_model_parallel, master.partition_dim, master.shared) == (True, 1, False)


def test_moments_of_an_optimizer_that_has_stepped_move_to_the_masters():
    parameter = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    parameter.grad = torch.ones(2)
    inner.step()
    parameter.grad = None
    optimizer = Float16OptimizerWithFloat16Params(
        inner, clip_grad=0.0, grad_scaler=None, bf16=True, cast_parameters=True
    )
    parameter.main_grad.fill_(1.0)
    optimizer.step()  # momentum 0.5·1 + 1
    assert parameter.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_resumed_optimizer_continues_bit_for_bit(dtype, tmp_path):
    model, optimizer = make(dtype)
    train(model, optimizer, batches(5))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    expected = train(model, optimizer, batches(5, seed=2))
    other, fresh = make(dtype, seed=9)
    state = torch.load(tmp_path / "state.pt")
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    assert train(other, fresh, batches(5, seed=2)) == expected
    assert fresh.loss_scale == optimizer.loss_scale
    assert fresh.get_loss_scale().equal(torch.tensor([optimizer.loss_scale]))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_loading_restores_the_model_from_the_masters_and_understands_old_keys():
    model, optimizer = make()
    train(model, optimizer, batches(3))
    new = copy.deepcopy(optimizer.state_dict())
    old = {
        "optimizer_state_dict": new["optimizer"],
        "grad_scaler": new["grad_scaler"],
        "fp32_from_fp16": new["fp32_from_fp16_params"],
    }
    other, fresh = make(seed=9)
    fresh.load_state_dict(old)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_keys_are_megatrons():
    assert list(make()[1].state_dict()) == ["optimizer", "grad_scaler", "fp32_from_fp16_params"]


def test_a_state_without_scaler_warns_and_keeps_the_initial_scale(caplog):
    state = make()[1].state_dict()
    del state["grad_scaler"]
    _, fresh = make()
    fresh.load_state_dict(state)
    assert "no grad scaler" in caplog.text
    assert fresh.loss_scale == 2.0**12


@pytest.mark.parametrize("damage", ["optimizer", "fp32_from_fp16_params", "shape", "groups", "grad_scaler"])
def test_a_state_that_does_not_fit_changes_nothing(damage):
    model, optimizer = make()
    train(model, optimizer, batches(2))
    state = copy.deepcopy(optimizer.state_dict())
    if damage == "shape":
        state["fp32_from_fp16_params"][0][0] = torch.zeros(3, 3)
    elif damage == "groups":
        state["optimizer"]["param_groups"].append({"params": []})
    elif damage == "grad_scaler":
        state["grad_scaler"] = {"scale": 8.0}
    else:
        del state[damage]
    other, fresh = make(seed=9)
    before = copy.deepcopy([fresh.state_dict(), other.state_dict()])
    with pytest.raises(UserError):
        fresh.load_state_dict(state)
    after = [fresh.state_dict(), other.state_dict()]
    assert str(before) == str(after)


def test_reloading_takes_the_masters_from_the_model():
    model, optimizer = make()
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    optimizer.reload_model_params()
    assert (optimizer.fp32_from_float16_groups[0][0] == 0.5).all()


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_weights_written_into_the_model_last_beyond_a_step_only_if_they_are_reloaded(is_reloaded):
    model, optimizer = make(torch.bfloat16, grad_scaler=None)
    before = model.state_dict()["0.weight"].clone()
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
    if is_reloaded:
        optimizer.reload_model_params()
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, batches(1))
    assert torch.equal(model[0].weight, torch.full_like(before, 0.5) if is_reloaded else before)


def test_fp16_without_a_scaler_is_refused():
    with pytest.raises(UserError, match=r"fp16 expects a grad scaler\."):
        make(torch.float16, grad_scaler=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_of_another_type_is_refused_with_its_place(dtype):
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))]
    with pytest.raises(TypeError, match=r"parameter 1 of group 0, shape \(2, 3\), is"):
        Float16OptimizerWithFloat16Params(
            torch.optim.SGD(parameters), clip_grad=0.0, grad_scaler=None, bf16=True
        )


def test_the_fp32_optimizer_refuses_half_parameters():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(TypeError, match="is float16: convert it to one of float32"):
        FP32Optimizer(torch.optim.SGD([parameter]), clip_grad=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_and_moments_can_be_rewritten_between_steps(dtype):
    model, optimizer = make(dtype, **({} if dtype == torch.float32 else {"grad_scaler": None}))
    weight = model[0].weight
    master = optimizer.master_of(weight)
    assert (master is weight) == (dtype == torch.float32)
    assert optimizer.state_of(weight) == {}
    train(model, optimizer, batches(2))
    assert set(optimizer.state_of(weight)) == {"step", "exp_avg", "exp_avg_sq"}
    with torch.no_grad():
        master.fill_(1 / 3)
        optimizer.state_of(weight)["exp_avg"].zero_()
        optimizer.state_of(weight)["exp_avg_sq"].fill_(1.0)
    optimizer.masters_have_changed()
    assert torch.equal(weight, torch.full_like(weight, 1 / 3))
    other = model[2].weight.detach().clone()
    weight.main_grad.fill_(0.01)  # small beside a second moment of 1: the step is, too
    optimizer.step()
    moved = (master - 1 / 3).abs().max().item()
    assert 0 < moved < 1e-4
    assert not torch.equal(model[2].weight, other)  # untouched moments move on


def test_state_written_before_the_first_step_is_used():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = FP32Optimizer(torch.optim.SGD([parameter], lr=1.0, momentum=0.5), clip_grad=0.0)
    optimizer.state_of(parameter)["momentum_buffer"] = torch.tensor([4.0])
    parameter.main_grad.fill_(1.0)
    optimizer.step()
    assert parameter.item() == -3.0


def test_a_parameter_of_another_optimizer_is_refused():
    _, optimizer = make()
    for ask in (optimizer.master_of, optimizer.state_of):
        with pytest.raises(UserError, match=r"shape \(2, 3\) is not trained by this optimizer"):
            ask(torch.nn.Parameter(torch.ones(2, 3)))


def test_the_scaled_loss_is_fp32_even_where_the_scale_does_not_fit_half_precision():
    _, optimizer = make(grad_scaler=DynamicGradScaler(2.0**20))
    scaled = optimizer.scale_loss(torch.tensor(1.5, dtype=torch.float16))
    assert scaled.dtype == torch.float32
    assert scaled.item() == 1.5 * 2**20


def test_gradients_are_unscaled_before_they_are_measured_clipped_and_counted():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([parameter], lr=1.0),
        clip_grad=5.0,
        grad_scaler=DynamicGradScaler(2.0**10),
        log_num_zeros_in_grad=True,
        cast_parameters=True,
    )
    true_gradient = torch.tensor(
        [3.0, 0.0, 4.0, 0.0]
    )  # of norm 5: at the limit, scaled it would be far beyond
    optimizer.scale_loss((parameter * true_gradient.half()).sum()).backward()
    is_applied, norm, zeros = optimizer.step()
    assert (is_applied, norm, zeros) == (True, pytest.approx(5.0), 2)
    torch.testing.assert_close(parameter.detach().float(), -true_gradient)


def test_a_skipped_step_leaves_no_gradient_anywhere():
    model, optimizer = make()
    model(batches(1)[0].half()).sum().mul(float("inf")).backward()
    assert not optimizer.step()[0]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not parameter.main_grad.any() for parameter in model.parameters())
    assert all(
        not master.grad.any()
        for g in optimizer.param_groups
        for master in g["params"]
        if master.grad is not None
    )


def test_moments_that_the_inner_optimizer_has_made_already_become_fp32():
    """Adagrad makes its sums of squares with the parameters; 1 is lost beside 256 in bf16."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    inner = torch.optim.Adagrad([parameter], lr=0.1)
    inner.state[parameter]["codes"] = torch.ones(2, dtype=torch.uint8)  # as optimizers of 8 bits keep theirs
    optimizer = Float16OptimizerWithFloat16Params(inner, grad_scaler=None, bf16=True, clip_grad=0.0)
    assert optimizer.state_of(parameter)["codes"].dtype == torch.uint8
    for _ in range(400):
        parameter.grad = torch.ones(2, dtype=torch.bfloat16)
        optimizer.step()
    assert optimizer.state_of(parameter)["sum"].tolist() == [400.0, 400.0]
