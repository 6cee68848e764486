import math

import fp4_reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer, quantizer_names
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.quantizer import fresh_key

NEAREST, STOCHASTIC, UNBIASED, IDENTITY = "nvfp4e2m1bnosr", "nvfp4e2m1b", "nvfp4e2m1b:unbiased", "fp32"
TILED = "nvfp4e2m1bnosr:tile16"
EVERY_NAME = pytest.mark.parametrize("name", quantizer_names())


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(name: str) -> float:
    """Frobenius, mean of three Gaussians."""
    errors = []
    for seed in range(3):
        x = gaussian(1024, 512, seed=seed)
        errors.append(((quantizer(name)(x, random_key=RandomKey(seed)) - x).norm() / x.norm()).item())
    return sum(errors) / 3


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (5, 7), (17, 33), (2, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nearest_equals_the_brute_force_reference_bit_for_bit(shape, dtype):
    x = gaussian(*shape, seed=sum(shape), dtype=dtype)
    x[0] *= 30
    operand, tensor_scale = fp4_reference.operand(x.float().numpy())
    got = quantizer(NEAREST).quantize(x)
    assert np.array_equal(got.operand(torch.float64).numpy(), operand)
    assert got.tensor_scale.item() == tensor_scale
    assert torch.equal(got.dequantize(), torch.from_numpy(operand).to(dtype))


def test_ties_between_grid_values_go_to_the_even_code():
    # Largest element 6·448: tensor scale 1, block scale 448 and 1, so elements are their own codes.
    x = torch.zeros(1, 32)
    x[0, 0] = 6 * 448
    x[0, 16:24] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x[0, 24:31] = -x[0, 17:24]
    rounded = quantizer(NEAREST)(x)[0, 16:].tolist()
    assert rounded == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        (NEAREST, 0.097),
        ("nvfp4e2m1bnosr:4over6", 0.089),
        ("mxfp4e2m1bnosr", 0.12),
        ("nvfp4e2m1bnosr:tile16", 0.115),
        ("fp6e3m2b", 0.045),
        ("fp8e4m3b", 0.023),
    ],
)
def test_relative_error_on_a_gaussian_meets_the_quality_gate(name, gate):
    assert relative_error(name) <= gate


@pytest.mark.parametrize("name", [UNBIASED, "mxfp4e2m1b:unbiased", "fp4e2m1b:unbiased", "fp8e4m3:unbiased"])
def test_unbiased_stochastic_rounding_has_gain_one_on_a_gaussian(name):
    gains = []
    for seed in range(3):
        x = gaussian(1024, 512, seed=seed)
        gains.append(((quantizer(name)(x, random_key=RandomKey(seed)) * x).sum() / x.square().sum()).item())
    assert sum(gains) / 3 == pytest.approx(1, abs=0.001)


def test_nearest_scales_clip_and_so_lose_a_third_of_a_percent():
    x = gaussian(1024, 512, seed=4)
    gain = (quantizer(STOCHASTIC)(x, random_key=RandomKey(1)) * x).sum() / x.square().sum()
    assert 0.99 < gain.item() < 0.999


def test_the_mean_of_many_draws_is_the_number_itself():
    # Block maxima at exactly 6·scale: nothing saturates.
    x = torch.linspace(-6, 6, 16).mul(448).repeat(8, 1)
    draws = 1500
    total = sum(quantizer(UNBIASED)(x, random_key=RandomKey(3, step)).double() for step in range(draws))
    spread = 448 * 2 / 2 / math.sqrt(8 * draws)  # half the widest gap bounds the standard deviation
    assert (total.mean(0) / draws - x[0].double()).abs().max().item() < 5 * spread


def test_stochastic_rounding_follows_its_key_and_nothing_else():
    x = gaussian(64, 48)
    quantize = quantizer(STOCHASTIC).quantize
    first = quantize(x, random_key=RandomKey(5, 1)).codes
    torch.manual_seed(99)
    assert torch.equal(first, quantize(x, random_key=RandomKey(5, 1)).codes)
    for other in (RandomKey(6, 1), RandomKey(5, 2), RandomKey(5 + 2**40, 1), RandomKey(5, 1 + 2**40)):
        assert not torch.equal(first, quantize(x, random_key=other).codes)


