"""The step itself: order, skip, unscale, clip. Numbers against a float64 loop written here."""

import copy
import math

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.optimizers.megatron import OptimizerConfig, get_megatron_optimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.optimizers.param_groups import learning_rate
from megalowbit.optim.statistics.layer_scaling import LayerScaling


def half_optimizer(model, inner=None, **arguments):
    arguments = {"clip_grad": 0.0, "grad_scaler": None, "bf16": True, "cast_parameters": True, **arguments}
    return Float16OptimizerWithFloat16Params(
        inner or torch.optim.SGD(model.parameters(), lr=1.0), **arguments
    )


def set_grad(parameter, value):
    parameter.main_grad.copy_(torch.as_tensor(value, dtype=torch.float32))


@pytest.mark.parametrize("scale", [16.0, 2.0**15, 1000.0])
@pytest.mark.parametrize("is_fused", [True, False])
def test_sgd_with_lr_1_and_gradient_1_moves_by_exactly_minus_1(scale, is_fused):
    parameter = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([parameter], lr=1.0, fused=is_fused)
    optimizer = half_optimizer(None, inner, grad_scaler=ConstantGradScaler(scale), bf16=False)
    optimizer.scale_loss(parameter.float().sum()).backward()
    success, norm, _ = optimizer.step()
    assert success
    assert norm == pytest.approx(math.sqrt(3), rel=1e-6)
    assert parameter.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("is_fused", [True, False])
def test_adamw_follows_a_float64_reference(clip_grad, is_fused):
    torch.manual_seed(0)
    start = torch.randn(7)
    parameter = torch.nn.Parameter(start.clone())
    inner = torch.optim.AdamW(
        [parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, fused=is_fused
    )
    optimizer = half_optimizer(None, inner, clip_grad=clip_grad, grad_scaler=ConstantGradScaler(64.0))
    weight, m, v = start.double(), torch.zeros(7).double(), torch.zeros(7).double()
    for step in range(1, 6):
        gradient = torch.randn(7)
        set_grad(parameter, gradient * 64)
        _, norm, _ = optimizer.step()
        exact = gradient.double()
        assert norm == pytest.approx(float(exact.norm()), rel=1e-6)
        if clip_grad:
            exact = exact * min(1.0, clip_grad / (float(exact.norm()) + 1e-6))
        m, v = 0.8 * m + 0.2 * exact, 0.9 * v + 0.1 * exact**2
        weight = weight * (1 - 0.1 * 0.2)
        weight -= 0.1 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
        master = optimizer.fp32_from_float16_groups[0][0]
        torch.testing.assert_close(master.detach().double(), weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter.data, master.detach().bfloat16())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scaler", [None, DynamicGradScaler(16.0, hysteresis=1)], ids=["bf16", "fp16"])
def test_a_non_finite_gradient_changes_nothing_but_the_scale(bad, scaler):
    parameter = torch.nn.Parameter(torch.randn(4))
    inner = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    optimizer = half_optimizer(None, inner, grad_scaler=scaler, bf16=scaler is None)
    set_grad(parameter, torch.ones(4))
    optimizer.step()
    master = optimizer.fp32_from_float16_groups[0][0]
    before = [master.detach().clone(), parameter.detach().clone()]
    before += [value.clone() for value in optimizer.state[master].values()]
    scale = optimizer.loss_scale
    set_grad(parameter, [1.0, bad, 1.0, 1.0])
    assert optimizer.step() == (False, None, None)
    after = [master, parameter, *optimizer.state[master].values()]
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, after, strict=True))
    assert optimizer.found_inf
    assert optimizer.grad_norm is None
    assert optimizer.loss_scale == (scale / 2 if scaler else 1.0)
    assert not parameter.main_grad.any()


