"""Where a step finds gradients, what it reports, and that it clears them. One process."""

import math

import numpy
import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.gradients.step_gradients import StepGradients
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings

# inner optimizers whose update is run on each of the paths of `InnerStep`
INNER = {
    "one_pass": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
    "plain": lambda p: torch.optim.SGD(p, lr=1.0),
}
KEEPERS = ["buffer", "LocalDDP", "someone else"]


@pytest.fixture(params=INNER)
def path(request):
    if request.param == "one_pass" and not cpu_kernels.is_available():
        pytest.skip(cpu_kernels.why_unavailable())
    return request.param


def model_of(dtype=torch.float16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2)).to(dtype)


def gradients_of(model, *, has_main_grad=True, copies=None, layer_scaling=None):
    pairs = [(parameter, parameter) for parameter in model.parameters()]
    return StepGradients(
        pairs, names={id(p): name for name, p in model.named_parameters()}, has_main_grad=has_main_grad,
        copies=copies, layer_scaling=layer_scaling,
    )  # fmt: skip


def keep_gradients(model, keeper):
    if keeper == "someone else":
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
            parameter.register_post_accumulate_grad_hook(lambda p: (p.main_grad.add_(p.grad), None)[1])
    else:
        {"buffer": lambda m: GradBuffer(m.parameters()), "LocalDDP": LocalDDP}[keeper](model)


def optimizer_of(parameters, path, **options):
    options = {"clip_grad": 0.0, "grad_scaler": ConstantGradScaler(8.0), **options}
    optimizer = Float16OptimizerWithFloat16Params(INNER[path](parameters), **options)
    assert optimizer._inner_step.path == path
    return optimizer


