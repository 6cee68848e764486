"""Gradients that the replays of a CUDA graph add, while the host's Python does not run.

Captures are simulated on a CPU. The reference is a plain model that runs each step eagerly.
"""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from simulated_graphs import Device

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.optimizers.mixed_precision import FP32Optimizer

REFUSAL = r"a parameter\.grad was (set to None|replaced), but a CUDA graph adds .* optimizer\.zero_grad\(\)"


class Captured:
    """A model with a buffer whose micro-batch is a graph, and its twin that runs eagerly without a buffer."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        self.twin = copy.deepcopy(self.model)
        self.buffer = GradBuffer(self.model.parameters())
        self.x = torch.randn(4, 6)
        self.run(self.model)
        self.buffer.zero()
        with device.capture() as self.graph:
            self.run(self.model)

    def run(self, model):
        model(self.x).square().sum().backward()

    def micro_batch(self, seed):
        self.x.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        self.graph.replay()
        self.run(self.twin)

    def check(self):
        self.buffer.collect()
        for one, two in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert two.grad.any()
            torch.testing.assert_close(one.main_grad, two.grad)
            torch.testing.assert_close(one.grad, two.grad)


@pytest.fixture(autouse=True)
def _operations_of_torch(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)  # only these are recorded


@pytest.fixture
def captured():
    device = Device()
    with device.active():
        yield Captured(device)


CLEARING = {
    "buffer": lambda run: run.buffer.zero(),
    "parts of the buffer": lambda run: [run.buffer.zero([each]) for each in run.model.parameters()],
    "model, zeros": lambda run: run.model.zero_grad(set_to_none=False),
    "None, then the buffer": lambda run: (run.model.zero_grad(), run.buffer.zero()),
}


@pytest.mark.parametrize("way", CLEARING)
def test_replays_add_up_between_clears(captured, way):
    for step in range(4):
        for micro_batch in range(2):
            captured.micro_batch(2 * step + micro_batch)
        captured.check()
        CLEARING[way](captured)
        assert not captured.buffer.flat.any()
        captured.twin.zero_grad()


@pytest.mark.parametrize("is_first", [True, False], ids=["first step", "after a clear"])
@pytest.mark.parametrize("is_replayed", [True, False], ids=["before a replay", "after all replays"])
def test_a_clear_by_none_is_an_error_and_not_a_lost_gradient(captured, is_first, is_replayed):
    captured.micro_batch(0)
    captured.check()
    if not is_first:
        captured.buffer.zero()
        captured.micro_batch(1)
    captured.model.zero_grad()
    if is_replayed:
        captured.micro_batch(2)
    for call in (captured.buffer.collect, captured.buffer.before_reduction):
        with pytest.raises(UserError, match=REFUSAL):
            call()
    captured.buffer.zero()  # the remedy
    captured.twin.zero_grad()
    captured.micro_batch(3)
    captured.check()


def test_a_gradient_set_by_hand_is_an_error_and_one_changed_in_place_counts(captured):
    captured.micro_batch(0)
    for model in (captured.model, captured.twin):
        model[0].weight.grad.mul_(0.5)
    captured.check()
    captured.model[0].weight.grad = torch.ones(5, 6)
    with pytest.raises(UserError, match=REFUSAL):
        captured.buffer.collect()


@pytest.mark.parametrize("grad", [None, torch.ones(5, 6)], ids=["cleared", "replaced"])
def test_a_change_that_a_capture_would_repeat_is_an_error(grad):
    device = Device()
    with device.active():
        captured = Captured(device)
        captured.buffer.detach()
        captured.buffer = GradBuffer(captured.model.parameters())  # knows of no graph
        captured.run(captured.model)
        captured.model[0].weight.grad = grad
        with pytest.raises(UserError, match=REFUSAL), device.capture():
            captured.run(captured.model)


def test_only_replays_that_add_something_are_gradients(captured):
    captured.buffer.zero()
    assert not captured.buffer.has_gradients()
    captured.micro_batch(0)
    assert captured.buffer.has_gradients()
    captured.buffer.detach()
    assert all(each.grad is None for each in captured.model.parameters())
    captured.run(captured.model)
    captured.model.zero_grad()
    assert all(each.grad is None for each in captured.model.parameters())


@pytest.mark.parametrize("layer_adds", [False, True])
def test_the_step_of_an_optimizer_names_the_parameter_that_was_cleared(layer_adds):
    device = Device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    if layer_adds:
        mlb.convert(model, "bf16")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = FP32Optimizer(inner, clip_grad=0.0, named_parameters=model.named_parameters())
    x = torch.randn(32, 32)
    with device.active():
        model(x).sum().backward()
        optimizer.zero_grad()
        with device.capture() as graph:
            model(x).sum().backward()
        norms = []
        for _ in range(3):
            graph.replay()
            norms.append(optimizer.step().grad_norm)
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)  # of a linear function
        assert norms[0] > 1
        model.zero_grad()
        graph.replay()
        with pytest.raises(UserError, match=r"0\.(weight|bias)\.grad was set to None, but a CUDA graph"):
            optimizer.step()
        optimizer.zero_grad()
        graph.replay()
        assert optimizer.step().grad_norm == pytest.approx(norms[0], rel=1e-5)