def test_an_overflow_is_not_replayed_and_the_next_step_is_ordinary():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = half_optimizer(None, torch.optim.SGD([parameter], lr=1.0))
    set_grad(parameter, [math.nan])
    optimizer.step()
    optimizer.step()  # nothing new has come in
    assert parameter.item() == 0.0
    parameter.float().sum().backward()
    assert optimizer.step()[0]
    assert parameter.item() == -1.0


def test_a_step_leaves_no_gradient_that_could_be_applied_twice():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = half_optimizer(None, torch.optim.SGD([parameter], lr=1.0))
    parameter.float().sum().backward()
    optimizer.step()
    optimizer.step()
    assert parameter.tolist() == [-1.0, -1.0]


def test_zeros_in_the_gradient_are_reported():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = half_optimizer(None, torch.optim.SGD([parameter], lr=1.0), log_num_zeros_in_grad=True)
    set_grad(parameter, [0.0, 1.0, 0.0, 0.0])
    assert optimizer.step() == (True, 1.0, 3)


def test_a_shared_parameter_is_stepped_but_not_counted():
    ours, shared = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    shared.shared = True
    optimizer = half_optimizer(None, torch.optim.SGD([ours, shared], lr=1.0), clip_grad=1.5)
    set_grad(ours, [3.0])
    set_grad(shared, [8.0])
    _, norm, _ = optimizer.step()
    assert norm == 3.0
    assert ours.item() == pytest.approx(-1.5, rel=1e-2)
    assert shared.item() == pytest.approx(-4.0, rel=1e-2)


def test_groups_without_parameters_are_fine():
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([{"params": []}, {"params": [parameter], "lr": 0.5}], lr=1.0)
    optimizer = half_optimizer(None, inner)
    set_grad(parameter, [1.0])
    assert optimizer.step()[0]
    assert parameter.item() == -0.5


def test_an_optimizer_without_any_parameter_takes_part():
    optimizer = half_optimizer(None, torch.optim.SGD([{"params": []}], lr=1.0))
    assert optimizer.step() == (True, 0.0, None)


def test_torch_schedulers_and_step_hooks_work():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = FP32Optimizer(torch.optim.SGD([parameter], lr=1.0), clip_grad=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for _ in range(2):
        set_grad(parameter, [1.0])
        optimizer.step()
        scheduler.step()
    assert parameter.item() == -1.5
    assert len(called) == 2
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.25


def test_gradients_in_param_grad_work_without_a_buffer():
    used, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.1)
    optimizer = half_optimizer(None, inner, params_have_main_grad=False)
    used.float().sum().backward()
    assert used.grad is not None
    assert optimizer.step()[0]
    assert used.tolist() == [-1.0, -1.0]
    assert unused.tolist() == [1.0, 1.0]  # no gradient, no update, no decay
    assert used.grad is None


def test_main_grads_kept_by_someone_else_are_used():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.main_grad = torch.tensor([1.0, 2.0])
    optimizer = half_optimizer(None, torch.optim.SGD([parameter], lr=1.0))
    assert optimizer.grad_buffer is None
    optimizer.step()
    assert parameter.tolist() == [-1.0, -2.0]
    assert parameter.main_grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("clip_grad", [-1.0, math.inf, math.nan])
def test_an_invalid_clipping_limit_is_rejected(clip_grad):
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match="clip_grad must be"):
        FP32Optimizer(torch.optim.SGD([parameter]), clip_grad=clip_grad)


def test_a_closure_is_called_once_before_the_step_with_gradients_enabled():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = FP32Optimizer(torch.optim.SGD([parameter], lr=0.5), clip_grad=0.0)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        (3 * parameter).sum().backward()

    with torch.no_grad():
        report = optimizer.step(closure)
    assert calls == [True]
    assert (report.is_applied, report.grad_norm) == (True, 3.0)
    assert parameter.item() == 1 - 0.5 * 3


