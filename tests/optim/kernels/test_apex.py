import sys
from types import ModuleType

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.kernels import apex as apex_kernels
from megalowbit.optim.kernels.cpu import AdamSettings, AdamTensors
from megalowbit.optim.optimizers.inner_step import InnerStep

SHAPES = ((33, 17), (64,), (5,))
IS_AVAILABLE = apex_kernels.is_available  # the fixture replaces it
CLEAN, FLAGGED = torch.tensor(0.0), torch.tensor(1.0)


class StandIn:
    """The documented behaviour of amp_C in plain torch, with a check of each argument."""

    def __init__(self):
        self.launches = []

    def multi_tensor_adam_capturable(self, chunk, flag, tensors, *arguments):
        gradients, weights, *moments = tensors
        assert {tensor.dtype for tensor in weights} == {tensor.dtype for tensor in gradients}
        self._step("plain", chunk, flag, gradients, weights, moments, None, *arguments)

    def multi_tensor_adam_capturable_master(self, chunk, flag, tensors, *arguments):
        gradients, weights, exp_avgs, exp_avg_sqs, masters = tensors
        assert {tensor.dtype for tensor in weights} == {tensor.dtype for tensor in gradients}
        assert {tensor.dtype for tensor in masters} == {torch.float32}
        self._step("master", chunk, flag, gradients, weights, (exp_avgs, exp_avg_sqs), masters, *arguments)

    def _step(
        self, name, chunk, flag, gradients, weights, moments, masters,
        lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale,
    ):  # fmt: skip
        self.launches.append((name, len(gradients)))
        assert chunk == 65536
        for number, dtype in ((flag, torch.int32), (step, torch.int32), (lr, torch.float32), (inv_scale, torch.float32)):  # noqa: E501  # fmt: skip
            assert number.dtype == dtype
            assert number.shape == (1,)
        assert mode in (0, 1)
        assert bias_correction == 1
        if flag.item() == 1:
            return
        corrections = 1 - beta1 ** step.item(), 1 - beta2 ** step.item()
        for i, gradient in enumerate(gradients):
            weight = (masters or weights)[i]
            unscaled = gradient.float() * inv_scale
            if mode == 0:
                unscaled = unscaled + weight_decay * weight
            moments[0][i].copy_(beta1 * moments[0][i] + (1 - beta1) * unscaled)
            moments[1][i].copy_(beta2 * moments[1][i] + (1 - beta2) * unscaled**2)
            update = moments[0][i] / corrections[0] / ((moments[1][i] / corrections[1]).sqrt() + epsilon)
            if mode == 1:
                update = update + weight_decay * weight
            weight.copy_(weight - lr * update)
            weights[i].copy_(weight)
            gradient.copy_(unscaled)


def multi_tensor_applier(launch, flag, tensors, *arguments):
    return launch(65536, flag, tensors, *arguments)


