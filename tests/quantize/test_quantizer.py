import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.formats.packing import PIECE_BLOCKS
from megalowbit.quantize.names import quantizer

NEAREST, STOCHASTIC, IDENTITY = "nvfp4e2m1bnosr", "nvfp4e2m1b", "fp32"


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (5, 7), (17, 33), (2, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nearest_equals_the_brute_force_reference_bit_for_bit(reference, shape, dtype):
    x = gaussian(*shape, seed=sum(shape), dtype=dtype)
    x[0] *= 30
    elements, scales, tensor_scale = reference.quantize(x.float().numpy())
    got = quantizer(NEAREST).quantize(x)
    assert np.array_equal(got.operand(torch.float64).numpy(), reference.operand(x.float().numpy())[0])
    assert np.array_equal(got.scales.float().numpy(), scales)
    assert got.tensor_scale.item() == tensor_scale
    expected = torch.from_numpy(elements * np.repeat(scales, 16, axis=1)[:, : shape[1]]).float() * np.float32(
        tensor_scale
    )
    assert torch.equal(got.dequantize(), expected.to(dtype))


def test_ties_between_grid_values_go_to_the_even_code():
    # Largest element 6·448: tensor scale 1, block scale 448 and 1, so elements are their own codes.
    x = torch.zeros(1, 32)
    x[0, 0] = 6 * 448
    x[0, 16:24] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x[0, 24:31] = -x[0, 17:24]
    rounded = quantizer(NEAREST)(x)[0, 16:].tolist()
    assert rounded == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]


def test_nearest_meets_the_quality_gate_on_a_gaussian():
    errors = []
    for seed in range(3):
        x = gaussian(1024, 512, seed=seed)
        errors.append(((quantizer(NEAREST)(x) - x).norm() / x.norm()).item())
    assert sum(errors) / 3 <= 0.097


def test_stochastic_rounding_is_unbiased_where_nothing_clips():
    # Block maxima at exactly 6·scale: nothing saturates, so the mean of many draws is the number itself.
    x = torch.linspace(-6, 6, 16).mul(448).repeat(8, 1)
    generator = torch.Generator().manual_seed(3)
    draws = 4000
    total = sum(quantizer(STOCHASTIC)(x, generator=generator).double() for _ in range(draws))
    spread = 448 * 2 / 2 / math.sqrt(8 * draws)  # half the widest gap bounds the standard deviation
    assert (total.mean(0) / draws - x[0].double()).abs().max().item() < 5 * spread
    flat = gaussian(512, 512, seed=4)
    gain = (quantizer(STOCHASTIC)(flat, generator=generator) * flat).sum() / flat.square().sum()
    assert 0.99 < gain.item() < 1.0  # E4M3 scales rounded down clip 3.5 % of a Gaussian


def test_stochastic_rounding_follows_its_generator_and_nothing_else():
    x = gaussian(64, 48)
    quantize = quantizer(STOCHASTIC).quantize
    first = quantize(x, generator=torch.Generator().manual_seed(5)).codes
    torch.manual_seed(99)
    assert torch.equal(first, quantize(x, generator=torch.Generator().manual_seed(5)).codes)
    assert not torch.equal(first, quantize(x, generator=torch.Generator().manual_seed(6)).codes)


def test_without_a_generator_torchs_default_one_is_used():
    x = gaussian(64, 48)
    torch.manual_seed(11)
    first = quantizer(STOCHASTIC)(x)
    torch.manual_seed(11)
    assert torch.equal(first, quantizer(STOCHASTIC)(x))


@given(
    st.lists(st.integers(0, 9), min_size=0, max_size=4),
    st.integers(0, 40),
    st.sampled_from([NEAREST, STOCHASTIC, IDENTITY]),
)
@settings(deadline=None, max_examples=80)
def test_any_shape_comes_back_with_shape_dtype_and_bounded_error(leading, cols, name):
    x = gaussian(*leading, cols, seed=cols) if leading or cols else torch.tensor(1.5)
    got = quantizer(name).quantize(x, with_counts=True)
    back = got.dequantize()
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    rows = math.prod(x.shape[:-1])
    assert got.operand().shape == (rows, x.shape[-1] if x.dim() else 1)
    assert got.counts[0].item() == x.numel()
    if x.numel():
        # The widest gap is 2 of 6, clipping takes at most 6 %; subnormal scales matter only far below amax.
        assert (back - x).abs().max().item() <= 0.35 * x.abs().max().item()


@pytest.mark.parametrize("name", [NEAREST, STOCHASTIC])
def test_strides_and_pieces_do_not_change_the_result(name):
    def codes(x):
        return quantizer(name).quantize(x, generator=torch.Generator().manual_seed(1)).codes

    x = gaussian(48, 64)
    assert torch.equal(codes(x.t().contiguous().t()), codes(x))
    assert torch.equal(codes(x[:, ::2]), codes(x[:, ::2].clone()))
    large = gaussian(PIECE_BLOCKS // 4 + 3, 5 * 16)  # two pieces, the second one short
    scale = large.abs().max()
    tail = large[-3:].clone()
    nearest = quantizer(NEAREST)
    whole = nearest.quantize(large)
    assert torch.equal(whole.codes[-3:], nearest.quantize(tail, tensor_amax=scale).codes)
    assert (whole.dequantize() - large).norm() / large.norm() < 0.1


@pytest.mark.parametrize("name", [NEAREST, STOCHASTIC])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_elements_spoil_their_block_and_no_other(name, bad, dtype):
    x = gaussian(4, 40, dtype=dtype)
    clean = quantizer(name)(x, generator=torch.Generator().manual_seed(0))
    x[2, 20] = bad
    got = quantizer(name)(x, generator=torch.Generator().manual_seed(0))
    spoiled = torch.zeros(4, 40, dtype=torch.bool)
    spoiled[2, 16:32] = True
    assert got[spoiled].isnan().all()
    if clean[spoiled].abs().max() < clean.abs().max():  # else the tensor's maximum has changed
        assert torch.equal(got[~spoiled], clean[~spoiled])
    assert got[~spoiled].isfinite().all()


def test_only_non_finite_elements_give_only_nan():
    assert quantizer(NEAREST)(torch.full((2, 16), math.nan)).isnan().all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e30, 3.4028234663852886e38])
def test_constant_tensors_of_any_magnitude_stay_finite(value):
    x = torch.full((3, 20), value)
    for name in (NEAREST, STOCHASTIC):
        got = quantizer(name)(x)
        assert got.isfinite().all()
        if value == 0 or value > 1e-34:
            assert torch.allclose(got, x, rtol=1e-6, atol=0)


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


@pytest.mark.parametrize("name", [NEAREST, IDENTITY])
def test_integer_tensors_are_refused_by_name(name):
    with pytest.raises(UserError, match=r"int64.*cast it to float32"):
        quantizer(name).quantize(torch.arange(4))
