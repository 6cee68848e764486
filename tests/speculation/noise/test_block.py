import math

import pytest
import torch
from quick_cases import every_value

from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.speculation.noise.block import Blocks, clean_error, largest_error, widening
from megalowbit.speculation.noise.grid import Grid

NAMES = (
    "nvfp4e2m1bnosr",
    "nvfp4e2m1b",
    "nvfp4e2m1b:unbiased",
    "nvfp4e2m1bnosr:fp32_scale",
    "mxfp4e2m1bnosr",
    "mxfp4e2m1b",
    "mxfp4e2m1bnosr:floor",
    "int8b",
    "int4b:sr",
    "fp8e4m3b:block32",
    "int8e5m2b",
    "int8e5m2b:sr",
    "fp4e2m1bnosr:tile16",
)


def blocks_of(name):
    encoding = quantizer(name).encoding
    grid = Grid(encoding.format.element.name, encoding.is_stochastic)
    size = math.prod(encoding.format.block)
    return Blocks(grid, size, encoding.format.scale, encoding.scale_rounding, encoding.is_power_of_two)


def errors(name, x):
    return (quantizer(name)(x, random_key=RandomKey(5)).double() - x.double()).square()


def gaussian(seed=0):
    return torch.randn(1024, 1024, generator=torch.Generator().manual_seed(seed))


@every_value(name=NAMES, center=[0.0, 0.6, -3.0])
def test_a_clean_block_errs_as_the_quantizer_does(name, center):
    x = gaussian() + center
    assert clean_error(blocks_of(name), 1.0, center, x.abs().max().item()) == pytest.approx(
        errors(name, x).mean().item(), rel=0.05
    )


@every_value(name=NAMES, center=[5.0, -40.0])
def test_a_clean_block_far_from_zero(name, center):
    x = gaussian() + center
    found = clean_error(blocks_of(name), 1.0, center, x.abs().max().item())
    assert found == pytest.approx(errors(name, x).mean().item(), rel=0.12)


@pytest.mark.parametrize("name", NAMES)
def test_a_constant(name):
    for value in (5.0, -3.3):
        found = clean_error(blocks_of(name), 0.0, value, 6.6)
        x = torch.full((64, 64), value)
        measured = quantizer(name).quantize(x, random_key=RandomKey(5), tensor_amax=6.6).dequantize() - x
        assert found == pytest.approx(measured.double().square().mean().item(), rel=0.12, abs=1e-12)


@pytest.mark.parametrize("sigma", [1.0, 1.2, 1.5, 1.8, 2.3])
def test_power_of_two_scales_depend_on_where_sigma_stands_in_an_octave(sigma):
    for name in ("mxfp4e2m1bnosr", "mxfp4e2m1bnosr:floor"):
        measured = errors(name, gaussian() * sigma).mean().item()
        assert clean_error(blocks_of(name), sigma, 0.0, 5 * sigma) == pytest.approx(measured, rel=0.05)


def test_other_scales_do_not():
    for name in ("nvfp4e2m1bnosr", "int8e5m2b"):
        blocks = blocks_of(name)
        assert clean_error(blocks, 3.0, 1.5, 15.0) == pytest.approx(9 * clean_error(blocks, 1.0, 0.5, 5.0))


def test_fp32_scales_hold_the_largest_element():
    for name in ("int8b", "int8e5m2b:sr", "fp4e2m1b"):
        assert largest_error(blocks_of(name)) == 0


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "nvfp4e2m1b", "mxfp4e2m1bnosr", "mxfp4e2m1bnosr:floor"])
def test_the_largest_element_errs_by_the_rounding_of_its_scale(name):
    x = gaussian() * 0.01
    largest = torch.exp(torch.rand(1024, 32, generator=torch.Generator().manual_seed(1)) * math.log(64))
    x.view(1024, 32, 32)[:, :, 3] = largest
    x.view(1024, 32, 32)[:, :, 19] = largest  # a block of 16 too has one
    relative = errors(name, x).view(1024, 32, 32)[:, :, 3] / largest.double().square()
    assert largest_error(blocks_of(name)) == pytest.approx(relative.mean().item(), rel=0.1)


def test_power_of_two_scales_widen_the_grid():
    assert widening(blocks_of("nvfp4e2m1b")) == widening(blocks_of("int8b")) == 1
    assert widening(blocks_of("mxfp4e2m1b")) == math.sqrt(2)
    assert widening(blocks_of("mxfp4e2m1b:floor")) == pytest.approx(1.06, abs=0.01)