def test_without_a_key_torchs_default_generator_gives_one():
    x = gaussian(64, 48)
    torch.manual_seed(11)
    first = quantizer(STOCHASTIC)(x)
    assert not torch.equal(first, quantizer(STOCHASTIC)(x))
    torch.manual_seed(11)
    assert torch.equal(first, quantizer(STOCHASTIC)(x))
    assert fresh_key() != fresh_key()


def test_nearest_rounding_leaves_torchs_default_generator_alone():
    state = torch.get_rng_state()
    quantizer(NEAREST)(gaussian(4, 16))
    assert torch.equal(torch.get_rng_state(), state)


@EVERY_NAME
@given(leading=st.lists(st.integers(0, 9), min_size=0, max_size=4), cols=st.integers(0, 40))
@settings(deadline=None, max_examples=15)
def test_any_shape_comes_back_with_shape_dtype_and_bounded_error(name, leading, cols):
    x = gaussian(*leading, cols, seed=cols) if leading or cols else torch.tensor(1.5)
    got = quantizer(name).quantize(x, with_counts=True)
    back = got.dequantize()
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    rows = math.prod(x.shape[:-1])
    assert got.operand().shape == (rows, x.shape[-1] if x.dim() else 1)
    assert got.operand(transpose=True).shape == got.operand().shape[::-1]
    assert got.counts[0].item() == x.numel()
    if x.numel():
        # E2M1's widest gap is 2 of 6 (of 4 under a power of two), clipping takes at most 6 %; ternary numbers
        # are off by all but the mean.
        bound = {"1p58bit": 1.0, "mxfp4e2m1b": 0.5}.get(name, 0.35)
        assert (back - x).abs().max().item() <= bound * x.abs().max().item()


@EVERY_NAME
@pytest.mark.parametrize("shape", [(), (5,), (3, 17), (2, 3, 4, 21), (0, 16), (4, 0), (0,)])
def test_odd_and_empty_shapes_are_quantised(name, shape):
    x = gaussian(*shape, seed=1) if shape else torch.tensor(-2.5)
    got = quantizer(name).quantize(x)
    assert got.dequantize().shape == x.shape
    assert got.dequantize().isfinite().all()
    transposed = quantizer(name)
    if not transposed.is_identity:
        rows, cols = got.operand().shape
        assert transposed.quantize_transposed(x).shape == (cols, rows)


@EVERY_NAME
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_elements_stay_visible(name, bad):
    x = gaussian(4, 40)
    x[2, 20] = bad
    assert not quantizer(name)(x)[2, 20].isfinite()
    for nothing_else in (torch.full((2, 16), bad), torch.tensor(bad)):
        assert not quantizer(name)(nothing_else).isfinite().any()


@pytest.mark.parametrize("name", [NEAREST, STOCHASTIC, "mxfp4e2m1b", "fp4e2m1b", "int8b", TILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_elements_spoil_their_block_and_no_other(name, dtype):
    x = gaussian(20, 70, dtype=dtype)
    x[0, 0] = 10  # keeps the tensor's maximum
    clean = quantizer(name)(x, random_key=RandomKey(1))
    x[2, 20] = math.inf
    got = quantizer(name)(x, random_key=RandomKey(1))
    height, width = quantizer(name).encoding.format.block
    spoiled = torch.zeros(20, 70, dtype=torch.bool)
    row, col = 2 // height * height, 20 // width * width
    spoiled[row : row + height, col : col + width] = True
    assert got[spoiled].isnan().all()
    assert torch.equal(got[~spoiled], clean[~spoiled])


def test_a_damaged_shard_shows_even_where_the_maximum_comes_from_elsewhere():
    x = torch.tensor([1.0, math.nan, 2.0])
    for name in (NEAREST, "int8"):
        assert quantizer(name).quantize(x, tensor_amax=torch.tensor(2.0)).dequantize().isnan().any()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e30, 3.4028234663852886e38])