def exact_norm(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@pytest.mark.parametrize("keeper", [*KEEPERS, "grad"])
def test_gradients_are_found_in_grad_or_main_grad_and_measured(keeper):
    model = model_of()
    if keeper != "grad":
        keep_gradients(model, keeper)
    gradients = gradients_of(model, has_main_grad=keeper != "grad")
    model(torch.ones(4, 3).half()).float().sum().backward()
    found = [gradients.of(parameter) for parameter in model.parameters()]
    twin = model_of()
    twin(torch.ones(4, 3).half()).float().sum().backward()
    for gradient, p in zip(found, twin.parameters(), strict=True):
        assert torch.equal(gradient.half(), p.grad)
    exact = exact_norm(p.grad for p in twin.parameters())
    each = sum(exact_norm([p.grad]) for p in twin.parameters())
    for is_exact in (False, True):
        facts, _ = gradients.measure("global", count_zeros=True, is_exact=is_exact).read()
        assert (facts.norm, facts.found_inf) == (pytest.approx(exact, rel=1e-6), False)
        assert facts.num_zeros == sum(int((p.grad == 0).sum()) for p in twin.parameters())
        measured = gradients.measure("sum_of_norms", is_exact=is_exact)
        assert float(measured.norm) == pytest.approx(each, rel=1e-6)


def test_a_parameter_without_a_gradient_has_none_and_is_measured_as_nothing():
    model = model_of()
    gradients = gradients_of(model, has_main_grad=False)
    model[2].bias.grad = torch.tensor([3.0, 4.0]).half()
    assert gradients.of(model[0].weight) is None
    for kind in ("global", "sum_of_norms"):
        facts, _ = gradients.measure(kind, count_zeros=True).read()
        assert (facts.norm, facts.found_inf, facts.num_zeros) == (5.0, False, 0)


@pytest.mark.parametrize("kind", ["global", "sum_of_norms"])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_parameters_counted_elsewhere_are_left_out_of_the_norm_but_checked_for_overflow(kind, bad):
    model = model_of()
    model[0].weight.shared = True
    GradBuffer(model.parameters())
    gradients = gradients_of(model)
    model[0].weight.main_grad.fill_(100.0)
    model[2].bias.main_grad.copy_(torch.tensor([3.0, 4.0]))
    if bad is not None:
        model[0].weight.main_grad[0, 0] = bad
    facts, _ = gradients.measure(kind).read()
    assert facts.found_inf if bad is not None else (facts.norm, facts.found_inf) == (5.0, False)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_zeroing_clears_main_grads_and_every_grad_of_models_and_masters(keeper):
    model = model_of()
    keep_gradients(model, keeper)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    gradients = StepGradients(
        list(zip(model.parameters(), masters, strict=True)), names={}, has_main_grad=True, copies=None,
        layer_scaling=None,
    )  # fmt: skip
    for p, master in zip(model.parameters(), masters, strict=True):
        p.main_grad.fill_(math.nan)
        p.grad, master.grad = torch.ones_like(p), torch.ones_like(master)
    gradients.zero()
    for p, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(p.main_grad, torch.zeros(p.shape))
        assert p.grad is None
        assert master.grad is None


def test_zeroing_some_of_a_buffer_leaves_the_gradients_of_others():
    model = model_of()
    GradBuffer(model.parameters())
    for p in model.parameters():
        p.main_grad.fill_(2.0)
    gradients_of(model[0]).zero()
    assert not any(p.main_grad.any() for p in model[0].parameters())
    assert all(torch.equal(p.main_grad, torch.full(p.shape, 2.0)) for p in model[2].parameters())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("keeper", [*KEEPERS, "grad"])
def test_non_finite_gradients_are_listed_in_the_order_of_backward(keeper, bad):
    model = model_of()
    if keeper != "grad":
        keep_gradients(model, keeper)
    gradients = gradients_of(model, has_main_grad=keeper != "grad")
    model(torch.ones(2, 3).half()).float().sum().backward()
    for index in (0, 2):
        gradients.of(model[index].weight)[1, 1] = bad
    seen = gradients.local_overflow(is_before=False)
    assert [name for _, name in sorted(seen.tensors)] == ["2.weight", "0.weight"]
    assert (seen.rank, seen.num_gradients, seen.is_own) == (0, 4, False)


def test_overflows_before_and_after_a_reduction_are_distinguished():
    model = model_of()
    buffer = GradBuffer(model.parameters())
    gradients = gradients_of(model)
    model[0].weight.main_grad[0, 0] = math.inf
    assert not gradients.local_overflow(is_before=True).is_own  # no reduction has been announced
    buffer.before_reduction()
    model[2].bias.main_grad[0] = math.nan  # as it may come from another rank
    before, now = (gradients.local_overflow(is_before=each) for each in (True, False))
    assert [name for _, name in before.tensors] == ["0.weight"]
    assert sorted(name for _, name in now.tensors) == ["0.weight", "2.bias"]
    assert (before.is_own, now.is_own) == (True, False)
    gradients.mark_zeroed()
    assert not gradients.local_overflow(is_before=True).is_own


def test_only_parameters_of_the_optimizer_are_listed_from_a_shared_buffer():
    model = model_of()
    GradBuffer(model.parameters())
    model[0].weight.main_grad[0, 0] = model[2].weight.main_grad[0, 0] = math.inf
    seen = gradients_of(model[2]).local_overflow(is_before=False)
    assert [name for _, name in seen.tensors] == ["weight"]
    assert seen.num_gradients == 2


def test_no_parameters_at_all_are_fine():
    for has_main_grad in (True, False):
        nothing = gradients_of(torch.nn.Sequential(), has_main_grad=has_main_grad)
        nothing.zero()
        nothing.mark_zeroed()
        nothing.check_factors()
        for kind in ("global", "sum_of_norms"):
            facts, _ = nothing.measure(kind, count_zeros=True).read()
            assert (facts.norm, facts.found_inf, facts.num_zeros) == (0, False, 0)
        assert list(nothing.local_overflow(is_before=True).tensors) == []


@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_gradient_buffer_must_have_the_same_layer_scaling(keeper):
    model = model_of()
    scaling = LayerScaling(model, ["0", "2"])
    keep_gradients(model, keeper)
    with pytest.raises(UserError, match="pass the same instruments to LocalDDP and to the optimizer"):
        gradients_of(model, layer_scaling=scaling).check_factors()
    gradients_of(model).check_factors()  # there are none
    GradBuffer(model.parameters(), factor_of=scaling.factor_of)
    gradients_of(model, layer_scaling=scaling).check_factors()
    other = LayerScaling(model_of(), ["0", "2"])
    with pytest.raises(UserError, match="the same instruments"):
        gradients_of(model, layer_scaling=other).check_factors()


def by_data(parameter, values):
    parameter.main_grad.data.copy_(values)


def by_numpy(parameter, values):
    parameter.main_grad.numpy()[...] = values.numpy()


def by_flat(parameter, values):
    start = parameter.main_grad.storage_offset()
    parameter.grad_buffer.flat[start : start + values.numel()] = values.flatten()


def by_rebinding(parameter, values):
    parameter.main_grad = values.clone()


def by_other_storage(parameter, values):
    parameter.main_grad.data = values.clone()


WRITERS = [by_data, by_numpy, by_flat, by_rebinding, by_other_storage]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("keeper", ["optimizer", "LocalDDP"])
def test_norm_flag_and_update_use_gradients_written_by_the_user_in_any_way(write, keeper, path):
    """SGD's update shows its gradient; Adam's second moment does."""
    model = model_of()
    if keeper == "LocalDDP":
        LocalDDP(model)
    optimizer = optimizer_of(model.parameters(), path, log_num_zeros_in_grad=True)
    optimizer.scale_loss(model(torch.ones(2, 3).half()).float().sum()).backward()
    written = {p: torch.randn(p.shape) for p in model.parameters()}
    written[model[2].bias][0] = 0.0
    before = {p: optimizer.master_of(p).detach().clone() for p in model.parameters()}
    for p, values in written.items():
        write(p, values)
    report = optimizer.step()
    assert report == (True, pytest.approx(exact_norm(written.values()) / 8, rel=1e-6), 1)
    for p, values in written.items():
        master = optimizer.master_of(p)
        if path == "one_pass":
            torch.testing.assert_close(optimizer.state_of(p)["exp_avg"], values / 8 * 0.1)
        else:
            torch.testing.assert_close(before[p] - master, values / 8)
        assert torch.equal(p.main_grad, torch.zeros(p.shape))
    masters = [optimizer.master_of(p).detach().clone() for p in model.parameters()]
    spoilt = torch.ones(2, 3)
    spoilt[1, 1] = math.nan
    write(model[0].weight, spoilt)
    assert optimizer.step().overflow.num_tensors == 1
    assert all(
        torch.equal(optimizer.master_of(p), old) for p, old in zip(model.parameters(), masters, strict=True)
    )
    assert not any(p.main_grad.any() for p in model.parameters())


@pytest.mark.parametrize("keeper", ["optimizer", *KEEPERS])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_after_a_step_main_grads_are_exactly_zero(keeper, is_skipped, path):
    model = model_of()
    if keeper != "optimizer":
        keep_gradients(model, keeper)
    optimizer = optimizer_of(model.parameters(), path)
    for _ in range(2):
        optimizer.scale_loss(model(torch.ones(2, 3).half()).float().sum()).backward()
        if is_skipped:
            model[2].bias.main_grad[1] = -math.inf
        assert optimizer.step().is_applied != is_skipped
        for p in model.parameters():
            assert torch.equal(p.main_grad, torch.zeros(p.shape))
            if keeper != "someone else":
                assert p.grad is None


@pytest.mark.parametrize("stepped", [0, 1])
def test_stepping_one_of_two_optimizers_with_a_shared_buffer_keeps_the_other_gradients(stepped, path):
    model = LocalDDP(model_of())
    parts = [model.module[0], model.module[2]]
    scaler = ConstantGradScaler(8.0)
    each = [optimizer_of(part.parameters(), path, grad_scaler=scaler) for part in parts]
    chain = ChainedOptimizer(each)
    chain.scale_loss(model(torch.ones(2, 3).half()).float().sum()).backward()
    waiting = [p.main_grad.clone() for p in parts[1 - stepped].parameters()]
    report = each[stepped].step()
    assert report.is_applied
    assert not any(p.main_grad.any() for p in parts[stepped].parameters())
    for p, gradient in zip(parts[1 - stepped].parameters(), waiting, strict=True):
        assert torch.equal(p.main_grad, gradient)
    assert chain.step().grad_norm == pytest.approx(exact_norm(waiting) / 8, rel=1e-6)
    assert not any(p.main_grad.any() for p in model.parameters())
    assert torch.equal(model._averaged.flat, torch.zeros_like(model._averaged.flat))


@pytest.mark.parametrize("has_strategy", [False, True])
def test_a_local_ddp_put_around_a_model_after_its_optimizer_was_built_changes_nothing(has_strategy, path):
    """Gradients left in a buffer would add up, and norms would grow from step to step."""
    runs = []
    for is_late in (False, True):
        model = model_of()
        scaler = MaxValueGradScaler(2.0**6) if has_strategy else ConstantGradScaler(2.0**6)
        optimizer = optimizer_of(model.parameters(), path, grad_scaler=scaler)
        wrapped = LocalDDP(model) if is_late else model
        norms, steps = [], []
        for number in range(4):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).half()
            optimizer.scale_loss(wrapped(x).float().square().mean()).backward()
            if is_late:
                wrapped.allreduce_gradients()
            exact = exact_norm(p.main_grad for p in model.parameters()) / optimizer.loss_scale
            report = optimizer.step()
            assert report.grad_norm == pytest.approx(exact, rel=1e-6)
            assert not any(p.main_grad.any() for p in model.parameters())
            norms.append(report.grad_norm)
            steps.append([p.detach().tolist() for p in model.parameters()])
        runs.append([norms, steps, optimizer.loss_scale])
    assert runs[0] == runs[1]
    assert runs[0][1][0] != runs[0][1][-1]


