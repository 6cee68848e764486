"""Changes that users make to `.grad` (clear, replace, edit) take effect on gradients accumulated in fp32."""

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def make(kind, precision):
    """The model that the user calls, and its optimizer."""
    model = net().to(DTYPES[precision])
    if kind == "LocalDDP":
        model = LocalDDP(model)
    if kind == "megatron":
        half = {} if precision == "fp32" else {precision: True, "loss_scale": 64.0}
        return model, mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(lr=0.1, clip_grad=0.1, **half))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    if precision == "fp32":
        return model, FP32Optimizer(inner, clip_grad=0.1)
    scaler = mlb.ConstantGradScaler(64.0) if precision == "fp16" else None
    return model, Float16OptimizerWithFloat16Params(
        inner, grad_scaler=scaler, bf16=precision == "bf16", clip_grad=0.1
    )


def backward(model, optimizer, times=1.0, seed=0):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.scale_loss(
        model(x.to(next(model.parameters()).dtype)).float().square().sum() * times
    ).backward()


def module_of(model):
    return model.module if isinstance(model, LocalDDP) else model


def old_fashioned(model, _):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def one_by_one(model, _):
    for parameter in model.parameters():
        parameter.grad = None


CLEARING = {
    "model": lambda model, _: model.zero_grad(),
    "module": lambda model, _: module_of(model).zero_grad(),
    "module, zeros": lambda model, _: module_of(model).zero_grad(set_to_none=False),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "parts": lambda model, _: [part.zero_grad() for part in module_of(model)],
    "one by one": one_by_one,
    "old-fashioned": old_fashioned,
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "LocalDDP", "megatron"])
@pytest.mark.parametrize("way", CLEARING)
def test_a_cleared_gradient_does_not_change_the_next_step(kind, precision, way):
    (model, optimizer), (other, expected) = make(kind, precision), make(kind, precision)
    for seed in range(2):
        backward(model, optimizer, 5.0, seed)
        CLEARING[way](model, optimizer)
        backward(model, optimizer, 1.0, seed)
        backward(other, expected, 1.0, seed)
        assert optimizer.step() == expected.step()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
            assert one.grad is None


def test_clearing_one_parameter_keeps_the_sums_of_the_others():
    model, optimizer = make("plain", "bf16")
    backward(model, optimizer)
    kept = model[2].weight.main_grad.clone()
    model[0].weight.grad = None
    backward(model, optimizer)
    torch.testing.assert_close(model[2].weight.main_grad, 2 * kept, rtol=0, atol=0)
    twin, of_twin = make("plain", "bf16")
    backward(twin, of_twin)
    assert torch.equal(model[0].weight.main_grad, twin[0].weight.main_grad)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("dtype", ["half", "fp32"])
def test_a_gradient_set_by_hand_is_the_one_that_is_applied(precision, dtype):
    model, optimizer = make("plain", precision)
    backward(model, optimizer, 100.0)
    wanted = {}
    for number, parameter in enumerate(model.parameters()):
        values = torch.full_like(parameter, 2.0**-number)
        wanted[parameter] = values.float()
        parameter.grad = values.float() if dtype == "fp32" else values
    report = optimizer.step()
    norm = sum(each.double().square().sum() for each in wanted.values()).sqrt().item()
    assert report.grad_norm == pytest.approx(norm / optimizer.loss_scale, rel=1e-6)
    assert report.is_applied


def test_gradients_set_by_hand_need_no_backward_and_a_backward_adds_to_them():
    model, optimizer = make("plain", "fp16")
    twin, of_twin = make("plain", "fp16")
    backward(twin, of_twin)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    backward(model, optimizer)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.main_grad, two.main_grad + 1)
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 64
    count = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.step().grad_norm == pytest.approx(count**0.5, rel=1e-6)


def test_an_infinite_gradient_set_by_hand_skips_the_step_and_is_named():
    model, _ = make("plain", "bf16")
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = Float16OptimizerWithFloat16Params(
        inner, grad_scaler=None, bf16=True, clip_grad=1.0, named_parameters=model.named_parameters()
    )
    backward(model, optimizer)
    model[2].bias.grad = torch.full((3,), torch.inf)
    report = optimizer.step()
    assert not report.is_applied
    assert report.overflow.tensor == "2.bias"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_of_another_shape_is_an_error_that_names_its_parameter():
    model = net()
    optimizer = FP32Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=0.0, named_parameters=model.named_parameters()
    )
    backward(model, optimizer)
    model[0].bias.grad.data = torch.zeros(3)  # an assignment is refused by torch itself
    with pytest.raises(UserError, match=r"0\.bias\.grad has shape \(3,\) on cpu, the parameter \(5,\)"):
        optimizer.step()