def test_constant_tensors_of_any_magnitude_stay_finite(value):
    x = torch.full((3, 20), value)
    for name in (NEAREST, STOCHASTIC, UNBIASED, "mxfp4e2m1b", "fp4e2m1", "fp8e4m3b"):
        assert quantizer(name)(x).isfinite().all()
    if value == 0 or value > 1e-34:
        for name in (NEAREST + ":fp32_scale", STOCHASTIC + ":fp32_scale", "fp4e2m1"):
            assert torch.allclose(quantizer(name)(x), x, rtol=1e-6, atol=0)


def test_half_precision_extremes_stay_in_range():
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((1, 16), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(quantizer(NEAREST)(x), x)
        small = torch.full((1, 16), torch.finfo(dtype).smallest_normal, dtype=dtype) / 4
        assert quantizer(NEAREST)(small).isfinite().all()


def test_float64_is_quantised_as_fp32_and_keeps_its_dtype():
    x = gaussian(8, 32).double()
    got = quantizer(NEAREST)(x)
    assert got.dtype == torch.float64
    assert torch.equal(got.float(), quantizer(NEAREST)(x.float()))


@pytest.mark.parametrize("shape", [(32, 48), (5, 40), (33, 17)])
def test_a_transposed_tensor_in_tiles_has_the_transposed_codes(shape):
    weight = gaussian(*shape, seed=6)
    straight, turned = quantizer(TILED).quantize(weight), quantizer(TILED).quantize(weight.t())
    assert torch.equal(turned.operand(), straight.operand().t())
    assert torch.equal(turned.scales.view(torch.uint8), straight.scales.view(torch.uint8).t())
    assert turned.tensor_scale == straight.tensor_scale
    assert torch.equal(quantizer(TILED).quantize_transposed(weight).operand(), straight.operand().t())


@pytest.mark.parametrize("name", [NEAREST, STOCHASTIC, "mxfp4e2m1b", "int8"])
def test_quantising_transposed_is_quantising_the_transpose(name):
    x = gaussian(2, 13, 40, seed=7)
    got = quantizer(name).quantize_transposed(x, random_key=RandomKey(8), with_counts=True)
    expected = quantizer(name).quantize(x.view(26, 40).t(), random_key=RandomKey(8), with_counts=True)
    assert got.shape == (40, 26)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.counts, expected.counts)


def test_a_q_scalar_above_one_leaves_headroom_and_below_one_saturates():
    x = gaussian(64, 64)
    saturated = []
    for q_scalar in (0.5, 1.0, 1.25):
        result = quantizer(f"fp4e2m1bnosr:q_scalar={q_scalar}").quantize(x, with_counts=True)
        saturated.append(result.counts[1].item())
        largest = x.view(-1, 16).abs().amax(1) * q_scalar
        assert torch.allclose(result.scales.flatten(), largest / 6, rtol=1e-6)
    assert saturated[0] > 0.1 * x.numel()
    assert saturated[1:] == [0, 0]


def four_over_six(x: np.ndarray) -> np.ndarray:
    """Both candidates by exhaustive search in float64, the smaller squared error wins."""
    S = 1536 / np.abs(x).max()
    result = np.zeros_like(x)
    for row in range(x.shape[0]):
        for col in range(0, x.shape[1], 16):
            block = x[row, col : col + 16]
            tried = []
            for top in (6, 4):
                ratio = np.abs(block).max() * S / top
                scale = min(fp4_reference.E4M3, key=lambda v, ratio=ratio: abs(v - ratio)) / S
                grid = np.array([s * v for v in fp4_reference.E2M1 for s in (1, -1)]) * scale
                rounded = np.array([grid[np.abs(grid - v).argmin()] for v in block])
                tried.append((((rounded - block) ** 2).sum(), rounded))
            result[row, col : col + 16] = tried[1][1] if tried[1][0] < tried[0][0] else tried[0][1]
    return result


