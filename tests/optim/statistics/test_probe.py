import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.statistics.probe import GradientProbe


class Tower(torch.nn.Module):
    """Two layers after each other, (…, 6) → 3, each fed with known tensors."""

    def __init__(self, first, second, mode="plain"):
        super().__init__()
        self.first, self.second, self.mode = first, second, mode

    def forward(self, x):
        if self.mode == "plain":
            hidden = self.first(x)
        else:
            hidden = checkpoint(self.first, x, use_reentrant=self.mode == "reentrant")
        return self.second(hidden)


def tower(make, mode="plain", seed=0):
    torch.manual_seed(seed)
    return Tower(make(6, 5), make(5, 3), mode)


def linear(rows, cols):
    return torch.nn.Linear(rows, cols)


def conv(rows, cols):
    layer = Conv1D(cols, rows)
    torch.nn.init.normal_(layer.weight, std=0.1)
    return layer


class Plain(torch.nn.Module):
    """A layer of an unknown class, with its weight as (in, out)."""

    def __init__(self, rows, cols):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, cols))

    def forward(self, x):
        return x @ self.weight


def step(model, seed, scale):
    """One micro-batch; returns a float64 recomputation of what a probe takes."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 4, 6).to(dtype).requires_grad_()
    seen = {}
    hooks = [
        layer.register_full_backward_hook(
            lambda _, __, grads, layer=layer: seen.update({layer: grads[0].double()})
        )
        for layer in (model.first, model.second)
    ]
    inputs = {model.first: x.detach().double()}
    hooks.append(
        model.second.register_forward_hook(lambda m, a, _: inputs.update({m: a[0].detach().double()}))
    )
    halves = {}
    for layer in (model.first, model.second):
        hooks.append(layer.weight.register_hook(lambda g, layer=layer: halves.update({layer: g.double()})))
    (model(x).float().sum() * scale).backward()
    for hook in hooks:
        hook.remove()
    total = torch.zeros(5, dtype=torch.float64)
    for layer in seen:
        reference = torch.einsum("bto,bti->oi", seen[layer], inputs[layer])
        reference = reference if reference.shape == halves[layer].shape else reference.T
        total += torch.stack(
            [
                reference.square().sum(),
                halves[layer].square().sum(),
                ((halves[layer] == 0) & (reference.abs() > 1e-44)).sum(),
                (reference.abs() > 1e-44).sum(),
                torch.tensor(halves[layer].numel()),
            ]
        )
    return total


@pytest.mark.parametrize("make", [linear, conv, Plain])
@pytest.mark.parametrize("scale", [1.0, 2.0**-24])
def test_figures_are_those_of_a_float64_recomputation_by_micro_batch(make, scale):
    model = tower(make).half()
    probe = GradientProbe(model)
    GradBuffer(model.parameters())
    probe.is_armed = True
    expected = step(model, 1, scale) + step(model, 2, scale)
    found = probe.take()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    if scale < 1:
        assert found[2] > 0  # something was flushed
        assert found[0] > 0
    else:
        assert math.sqrt(found[0] / found[1]) == pytest.approx(1, abs=1e-3)
    assert probe.take().tolist() == [0.0] * 5  # forgotten


def test_gradients_that_add_up_in_grad_are_compared_each_for_itself():
    model = tower(linear).half()
    probe = GradientProbe(model)
    probe.is_armed = True
    expected = step(model, 1, 1.0) + step(model, 2, 1.0)
    assert model.first.weight.grad is not None
    torch.testing.assert_close(probe.take(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["reentrant", "not reentrant"])
def test_checkpointing_changes_no_figure(mode):
    figures = []
    for each in ("plain", mode):
        model = tower(linear, each).half()
        probe = GradientProbe(model)
        probe.is_armed = True
        torch.manual_seed(1)
        model(torch.randn(4, 6).half().requires_grad_()).float().sum().backward()
        figures.append(probe.take())
    assert torch.equal(*figures)
    assert figures[0][0] > 0


@pytest.mark.parametrize(("recipe", "low", "high"), [("bf16", 0, 1e-4), ("nvfp4", 1e-3, 0.1)])
def test_a_low_bit_layers_ratio_holds_the_noise_of_quantisation(recipe, low, high):
    torch.manual_seed(0)
    model = BitLinear(64, 32, recipe=recipe, dtype=torch.bfloat16)
    probe = GradientProbe(model)
    probe.is_armed = True
    model(torch.randn(128, 64).bfloat16()).float().square().sum().backward()
    reference, half, _, elements, compared = probe.take().tolist()
    assert elements == compared == 64 * 32
    assert low <= abs(reference / half - 1) < high


def test_an_unarmed_probe_hooks_nothing_and_returns_none():
    model = tower(linear)
    probe = GradientProbe(model)
    assert probe.take() is None
    assert not model.first._forward_hooks
    probe.is_armed = True
    probe.is_armed = True
    assert len(model.first._forward_hooks) == 1
    probe.is_armed = False
    assert not model.first._forward_hooks
    assert not model.first.weight._backward_hooks
    step(model, 1, 1.0)
    assert probe.take() is None


def test_layers_that_cannot_be_judged_are_left_out():
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(10, 4),
            "tied": torch.nn.Linear(4, 10),
            "frozen": torch.nn.Linear(4, 3).requires_grad_(False),
            "square": Plain(4, 4),
            "norm": torch.nn.LayerNorm(4),
            "good": torch.nn.Linear(4, 4),
        }
    )
    model["tied"].weight = model["embedding"].weight
    assert GradientProbe(model).names == ["good"]


def test_a_layer_used_twice_and_an_input_written_over_are_left_out():
    layer = BitLinear(16, 16, recipe="nvfp4", dtype=torch.bfloat16)  # keeps codes, so its input may change
    probe = GradientProbe(layer)
    probe.is_armed = True
    layer(layer(torch.randn(4, 16).bfloat16())).float().sum().backward()
    assert probe.take().tolist() == [0.0] * 5
    x = torch.randn(4, 16).bfloat16()
    for is_written in (True, False):
        output = layer(x)
        if is_written:
            x.add_(1)
        output.float().sum().backward()
        assert (probe.take()[0] == 0) == is_written


def test_evaluation_and_integer_inputs_are_not_recorded():
    model = tower(linear)
    probe = GradientProbe(model)
    probe.is_armed = True
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert probe.take().tolist() == [0.0] * 5


def test_a_sample_probes_fewer_layers():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(32)))
    assert len(GradientProbe(model).names) == 32
    assert 1 <= len(GradientProbe(model, sample=0.1).names) <= 6
    assert GradientProbe(model, sample=1e-9).names == ["0"]


def test_a_model_without_a_layer_to_probe_is_refused():
    with pytest.raises(UserError, match="no linear layer"):
        GradientProbe(torch.nn.Embedding(3, 4))
