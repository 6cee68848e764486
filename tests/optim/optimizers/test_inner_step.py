import copy
import math
import warnings

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.kernels import apex as apex_kernels
from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.optimizers.inner_step import InnerStep, stepping_at

SHAPES = ((33, 17), (64,), (5,), (128, 40))
CLEAN, FLAGGED = torch.tensor(0.0), torch.tensor(1.0)
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
needs_kernels = pytest.mark.skipif(not cpu_kernels.is_available(), reason="no CPU kernel")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, torch rounds the last elements of a tensor otherwise
    yield
    torch.set_num_threads(before)


def masters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def groups(parameters):
    return [{"params": parameters[:2], "weight_decay": 0.0, "lr": 3e-3}, {"params": parameters[2:]}]


class Trainee:
    """Masters with half weights and an inner optimizer, stepped by `InnerStep`."""

    def __init__(self, make, *, half=torch.float16, split=False):
        self.masters = masters()
        self.halves = [torch.nn.Parameter(master.detach().to(half)) for master in self.masters]
        self.optimizer = make(groups(self.masters) if split else self.masters)
        self.half_gradients = {}
        self.step = InnerStep(
            self.optimizer,
            dict(zip(self.masters, self.halves, strict=True)),
            gradient_of=lambda master: self.half_gradients.get(id(master), master.grad),
        )

    def run(self, given, scale=1.0, found_inf=CLEAN, rates=None, **options):
        self.half_gradients = {}
        for master, gradient in zip(self.masters, given, strict=True):
            master.grad = None
            if gradient is not None:
                scaled = gradient.float().mul(scale).to(gradient.dtype)
                if gradient.dtype == torch.float32:
                    master.grad = scaled
                else:
                    self.half_gradients[id(master)] = scaled
        return self.step.run(torch.tensor(scale), found_inf.clone(), rates, **options)

    def everything(self):
        state = [
            value
            for master in self.masters
            for _, value in sorted(self.optimizer.state[master].items())
            if isinstance(value, torch.Tensor)
        ]
        return [tensor.detach().clone() for tensor in (*self.masters, *self.halves, *state)]


def by_torch(make, steps, *, split=False, rates=None):
    """What the optimizer itself makes of unscaled fp32 gradients: masters and state."""
    parameters = masters()
    optimizer = make(groups(parameters) if split else parameters)
    if rates is not None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for given in steps:
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    return parameters, optimizer


def agrees(trainee, parameters, optimizer, half=torch.float16, **tolerance):
    for mine, weight, master in zip(trainee.masters, trainee.halves, parameters, strict=True):
        torch.testing.assert_close(mine, master, **tolerance)
        assert torch.equal(weight, mine.to(half))
        for name, value in optimizer.state[master].items():
            if value is not None:
                torch.testing.assert_close(trainee.optimizer.state[mine][name], value, **tolerance)


EXACTLY = {"rtol": 0, "atol": 0}
FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "sgd without momentum": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, **ADAMW, amsgrad=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, **ADAMW, maximize=True, fused=True),
}
ONE_PASS = {
    "adamw": lambda p: torch.optim.AdamW(p, **ADAMW, fused=True),
    "adam": lambda p: torch.optim.Adam(p, **ADAMW, fused=True),
    "adam, decoupled": lambda p: torch.optim.Adam(p, **ADAMW, decoupled_weight_decay=True, fused=True),
}
PLAIN = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "damped": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, **ADAMW, foreach=True),
    "a loop, by wish": lambda p: torch.optim.AdamW(p, **ADAMW, fused=False),
}
ALL = [
    *((make, "one_pass") for make in ONE_PASS.values()),
    *((make, "fused") for make in FUSED.values()),
    *((make, "plain") for make in PLAIN.values()),
]
IDS = [*ONE_PASS, *(f"fused {name}" for name in FUSED), *PLAIN]