def test_a_late_local_ddp_without_the_factors_is_refused_at_the_step_and_changes_nothing():
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(2))).half()
    scaler, settings = ConstantGradScaler(8.0), LayerScalingSettings(enabled=True, modules=("0", "1"))
    instruments = Instruments.attach(model, scaler, layer_scaling=settings)
    optimizer = optimizer_of(model.parameters(), "plain", grad_scaler=scaler, instruments=instruments)
    before = [p.detach().clone() for p in model.parameters()]
    wrapped = LocalDDP(model)
    optimizer.scale_loss(wrapped(torch.ones(1, 3).half()).float().sum()).backward()
    with pytest.raises(UserError, match="the same instruments to LocalDDP"):
        optimizer.step()
    assert all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))
    wrapped = LocalDDP(model, instruments=instruments)
    optimizer.scale_loss(wrapped(torch.ones(1, 3).half()).float().sum()).backward()
    assert optimizer.step().is_applied


@pytest.mark.parametrize("clip_grad", [0.1, 100.0])
def test_a_norm_beyond_fp32_is_clipped_to_a_finite_update_and_not_to_nothing(clip_grad, path):
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = FP32Optimizer(INNER[path]([parameter]), clip_grad=clip_grad)
    values = numpy.array([3.0e38, -3.0e38, 3.0e38, 3.0e38])
    parameter.main_grad.copy_(torch.from_numpy(values))
    report = optimizer.step()
    assert report.is_applied
    assert report.grad_norm == pytest.approx(6e38, rel=1e-5)
    assert torch.isfinite(parameter).all()
    assert (parameter != 0).all()
    assert torch.equal(parameter.sign(), torch.tensor([-1.0, 1.0, -1.0, -1.0]))
    assert all(
        torch.isfinite(each).all() for each in optimizer.state_of(parameter).values() if each is not None
    )
    assert not parameter.main_grad.any()
