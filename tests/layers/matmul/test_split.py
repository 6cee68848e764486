"""Products of split operands against the same operands put together again in float64."""

import numpy as np
import pytest
import torch

from megalowbit.layers.layer_recipe import OPERAND_FIELDS, PRODUCTS
from megalowbit.layers.matmul import function
from megalowbit.layers.matmul.context import MatmulContext
from megalowbit.layers.matmul.function import lowbit_linear
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.spectral import split as split_module
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.split import right_factor, scaled_left, split
from megalowbit.spectral.state import SplitState

SIGNS = 0b1011_0010_0110_1101
NAME = "nvfp4e2m1bnosr"
SPLITS = {
    "grad_output": {"split_grad_output": {"rank": 4}},
    "input": {"split_input": {"rank": 4}},
    "weight": {"split_weight": {"rank": 4}},
    "mean": {"split_input": {"method": "mean"}, "split_grad_output": {"method": "mean"}},
    "all": {
        f"split_{role}": {"rank": rank} for role, rank in (("input", 3), ("weight", 2), ("grad_output", 5))
    },
    "gains": {
        "split_input": {"rank": 8, "gains": "ysche"},
        "split_grad_output": {"rank": 8, "gains": "ysche_seed", "order": "seed"},
    },
    "bf16 factors": {"split_input": {"rank": 4, "q_factors": "fp32"}, "split_grad_output": {"rank": 4}},
    "channels": {
        "split_input": {"method": "channels", "rank": 4, "order": "seed", "q_factors": "mxfp8e4m3b"},
        "split_weight": {"method": "channels", "rank": 2},
    },
}
LAYOUTS = {
    "single copy": {},
    "per gemm": {"layout": "per_gemm"},
    "hadamard": {"layout": "per_gemm", "hadamard": True},
    "hadamard of all": {"layout": "per_gemm", "hadamard": ["output", "grad_input", "grad_weight"]},
}
SHAPES = [(32, 48, 64), (13, 33, 21), (3, 16, 5)]


def key(role):
    return RandomStream(5).key("layer", role)


def context_with(chosen, dtype, sizes, **kwargs):
    states = {}
    return MatmulContext(
        recipe=chosen,
        compute_dtype=dtype,
        random_key=lambda role, device: key(role),
        hadamard_signs=SIGNS,
        step=1,
        sizes=sizes,
        split_state=lambda role: states.setdefault(role, SplitState()),
        **kwargs,
    )


def own_recipe(name, changes):
    return recipe({**dict.fromkeys(OPERAND_FIELDS, name), **changes})


def operands(tokens, cols, rows, dtype):
    generator = torch.Generator().manual_seed(tokens + cols)

    def decaying(m, n):
        noise = torch.randn(m, n, generator=generator)
        return noise + 10 * torch.randn(m, 2, generator=generator) @ torch.randn(2, n, generator=generator)

    x = decaying(tokens, cols).to(dtype).requires_grad_()
    w = (decaying(rows, cols) * 0.05).to(dtype).requires_grad_()
    g = (decaying(tokens, rows) * 1e-3).to(dtype)
    b = torch.randn(rows, generator=generator).to(dtype).requires_grad_()
    return x, w, b, g