@needs_kernels
@pytest.mark.parametrize(("make", "path"), ALL, ids=IDS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_every_path_steps_as_the_optimizer_itself_and_rounds_to_the_weights(make, path, half):
    trainee = Trainee(make, half=half, split=True)
    assert trainee.step.path == path
    assert trainee.step.can_defer_host_read == (path != "plain")
    steps = [gradients(0), [None, *gradients(1)[1:]], gradients(2)]
    for given in steps:
        trainee.run(given, scale=1024.0)
    agrees(trainee, *by_torch(make, steps, split=True), half, **EXACTLY)


@needs_kernels
@pytest.mark.parametrize(("make", "path"), ALL, ids=IDS)
def test_half_gradients_are_used_without_a_cast(make, path):
    trainee = Trainee(make)
    steps = [gradients(seed, torch.float16) for seed in range(2)]
    for given in steps:
        trainee.run(given, scale=64.0)
        assert all(master.grad is None for master in trainee.masters)
    in_fp32 = [[gradient.float() for gradient in given] for given in steps]
    agrees(trainee, *by_torch(make, in_fp32), **EXACTLY)


@needs_kernels
@pytest.mark.parametrize(("make", "path"), ALL, ids=IDS)
def test_a_flag_skips_the_step_also_the_first_and_nothing_of_it_remains(make, path):
    trainee = Trainee(make)
    spoiled = gradients(5)
    spoiled[1][3] = math.nan
    trainee.run(spoiled, found_inf=FLAGGED)
    steps = [gradients(0), gradients(1)]
    for given in steps:
        trainee.run(given)
        before = trainee.everything()
        trainee.run(spoiled, found_inf=FLAGGED)
        for now, then in zip(trainee.everything(), before, strict=True):
            assert torch.equal(now, then)
    agrees(trainee, *by_torch(make, steps), **EXACTLY)


@needs_kernels
@pytest.mark.parametrize(("make", "path"), ALL, ids=IDS)
def test_learning_rates_given_for_a_step_replace_those_of_the_groups(make, path):
    trainee = Trainee(make, split=True)
    before = [group["lr"] for group in trainee.optimizer.param_groups]
    trainee.run(gradients(0), rates=[0.5, 0.25])
    assert [group["lr"] for group in trainee.optimizer.param_groups] == before
    agrees(trainee, *by_torch(make, [gradients(0)], split=True, rates=[0.5, 0.25]), **EXACTLY)


@needs_kernels
@pytest.mark.parametrize("make", ONE_PASS.values(), ids=ONE_PASS)
def test_one_pass_and_torch_continue_each_other_bit_by_bit(make):
    steps = [gradients(seed) for seed in range(4)]
    _, whole = by_torch(make, steps)
    parameters, halfway = by_torch(make, steps[:2])
    trainee = Trainee(make)
    for master, parameter in zip(trainee.masters, parameters, strict=True):
        master.data.copy_(parameter)
    trainee.optimizer.load_state_dict(copy.deepcopy(halfway.state_dict()))
    trainee.run(steps[2])
    later = [torch.nn.Parameter(master.detach().clone()) for master in trainee.masters]
    optimizer = make(later)
    optimizer.load_state_dict(copy.deepcopy(trainee.optimizer.state_dict()))
    for parameter, gradient in zip(later, steps[3], strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    for mine, theirs in zip(later, whole.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[mine][name], whole.state[theirs][name])


@needs_kernels
def test_one_pass_is_not_used_for_optimizers_that_it_would_bypass():
    def path(optimizer, half_of=None):
        return InnerStep(optimizer, half_of or {}).path

    def adamw(parameters=None, **options):
        return torch.optim.AdamW(parameters or masters(), **{"lr": 1e-3, **options})

    class OwnAdamW(torch.optim.AdamW):
        pass

    assert path(adamw()) == "one_pass"
    assert path(adamw(lr=torch.tensor(1e-3), fused=True)) == "fused"
    assert path(OwnAdamW(masters(), fused=True)) == "fused"
    assert path(adamw(capturable=True)) == "plain"
    assert path(adamw([torch.nn.Parameter(torch.zeros(3, 4).t())], fused=True)) == "fused"
    assert path(adamw([torch.nn.Parameter(torch.zeros(3).double())])) == "plain"
    parameters = masters()
    strided = {parameters[0]: torch.zeros(17, 33, dtype=torch.float16).t()}
    assert path(adamw(parameters, fused=True), strided) == "fused"
    observed = adamw(fused=True)
    handle = observed.register_step_post_hook(lambda *_: None)
    assert path(observed) == "fused"
    handle.remove()
    assert path(observed) == "one_pass"
    observed.step = lambda: None
    assert path(observed) == "fused"


@needs_kernels
def test_hooks_on_the_inner_optimizer_are_called():
    trainee = Trainee(ONE_PASS["adamw"])
    calls = []
    trainee.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    trainee.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    trainee.run(gradients(0))
    assert calls == ["before", "after"]
    agrees(trainee, *by_torch(ONE_PASS["adamw"], [gradients(0)]), **EXACTLY)


@needs_kernels
def test_torchs_schedulers_see_the_step():
    trainee = Trainee(ONE_PASS["adamw"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, lambda epoch: 1 / (1 + epoch))
    assert trainee.step.path == "one_pass"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            trainee.run(gradients(0))
            scheduler.step()
    assert trainee.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 3)


@needs_kernels
def test_gradients_and_moments_with_other_strides_are_made_contiguous():
    make = ONE_PASS["adamw"]
    trainee = Trainee(make)
    trainee.run(gradients(0))
    state = trainee.optimizer.state[trainee.masters[0]]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    turned = gradients(1)
    turned[0] = turned[0].t().contiguous().t()
    trainee.run(turned)
    agrees(trainee, *by_torch(make, [gradients(0), gradients(1)]), **EXACTLY)


@needs_kernels
@pytest.mark.parametrize(("make", "path"), ALL, ids=IDS)
def test_gradients_are_reported_as_zero_only_if_one_pass_cleared_them(make, path):
    trainee = Trainee(make)
    assert trainee.run(gradients(0), clears_gradients=True) == (path == "one_pass")
    zeros = [not master.grad.any() for master in trainee.masters]
    assert zeros == [path == "one_pass"] * len(zeros)
    agrees(trainee, *by_torch(make, [gradients(0)]), **EXACTLY)
    assert not trainee.run(gradients(1))
    assert all(master.grad.any() for master in trainee.masters)
    assert not trainee.run(gradients(2, torch.float16), clears_gradients=True)
    assert all(gradient.any() for gradient in trainee.half_gradients.values())
    trainee.run(gradients(3), found_inf=FLAGGED, clears_gradients=True)
    assert all(master.grad.any() for master in trainee.masters)


@needs_kernels
def test_a_gradient_whose_copy_was_used_is_not_reported_as_zero():
    trainee = Trainee(ONE_PASS["adamw"])
    turned = gradients(0)
    trainee.run(turned)
    for master, gradient in zip(trainee.masters, gradients(1), strict=True):
        master.grad = gradient
    trainee.masters[0].grad = turned[0].t().contiguous().t()
    assert not trainee.step.run(None, None, clears_gradients=True)
    assert trainee.masters[0].grad.any()


@needs_kernels
def test_a_gradient_or_a_state_of_another_shape_is_refused_and_nothing_is_stepped():
    trainee = Trainee(ONE_PASS["adamw"])
    trainee.run(gradients(0))
    before = trainee.everything()
    smaller = torch.zeros(32, 17)
    trainee.step._gradient_of = lambda master: smaller if master is trainee.masters[0] else master.grad
    with pytest.raises(UserError, match=r"gradient has shape \(32, 17\) .*\(33, 17\)"):
        trainee.step.run(None, None)
    for now, then in zip(trainee.everything(), before, strict=True):
        assert torch.equal(now, then)
    trainee.step._gradient_of = lambda master: master.grad
    trainee.optimizer.state[trainee.masters[1]]["exp_avg"] = torch.zeros(63)
    with pytest.raises(UserError, match=r"exp_avg has shape \(63,\)"):
        trainee.step.run(None, None)


@pytest.mark.parametrize("make", [ONE_PASS["adamw"], FUSED["sgd"], PLAIN["rmsprop"]])
def test_sparse_gradients_are_refused(make):
    trainee = Trainee(make)
    trainee.masters[0].grad = gradients(0)[0].to_sparse()
    with pytest.raises(UserError, match="sparse gradients are not supported"):
        trainee.step.run(torch.tensor(1.0), CLEAN)


@pytest.mark.parametrize("make", [ONE_PASS["adamw"], FUSED["sgd"], PLAIN["rmsprop"]])
def test_without_any_gradient_nothing_happens(make):
    trainee = Trainee(make)
    before = [master.detach().clone() for master in trainee.masters]
    trainee.run([None] * len(SHAPES))
    trainee.step.run(None, None)
    for master, then in zip(trainee.masters, before, strict=True):
        assert torch.equal(master, then)
        assert not trainee.optimizer.state[master]


def test_a_failing_step_leaves_gradients_and_rates_as_they_were():
    def fail(*_):
        raise RuntimeError("inner")

    trainee = Trainee(FUSED["sgd"])
    trainee.optimizer.register_step_pre_hook(fail)
    for master, gradient in zip(trainee.masters, gradients(0), strict=True):
        master.grad = gradient
    kept = [master.grad for master in trainee.masters]
    with pytest.raises(RuntimeError, match="inner"):
        trainee.step.run(torch.tensor(4.0), CLEAN, [0.5])
    assert all(master.grad is grad for master, grad in zip(trainee.masters, kept, strict=True))
    assert trainee.optimizer.param_groups[0]["lr"] == 0.1
    assert not hasattr(trainee.optimizer, "grad_scale")
    assert not hasattr(trainee.optimizer, "found_inf")


def test_without_kernels_torchs_fused_adam_takes_the_step(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)
    trainee = Trainee(ONE_PASS["adamw"])
    assert trainee.step.path == "fused"
    trainee.run(gradients(0), scale=8.0)
    agrees(trainee, *by_torch(ONE_PASS["adamw"], [gradients(0)]), **EXACTLY)


def test_apex_is_not_chosen_on_a_cpu():
    assert not apex_kernels.is_available(torch.device("cpu"))


def test_rates_of_a_step_are_those_of_the_schedule_again_also_after_an_error():
    param_groups, seen = [{"lr": 1.0}, {"lr": 2.0}], []

    def fail():
        with stepping_at(param_groups, [0.5, 2.0]):
            seen.extend(group["lr"] for group in param_groups)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [0.5, 2.0]
    assert [group["lr"] for group in param_groups] == [1.0, 2.0]
