"""A chooser, probe and observer that record every call, and a layer of 48 × 32 to run with them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.layers.conversion.convert import convert, set_chooser
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.quantized_tensor import QuantizedTensor

MIXED = recipe(
    {
        "base": "fp8",
        "name": "mixed",
        "q_backward_weight": "int8",
        "q_backward_outputgrad": "int8",
        "q_backward_input": "fp32",
        "q_backward_outputgrad_for_weight": "fp32",
    }
)

ONE_USE = ["input", "weight", "output", "grad_output", "grad_input", "grad_weight"]


class RecordingProbe:
    """Records copies of all that it observes; returns `answer` of the largest magnitude."""

    def __init__(self, answer=lambda largest: None):
        self.answer, self.events, self.shown = answer, [], {}

    def observe_operand(self, role, operand, full_amax=None):
        assert not operand.requires_grad
        assert not torch.is_autocast_enabled("cpu")
        self.events.append(role)
        self.shown[role] = operand.clone()
        magnitudes = operand.float().abs()
        return self.answer(magnitudes.amax() if operand.numel() else torch.zeros(()))

    def observe_product(self, product, left, right, result, bias):
        assert not result.requires_grad
        assert not torch.is_autocast_enabled("cpu")
        self.events.append(product)
        self.shown[product] = matrix_of(left), matrix_of(right), result.clone(), bias


def matrix_of(factor):
    """The matrix a factor stands for, in float64."""
    tensor = factor.tensor
    values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.operand()
    values = values.double()
    return (values.t() if factor.is_transposed else values).clone()


class RecordingChooser:
    """Gives every layer the recipe `chosen` (None: the layer's own), and every use a separate probe."""

    def __init__(self, chosen=None, answer=lambda largest: None, has_probe=lambda layer, use: True):
        self.chosen, self.answer, self.has_probe = chosen, answer, has_probe
        self.asked, self.probes = [], []

    def recipe(self, layer, base):
        self.asked.append(layer)
        return base if self.chosen is None else self.chosen

    def probe(self, layer, use):
        assert use.is_training
        assert not use.is_replay
        if not self.has_probe(layer, use):
            return None
        self.probes.append((layer, RecordingProbe(self.answer)))
        return self.probes[-1][1]

    @property
    def events(self):
        return [probe.events for _, probe in self.probes]


class RecordingObserver:
    def __init__(self):
        self.seen = []

    def observe(self, layer, role, counts, error):
        self.seen.append((role, counts, error))


class Checkpointed(nn.Module):
    def __init__(self, inner, use_reentrant, times=1):
        super().__init__()
        self.inner, self.use_reentrant, self.times = inner, use_reentrant, times

    def forward(self, x):
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return x


def uniform(name):
    fields = ("q_forward_input", "q_forward_weight", "q_backward_input", "q_backward_weight")
    return recipe({**dict.fromkeys(fields, name), "q_backward_outputgrad": name})


def layer_with(chooser, chosen="nvfp4", sizes=(48, 32), dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*sizes))
    convert(model, chosen, seed=3)
    model.to(dtype)
    if chooser is not None:
        set_chooser(model, chooser)
    return model


def tensors(sizes=(48, 32), tokens=20, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, sizes[0], generator=generator).to(dtype).requires_grad_()
    return x, (torch.randn(tokens, sizes[1], generator=generator) * 1e-2).to(dtype)


def results(model, x, g):
    """Output and all gradients of one micro-batch."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    output = model(x)
    output.backward(g)
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def all_equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