def test_clipping_by_the_sum_of_norms_follows_its_definition():
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([one, two], lr=1.0)
    optimizer = FP32Optimizer(inner, clip_grad=5.0, gradient_norm="sum_of_norms")
    set_grad(one, [3.0, 4.0])
    set_grad(two, [0.0, 15.0])
    _, norm, _ = optimizer.step()
    assert norm == pytest.approx(20.0, rel=1e-6)  # together they have √250
    assert one.tolist() == pytest.approx([-0.75, -1.0], rel=1e-5)
    assert two.tolist() == pytest.approx([0.0, -3.75], rel=1e-5)


@pytest.mark.parametrize("has_main_grad", [True, False])
def test_the_sum_of_norms_is_unscaled_and_a_bad_gradient_skips_the_step(has_main_grad):
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    optimizer = half_optimizer(
        None,
        torch.optim.SGD([one, two], lr=1.0),
        grad_scaler=ConstantGradScaler(16.0),
        gradient_norm="sum_of_norms",
        params_have_main_grad=has_main_grad,
    )
    optimizer.scale_loss((one.float() * torch.tensor([3.0, 4.0])).sum() + two.float().sum()).backward()
    assert optimizer.step() == (True, 6.0, None)
    optimizer.scale_loss(two.float().sum() * math.inf).backward()
    assert optimizer.step() == (False, None, None)
    assert one.tolist() == [-3.0, -4.0]


def test_an_unknown_norm_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"unknown gradient_norm 'sum': .*known: global, sum_of_norms"):
        FP32Optimizer(
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), clip_grad=0.0, gradient_norm="sum"
        )


def test_before_step_hooks_receive_the_scale_and_their_gradients_are_clipped():
    parameter = torch.nn.Parameter(torch.zeros(1))
    scales = []

    def add(loss_scale):
        scales.append(loss_scale)
        parameter.main_grad.add_(3.0 * loss_scale)

    scaler = DynamicGradScaler(8.0, growth_interval=1)
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = half_optimizer(None, inner, grad_scaler=scaler, clip_grad=1.0, before_step=add)
    _, norm, _ = optimizer.step()
    assert norm == 3.0
    assert parameter.item() == pytest.approx(-1.0, abs=1e-2)
    optimizer.step()
    assert scales == [8.0, 16.0]  # the scale of the gradients that are there, before it grows


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("gradient", [1.0, 100.0], ids=["plain", "clipped"])
def test_a_group_with_lr_scale_moves_as_with_that_learning_rate(is_fused, gradient):
    runs = []
    for arguments in ({"lr": 0.1, "lr_scale": 0.25}, {"lr": 0.025}):
        scaled, plain = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        inner = torch.optim.AdamW(
            [{"params": [scaled], **arguments}, {"params": [plain]}], lr=0.1, fused=is_fused
        )
        optimizer = FP32Optimizer(inner, clip_grad=2.0)
        for _ in range(3):
            set_grad(scaled, torch.full((3,), gradient))
            set_grad(plain, torch.full((3,), gradient))
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == arguments["lr"]
        runs.append([scaled.tolist(), plain.tolist()])
    assert runs[0] == runs[1]
    assert runs[0][0] > runs[0][1]