@pytest.fixture
def amp_c(monkeypatch):
    """An apex package that can be imported and supports tensors on every device."""
    stand_in = StandIn()
    amp_c = ModuleType("amp_C")
    vars(amp_c).update({name: getattr(stand_in, name) for name in dir(stand_in) if name.startswith("multi")})
    apply = ModuleType("apex.multi_tensor_apply")
    apply.multi_tensor_applier = multi_tensor_applier
    apex = ModuleType("apex")
    apex.multi_tensor_apply = apply
    for name, module in (("amp_C", amp_c), ("apex", apex), ("apex.multi_tensor_apply", apply)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(apex_kernels, "_library", apex_kernels._library.__wrapped__)
    monkeypatch.setattr(apex_kernels, "is_available", lambda device: apex_kernels._library() is not None)
    monkeypatch.setattr(InnerStep, "_fits_one_pass", lambda step, master: False)
    return stand_in


def numbers(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def parameters():
    return [torch.nn.Parameter(tensor) for tensor in numbers(0)]


def settings(**changes):
    hyper = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    return AdamSettings(**{"is_decoupled": True, **hyper, **changes})


def items(dtype, half, step=0.0, **changes):
    return [
        AdamTensors(
            master=master,
            gradient=gradient.clone(),
            exp_avg=torch.zeros_like(master),
            exp_avg_sq=torch.zeros_like(master),
            step=torch.tensor(step),
            half=None if half is None else torch.zeros(master.shape, dtype=half),
            settings=settings(**changes),
        )
        for master, gradient in zip(numbers(0), numbers(1, dtype), strict=True)
    ]


PAIRS = [(torch.float32, None), (torch.float16, None)] + [
    (dtype, half) for half in (torch.float16, torch.bfloat16) for dtype in (torch.float32, half)
]


@pytest.mark.parametrize(("dtype", "half"), PAIRS)
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_a_step_is_that_of_torch(amp_c, dtype, half, is_decoupled):
    masters = parameters()
    optimizer = (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(
        masters, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
    )
    for master, gradient in zip(masters, numbers(1, dtype), strict=True):
        master.grad = gradient.float() / 8
    optimizer.step()
    mine = items(dtype, half, is_decoupled=is_decoupled)
    with torch.no_grad():
        apex_kernels.adam_step(apex_kernels.TensorLists().of(mine), torch.tensor(8.0), CLEAN)
    assert amp_c.launches == [("master" if half is not None and dtype == half else "plain", 3)]
    for item, master in zip(mine, masters, strict=True):
        torch.testing.assert_close(item.master, master.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(item.exp_avg_sq, optimizer.state[master]["exp_avg_sq"])
        assert item.step == 1
        assert half is None or torch.equal(item.half, item.master.to(half))


def test_a_flagged_step_changes_no_state(amp_c):
    mine = items(torch.float16, torch.float16, step=4.0)
    apex_kernels.adam_step(apex_kernels.TensorLists().of(mine), torch.tensor(8.0), FLAGGED)
    for item, master in zip(mine, numbers(0), strict=True):
        assert torch.equal(item.master, master)
        assert not item.exp_avg.any()
        assert item.step == 4


def test_lists_hold_equal_settings_and_counts_and_counts_are_read_only_when_needed():
    young, old = items(torch.float32, None), items(torch.float32, None, step=7.0)
    fast = items(torch.float32, None, learning_rate=0.5)
    lists = apex_kernels.TensorLists()
    assert lists.of([*young, *old, *fast]) == [young, old, fast]
    young[0].step.fill_(3.0)  # which does not happen: those that step together stay together
    assert lists.of([*young, *old, *fast]) == [young, old, fast]
    assert lists.of(young) == [young[:1], young[1:]]


def test_inner_steps_by_apex_follow_torch_over_several_steps(amp_c):
    masters, theirs = parameters(), parameters()
    halves = [master.detach().half() for master in masters]
    optimizer, reference = (
        torch.optim.AdamW([{"params": each[:1], "lr": 0.1}, {"params": each[1:]}], lr=0.01)
        for each in (masters, theirs)
    )
    step = InnerStep(optimizer, dict(zip(masters, halves, strict=True)))
    assert step.path == "apex"
    for number in range(3):
        given = numbers(10 + number)
        for i, gradient in enumerate(given):
            is_missing = number == 1 and i == 2
            masters[i].grad = None if is_missing else gradient * 4
            theirs[i].grad = None if is_missing else gradient
        step.run(torch.tensor(4.0), CLEAN)
        reference.step()
    for master, half, expected in zip(masters, halves, theirs, strict=True):
        torch.testing.assert_close(master, expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(half, master.detach().half())
        assert optimizer.state[master]["step"] == reference.state[expected]["step"]
    assert amp_c.launches[0] == ("plain", 1)


def test_an_unrelated_or_old_apex_package_is_ignored(amp_c, monkeypatch):
    assert apex_kernels._library() is not None
    monkeypatch.delattr(sys.modules["amp_C"], "multi_tensor_adam_capturable_master")
    assert apex_kernels._library() is None
    monkeypatch.setitem(sys.modules, "amp_C", ModuleType("amp_C"))
    monkeypatch.delitem(sys.modules, "apex.multi_tensor_apply")
    assert apex_kernels._library() is None  # `apex` is no package of this kind


def test_apex_is_used_only_if_asked_for(amp_c, monkeypatch):
    monkeypatch.setattr(apex_kernels, "is_available", IS_AVAILABLE)
    gpu = torch.device("cuda")
    monkeypatch.delenv("MEGALOWBIT_APEX", raising=False)
    assert not apex_kernels.is_available(gpu)
    monkeypatch.setenv("MEGALOWBIT_APEX", "1")
    assert apex_kernels.is_available(gpu)
    assert not apex_kernels.is_available(torch.device("cpu"))
    monkeypatch.delattr(sys.modules["amp_C"], "multi_tensor_adam_capturable_master")
    with pytest.raises(UserError, match=r"MEGALOWBIT_APEX=1, but NVIDIA's apex .* cannot be imported"):
        apex_kernels.is_available(gpu)
    monkeypatch.setenv("MEGALOWBIT_APEX", "yes")
    with pytest.raises(UserError, match="MEGALOWBIT_APEX='yes' must be 1"):
        apex_kernels.is_available(gpu)