def test_four_over_six_takes_the_better_of_both_scales():
    x = gaussian(24, 64, seed=9)
    got = quantizer("nvfp4e2m1bnosr:4over6:fp32_scale")(x)
    assert np.allclose(got.numpy(), four_over_six(x.double().numpy()), rtol=1e-5, atol=1e-6)
    for options in (":fp32_scale", ""):
        got = quantizer(NEAREST + ":4over6" + options)(x)
        assert (got - x).norm() < (quantizer(NEAREST + options)(x) - x).norm()


def test_the_identity_returns_the_tensor_itself():
    x = gaussian(3, 5, 7)
    x[0, 0, 0] = math.inf
    got = quantizer(IDENTITY).quantize(x, with_counts=True)
    assert torch.equal(got.operand(), x.view(15, 7))
    assert torch.equal(quantizer(IDENTITY)(x), x)
    assert got.tensor_scale is None
    assert got.counts.tolist() == [105, 0, 0, 0, 1, 0, 0, 0]
    assert got.error[0] == 0
    assert got.error[1].isfinite()


@pytest.mark.parametrize("name", [NEAREST, IDENTITY, "fp4e2m1b:seed_compat"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_that_are_not_floating_are_refused_by_name(name, dtype):
    with pytest.raises(UserError, match=r"got a tensor of torch.*cast it to float32"):
        quantizer(name).quantize(torch.zeros(16).to(dtype))


def test_no_gradient_flows():
    x = gaussian(4, 16).requires_grad_()
    for name in (NEAREST, IDENTITY, "fp4e2m1b:seed_compat"):
        assert not quantizer(name)(x).requires_grad


@pytest.mark.parametrize("name", [NEAREST, IDENTITY, "fp4e2m1b:seed_compat"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [1.0, 2.0], "not a tensor"),
        (lambda: None, "not a tensor"),
        (lambda: 1.5, "not a tensor"),
        (lambda: np.ones(3), "not a tensor"),
        (lambda: torch.ones(2, 16).to_sparse(), "sparse_coo: pass a dense one"),
        (lambda: torch.ones(2, 16).to_mkldnn(), "mkldnn: pass a dense one"),
    ],
)
def test_an_input_that_is_not_a_dense_tensor_is_rejected_by_name(name, make, message):
    with pytest.raises(UserError, match=message) as caught:
        quantizer(name)(make())
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", [NEAREST, "fp4e2m1", TILED])
def test_the_tensor_s_maximum_may_be_a_number_or_a_tensor(name):
    x = gaussian(4, 32)
    expected = quantizer(name).quantize(x, tensor_amax=torch.tensor(8.0))
    for amax in (8, 8.0, torch.tensor(8.0, dtype=torch.float64), torch.tensor(8.0, requires_grad=True)):
        got = quantizer(name).quantize(x, tensor_amax=amax)
        assert torch.equal(got.dequantize(), expected.dequantize())
        assert torch.equal(got.tensor_scale, expected.tensor_scale)


@pytest.mark.parametrize(
    "amax", [torch.ones(1), torch.ones(3), torch.tensor(1), torch.ones((), device="meta"), "1"]
)
def test_any_other_maximum_is_refused(amax):
    with pytest.raises(UserError, match="tensor_amax="):
        quantizer(NEAREST).quantize(gaussian(4, 16), tensor_amax=amax)


@pytest.mark.parametrize("name", [NEAREST, STOCHASTIC, "fp4e2m1", TILED, "nvfp4e2m1bnosr:4over6"])
@pytest.mark.parametrize("amax", [math.inf, math.nan, 1e39])
def test_a_maximum_that_is_not_finite_makes_the_whole_tensor_nan(name, amax):
    assert quantizer(name).quantize(gaussian(4, 32), tensor_amax=amax).dequantize().isnan().all()