@pytest.mark.parametrize("precision", DTYPES)
def test_clipping_by_torch_is_what_the_step_sees(precision):
    model, optimizer = make("plain", precision)
    backward(model, optimizer, 100.0)
    before = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert before > 1
    assert optimizer.step().grad_norm == pytest.approx(0.5 / optimizer.loss_scale, rel=1e-4)


@pytest.mark.parametrize("precision", DTYPES)
def test_autograd_grad_leaves_sums_as_they_are(precision):
    model, optimizer = make("plain", precision)
    backward(model, optimizer)
    before = [parameter.main_grad.clone() for parameter in model.parameters()]
    x = torch.ones(2, 6, dtype=DTYPES[precision])
    found = torch.autograd.grad(model(x).float().sum(), list(model.parameters()))
    assert all(each.any() for each in found)
    for parameter, sums in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, sums)
        assert torch.equal(parameter.main_grad, sums)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_recomputed_or_retained_graph_adds_up_as_often_as_it_is_run(is_reentrant):
    model, _ = make("plain", "bf16")
    x = torch.ones(2, 6, dtype=torch.bfloat16, requires_grad=True)
    output = model(x).float().sum()
    output.backward(retain_graph=True)
    once = [parameter.main_grad.clone() for parameter in model.parameters()]
    output.backward()
    checkpoint(model, x, use_reentrant=is_reentrant).float().sum().backward()
    for parameter, sums in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * sums, rtol=1e-6, atol=0)


def test_a_model_cast_between_backward_and_step_keeps_its_gradients():
    model, optimizer = make("plain", "bf16")
    twin, expected = make("plain", "bf16")
    for one, two in ((model, optimizer), (twin, expected)):
        backward(one, two)
    model.to(torch.bfloat16)  # this casts `.grad` too
    assert optimizer.step().grad_norm == pytest.approx(expected.step().grad_norm, rel=1e-2)
    assert all(parameter.main_grad.dtype == torch.float32 for parameter in model.parameters())
    backward(model, optimizer)
    assert optimizer.grad_buffer.flat.any()


def test_a_parameter_frozen_after_a_backward_keeps_its_gradient_and_gets_no_other():
    model, optimizer = make("plain", "bf16")
    backward(model, optimizer)
    before = model[0].weight.main_grad.clone()
    model[0].weight.requires_grad_(False)
    backward(model, optimizer)
    assert torch.equal(model[0].weight.grad, before)
    model.zero_grad()
    backward(model, optimizer)
    optimizer.gradients.collect()
    assert not model[0].weight.main_grad.any()
    assert model[2].weight.main_grad.any()


@pytest.mark.parametrize("is_low_bit", [False, True])
def test_a_parameter_frozen_between_backwards_of_one_graph_keeps_its_gradient(is_low_bit):
    model = net()
    if is_low_bit:
        mlb.convert(model, "nvfp4", seed=0)
    twin = copy.deepcopy(model)  # without a buffer
    buffer = GradBuffer(model.parameters())
    for each in (model, twin):
        loss = each(torch.ones(2, 6)).square().sum()
        loss.backward(retain_graph=True)
        each[0].weight.requires_grad_(False)
        loss.backward()
    buffer.collect()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert two.grad.any()
        torch.testing.assert_close(one.grad, two.grad)
        torch.testing.assert_close(one.main_grad, two.grad)


def test_a_compiled_model_runs_with_pending_gradients():
    model, _ = make("plain", "bf16")
    twin, _ = make("plain", "bf16")
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (3, 5):  # the second compiles again, with gradients there
        x = torch.ones(rows, 6, dtype=torch.bfloat16)
        compiled(x).float().sum().backward()
        twin(x).float().sum().backward()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-2, atol=1e-3)


def test_a_model_with_gradients_is_copied_and_saved():
    model, optimizer = make("plain", "bf16")
    backward(model, optimizer)
    copied = copy.deepcopy(model)
    assert all(parameter.grad is None for parameter in copied.parameters())
    copied(torch.ones(1, 6, dtype=torch.bfloat16)).float().sum().backward()
    assert copied[0].weight.grad.dtype == torch.bfloat16
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in torch.load(buffer).items())


def test_gradients_that_were_there_before_the_buffer_are_added_to():
    model = net().bfloat16()
    x = torch.ones(1, 6, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    first = [parameter.grad.float() for parameter in model.parameters()]
    buffer = GradBuffer(model.parameters())
    model(x).float().sum().backward()
    buffer.collect()
    for parameter, sums in zip(model.parameters(), first, strict=True):
        assert torch.equal(parameter.main_grad, 2 * sums)


def test_a_detached_buffer_leaves_gradients_to_torch():
    model = net().bfloat16()
    buffer = GradBuffer(model.parameters())
    model(torch.ones(1, 6, dtype=torch.bfloat16)).float().sum().backward()
    buffer.detach()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad_dtype == torch.bfloat16 for parameter in model.parameters())
    model(torch.ones(1, 6, dtype=torch.bfloat16)).float().sum().backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