def test_schedulers_see_lr_alone_and_lr_scale_survives_a_state_dict():
    def make():
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = FP32Optimizer(torch.optim.SGD([parameter], lr=1.0), clip_grad=0.0)
        return parameter, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    parameter, optimizer, scheduler = make()
    optimizer.param_groups[0]["lr_scale"] = 0.1
    for _ in range(2):
        set_grad(parameter, [1.0])
        optimizer.step()
        scheduler.step()
    assert parameter.item() == pytest.approx(-0.1 - 0.05, rel=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert learning_rate(optimizer.param_groups[0]) == 0.025
    other, fresh, _ = make()
    fresh.load_state_dict(optimizer.state_dict())
    set_grad(other, [1.0])
    fresh.step()
    assert other.item() == pytest.approx(-0.025, rel=1e-6)


def test_the_learning_rate_is_put_back_after_an_inner_step_that_fails():
    class Broken(torch.optim.SGD):
        def step(self):
            raise RuntimeError("broken")

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = FP32Optimizer(Broken([{"params": [parameter], "lr_scale": 0.5}], lr=1.0), clip_grad=0.0)
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("has_main_grad", [True, False])
@pytest.mark.parametrize("has_names", [True, False])
def test_the_report_says_what_the_last_step_did_and_where_it_overflowed(has_main_grad, has_names):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = half_optimizer(
        model,
        grad_scaler=DynamicGradScaler(64.0, hysteresis=1),
        bf16=False,
        params_have_main_grad=has_main_grad,
        named_parameters=[*model.named_parameters(), ("stranger", torch.nn.Parameter(torch.ones(1)))]
        if has_names
        else None,
    )
    assert (optimizer.report, optimizer.found_inf, optimizer.grad_norm) == (None, False, None)
    optimizer.scale_loss(model(torch.ones(3, 2).half()).sum()).backward()
    report = optimizer.step()
    assert report is optimizer.report
    assert (report.is_applied, report.loss_scale, report.overflow) == (True, 64.0, None)
    assert (optimizer.grad_norm, optimizer.found_inf) == (report.grad_norm, False)
    optimizer.scale_loss(model(torch.ones(3, 2).half()).sum()).backward()
    bad = model[0].weight
    (bad.main_grad if has_main_grad else bad.grad)[1, 0] = math.inf
    report = optimizer.step()
    name = "0.weight" if has_names else "parameter 0 of group 0"
    assert str(report.overflow) == f"overflow in {name} on rank 0"
    assert (report.is_applied, report.loss_scale, report.overflow.num_gradients) == (False, 64.0, 4)
    assert (optimizer.found_inf, optimizer.grad_norm, optimizer.loss_scale) == (True, None, 32.0)


@pytest.mark.parametrize("keeps", ["buffer", "grad", "someone else"])
def test_a_gradient_waits_from_backward_to_the_step(keeps):
    used, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    if keeps == "someone else":
        for parameter in (used, unused):
            parameter.main_grad = torch.zeros(2)
            parameter.register_post_accumulate_grad_hook(lambda p: (p.main_grad.add_(p.grad), None)[1])
    inner = torch.optim.SGD([used, unused], lr=1.0)
    optimizer = half_optimizer(None, inner, params_have_main_grad=keeps != "grad")
    for _ in range(2):
        assert not optimizer.has_gradient(used)
        used.sum().backward()
        assert optimizer.has_gradient(used)
        assert not optimizer.has_gradient(unused)
        optimizer.step()


def blocks_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).half()


def scaled_optimizer(model, **options):
    instruments = Instruments(layer_scaling=LayerScaling(model, ["0", "1"]))
    return half_optimizer(
        model, bf16=False, grad_scaler=ConstantGradScaler(16.0), instruments=instruments, **options
    )


def test_layer_scaling_is_refused_where_its_factors_would_stay_in_the_gradients():
    with pytest.raises(UserError, match="params_have_main_grad=True"):
        scaled_optimizer(blocks_of(), params_have_main_grad=False)
    kept = blocks_of()
    GradBuffer(kept.parameters())
    with pytest.raises(UserError, match="layer scaling needs gradients before they are summed: call"):
        scaled_optimizer(kept)