def hadamard_matrix(size):
    block = np.array(
        [[(-1.0) ** ((SIGNS >> i & 1) + (i & j).bit_count()) / 4 for j in range(16)] for i in range(16)]
    )
    return np.kron(np.eye(size // 16), block)


class Reference:
    """An operand as the recipe rounds it, put together in float64: gain · Q(residual) + U·S·Vᵀ."""

    def __init__(self, tensor, settings, role, sizes, quantizer_name):
        self.name = quantizer_name
        matrix = tensor.detach()
        self.low, self.gain = np.zeros(matrix.shape), 1.0
        if settings is not None:
            found = split(
                matrix,
                settings,
                SplitState(),
                rank=settings.rank_of(*sizes),
                step=1,
                is_replay=False,
                random_key=key(f"{role}_split"),
            )
            dtype = torch.float32 if matrix.dtype == torch.float16 else matrix.dtype
            left, right = scaled_left(found.left, found.values, dtype), right_factor(found.right, dtype)
            self.low = left.double().numpy() @ right.double().numpy()
            matrix, self.gain = found.residual, found.residual_gain
        self.residual = matrix

    def along(self, axis, is_transformed=False):
        """In blocks along an axis; after the Hadamard transform along it, in that basis."""
        matrix, low = self.residual.float(), self.low
        if axis == 0:
            matrix, low = matrix.t(), low.T
        if is_transformed:
            padding = ((0, 0), (0, -matrix.shape[1] % 16))
            basis = hadamard_matrix(matrix.shape[1] + padding[1][1])
            # the package's own transform: a number at a tie would be rounded the other way
            matrix = hadamard(torch.from_numpy(np.pad(matrix.numpy(), padding)), SIGNS)
            low = np.pad(low, padding) @ basis
        result = self.gain * self._rounded(matrix) + low
        return result if axis == 1 else result.T

    def _rounded(self, matrix):
        quantized = quantizer(self.name).quantize(matrix)
        scale = 1.0 if quantized.operand_scale is None else quantized.operand_scale.double().item()
        return quantized.operand(torch.float64).numpy() * scale


def close(got, expected, relative):
    assert np.abs(got.detach().double().numpy() - expected).max() <= relative * np.abs(expected).max() + 1e-30


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_products_are_those_of_the_operands_put_together(splits, layout, shape):
    check(own_recipe(NAME, {**splits, **layout}), shape, torch.float32, 2e-5)


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_gemms_that_add_to_the_thin_products_give_the_same_products(splits, monkeypatch):
    monkeypatch.setattr(function, "can_start_from", lambda *_: True)  # as on a GPU
    check(own_recipe(NAME, splits), (32, 48, 64), torch.float32, 2e-5)


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_factors_decoded_once_give_the_same_products(splits, monkeypatch):
    monkeypatch.setattr(split_module, "is_decoded_once", lambda device: True)  # as on a GPU
    monkeypatch.setattr(function, "can_start_from", lambda *_: True)
    for dtype, relative in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        check(own_recipe(NAME, splits), (32, 48, 64), dtype, relative)


def test_a_bias_in_fp32_is_not_rounded_before_it_is_added(monkeypatch):
    x, w, _, _ = operands(32, 48, 64, torch.bfloat16)
    bias = torch.full((64,), 300.25)  # bf16 has 300 or 302
    chosen = own_recipe(NAME, SPLITS["input"])
    found = []
    for may_start in (False, True):
        monkeypatch.setattr(function, "can_start_from", lambda *_, answer=may_start: answer)
        found.append(lowbit_linear(x, w, bias, context_with(chosen, torch.bfloat16, (48, 64))))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_half_precision_layers_round_results_and_thin_products_only(layout, dtype):
    check(own_recipe(NAME, {**SPLITS["all"], **layout}), (32, 48, 64), dtype, 2e-2)


@pytest.mark.parametrize("name", ["mxfp4e2m1bnosr", "int8b", "nvfp4e2m1bnosr:tile16"])
def test_any_format_can_hold_the_residual(name):
    check(own_recipe(name, SPLITS["gains"]), (32, 48, 64), torch.float32, 2e-5)


def check(chosen, shape, dtype, relative):
    x, w, b, g = operands(*shape, dtype)
    sizes = shape[1], shape[2]
    output = lowbit_linear(x, w, b, context_with(chosen, dtype, sizes))
    output.backward(g)
    name = chosen.q_forward_input
    rx, rw, rg = (
        Reference(tensor, getattr(chosen, f"split_{role}"), role, sizes, name)
        for tensor, role in ((x, "input"), (w, "weight"), (g, "grad_output"))
    )
    of_output, of_input, of_weight = (each in chosen.transformed_products for each in PRODUCTS)
    backward = 0 if chosen.layout == "per_gemm" else 1  # axis of the blocks of what forward keeps
    bias = b.detach().double().numpy()
    close(output, rx.along(1, of_output) @ rw.along(1, of_output).T + bias, relative)
    close(x.grad, rg.along(1, of_input) @ rw.along(backward, of_input), relative)
    close(w.grad, rg.along(backward, of_weight).T @ rx.along(backward, of_weight), relative)
    close(b.grad, g.double().numpy().sum(0), max(relative, 1e-2 if dtype != torch.float32 else relative))


def test_the_observer_hears_of_the_residual_with_the_norm_of_the_whole():
    x, w, _, g = operands(64, 48, 64, torch.float32)
    seen = {}
    chosen = own_recipe(NAME, {"split_grad_output": {"rank": 4}})
    context = context_with(
        chosen, torch.float32, (48, 64), observe=lambda role, counts, error: seen.update({role: error})
    )
    lowbit_linear(x, w, None, context).backward(g)
    assert seen["grad_output"][1].item() == pytest.approx(g.double().square().sum().item(), rel=0.02)
    residual_noise = seen["grad_output"][0].item()
    whole = quantizer(NAME).quantize(g, with_counts=True).error[0].item()
    assert residual_noise < 0.2 * whole


def test_a_split_saves_codes_and_not_the_operand():
    x, w, _, _ = operands(512, 48, 64, torch.bfloat16)
    kept = []
    chosen = own_recipe(NAME, {"split_input": OperandSplit(rank=4)})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lowbit_linear(x, w, None, context_with(chosen, torch.bfloat16, (48, 64)))
    bits = 8 * sum(t.nbytes for t in kept) / x.numel()
    assert bits < 4.5 * (1 + 4 / 48 + 64 / 512) + 1  # residual, factors, weight; scales of partial blocks


def test_non_finite_operands_stay_visible():
    chosen = own_recipe(NAME, SPLITS["all"])
    for bad in (float("inf"), float("nan")):
        x, w, _, g = operands(32, 48, 64, torch.float32)
        context = context_with(chosen, torch.float32, (48, 64))
        g[3, 5] = bad
        lowbit_linear(x, w, None, context).backward(g)
        assert not w.grad.isfinite().all()
        assert not x.grad.isfinite().all()