def test_factors_are_saved_and_a_resumed_run_continues_exactly():
    def step(model, optimizer, number):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).half()
        optimizer.scale_loss(model(x).float().square().mean() * 2.0**-6).backward()
        assert optimizer.step().is_applied

    model = blocks_of()
    optimizer = scaled_optimizer(model)
    for number in range(4):
        step(model, optimizer, number)
    state = optimizer.state_dict()
    other = blocks_of()
    resumed = scaled_optimizer(other)
    resumed.load_state_dict(state)
    assert resumed.layer_scaling.factors == optimizer.layer_scaling.factors
    assert min(resumed.layer_scaling.factors.values()) > 1
    for number in range(4, 8):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    del state["layer_scaling"]
    scaled_optimizer(blocks_of()).load_state_dict(state)  # of a run without factors


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("change", ["before", "after two steps", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_contiguous_train_as_in_float64(rule, change, dtype):
    """torch's fused kernels read memory in its order, whatever the strides are."""

    def model_of(dtype):
        torch.manual_seed(0)
        if change == "transposed":
            layer = torch.nn.Linear(12, 8, bias=False)
            layer.weight = torch.nn.Parameter(torch.randn(12, 8).t() * 0.1)
            return torch.nn.Sequential(torch.nn.Flatten(), layer).to(dtype)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 2)).to(dtype)
        return model.to(memory_format=torch.channels_last) if change == "before" else model

    def train(model, step):
        for seed in range(4):
            if seed == 2 and change == "after two steps":
                model.to(memory_format=torch.channels_last)
            x = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            model(x.to(next(model.parameters()).dtype)).square().mean().backward()
            step()

    exact = model_of(torch.float64)
    kinds = {"adam": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.01, weight_decay=0.0),
             "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}  # fmt: skip
    reference = kinds[rule](exact.parameters())
    train(exact, lambda: (reference.step(), reference.zero_grad()))
    model = model_of(dtype)
    settings = {
        "optimizer": rule,
        "lr": 0.01 if rule == "adam" else 0.1,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "adam_eps": 0.01,
    }
    optimizer = get_megatron_optimizer(model, OptimizerConfig(bf16=dtype == torch.bfloat16, **settings))
    assert not all(each.is_contiguous() for each in model.parameters()) or change == "after two steps"
    train(model, optimizer.step)
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(optimizer.master_of(mine).double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_listed_twice_is_refused(dtype):
    embedding, head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    parameters = [each.to(dtype) for each in (embedding, head)]
    inner = torch.optim.AdamW([each.weight for each in parameters])
    kind = FP32Optimizer if dtype == torch.float32 else Float16OptimizerWithFloat16Params
    options = {} if dtype == torch.float32 else {"grad_scaler": None, "bf16": True}
    with pytest.raises(UserError, match=r"parameter 1 of group 0, shape \(6, 4\), occurs twice .* list each"):
        kind(inner, clip_grad=0.0, **options)


def test_a_removed_group_is_refused_because_its_gradients_would_stay():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW([{"params": first.parameters()}, {"params": second.parameters()}])
    optimizer = FP32Optimizer(inner, clip_grad=1.0)
    second(first(torch.ones(1, 2))).sum().backward()
    del optimizer.param_groups[1]
    with pytest.raises(UserError, match="param_groups has 2 parameters, and was built with 4: to stop"):
        optimizer.step()


def test_gradients_that_other_code_holds_keep_their_values_as_in_torch():
    model = torch.nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer, theirs = FP32Optimizer(inner, clip_grad=0.0), torch.optim.AdamW(twin.parameters(), lr=0.1)
    x, kept = torch.randn(4, 3), {id(model): [], id(twin): []}
    for one, step in ((model, optimizer), (twin, theirs)):
        for loss in (lambda y: y.square().mean(), lambda y: y.abs().sum()):
            step.zero_grad()
            loss(one(x)).backward()
            kept[id(one)] += [parameter.grad for parameter in one.parameters()]
        step.step()
        step.zero_grad()
        one(x).sum().backward()
        kept[id(one)] += [parameter.grad for parameter in one.parameters()]
        one.zero_grad()
        one(-x).sum().backward()
    assert len({each.data_ptr() for each in kept[id(model)]}) == 6
    torch.testing.assert_close(kept[id(model)], kept[id(twin)])
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
        assert mine.grad.data_ptr() == mine.main_grad.data_ptr()  # what is not held stays in the buffer
