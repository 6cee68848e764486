import math

import philox_reference
import pytest
import torch
from metis_recording import CASES, load_recording, needs_recording

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.seed_compat import RULES, SEED_COMPAT

EVERY_BASE = pytest.mark.parametrize("base", SEED_COMPAT)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(base, x, uniform=None):
    return SEED_COMPAT[base](name=base).rounded(x, uniform)


@pytest.fixture(scope="module")
def recording():
    return load_recording()


@needs_recording
@EVERY_BASE
@pytest.mark.parametrize("case", CASES)
def test_recorded_outputs_are_repeated_bit_for_bit(recording, case, base):
    got = rounded(base, recording[f"{case}.input"], recording[f"{case}.noise"])
    if base == "1p58bit":
        assert torch.equal(got.values, recording[f"{case}.1p58bit"])
        return
    assert torch.equal(got.values, recording[f"{case}.{base}.dequantised"])
    assert torch.equal(got.scale, recording[f"{case}.{base}.scale"])


def test_without_a_recording_the_definitions_still_give_known_numbers():
    x = torch.zeros(1, 16)
    x[0, :6] = torch.tensor([6.0, 5.0, -2.5, 0.25, 0.76, -0.3])
    expected = torch.tensor([6.0, 4.0, -2.0, 0.0, 1.0, -0.5])
    assert torch.allclose(rounded("fp4e2m1", x).values[0, :6], expected, atol=1e-5)
    up = rounded("fp4e2m1b", x, torch.full_like(x, 0.999)).values[0, :6]
    assert torch.allclose(up, torch.tensor([6.0, 6.0, -3.0, 0.5, 1.0, -0.5]), atol=1e-5)
    down = rounded("fp4e2m1b", x, torch.full_like(x, 0.001)).values[0, :6]
    assert torch.allclose(down, torch.tensor([6.0, 4.0, -2.0, 0.0, 0.5, 0.0]), atol=1e-5)


def test_uniform_numbers_are_24_bits_of_the_words_of_philox():
    x = gaussian(3, 48)
    words = [word for group in range(36) for word in philox_reference.philox((group, 0, 7, 0), (5, 0))]
    uniform = torch.tensor([(word >> 8) / 2**24 for word in words], dtype=torch.float32).view(3, 48)
    got = quantizer("fp4e2m1b:seed_compat")(x, random_key=RandomKey(5, 7))
    assert torch.equal(got, rounded("fp4e2m1b", x, uniform).values)


@EVERY_BASE
def test_a_key_decides_all_and_nearest_rules_draw_nothing(base):
    x = gaussian(4, 32)
    quantize = quantizer(f"{base}:seed_compat")
    assert torch.equal(quantize(x, random_key=RandomKey(1)), quantize(x, random_key=RandomKey(1)))
    is_alike = torch.equal(quantize(x, random_key=RandomKey(1)), quantize(x, random_key=RandomKey(2)))
    assert is_alike != quantize.is_stochastic
    state = torch.get_rng_state()
    quantize(x)
    assert torch.equal(torch.get_rng_state(), state) != quantize.is_stochastic


def test_scales_of_nvfp4_keep_all_their_bits():
    x = gaussian(8, 64)
    scale = rounded("nvfp4e2m1b", x, torch.full_like(x, 0.5)).scale
    assert not torch.equal(scale.to(torch.float8_e4m3fn).float(), scale)
    values = rounded("nvfp4e2m1b", x, torch.full_like(x, 0.5)).values.view(-1, 16)
    largest = values.abs().amax(1)
    assert torch.allclose(largest, x.view(-1, 16).abs().amax(1), rtol=1e-5)  # no scale was rounded


def test_mx_decodes_blocks_with_a_power_of_two_they_were_not_coded_with():
    x = gaussian(64, 64)
    uniform = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    one_sided = rounded("mxfp4e2m1b", x, uniform)
    both_sides = rounded("fp4e2m1b", x, uniform)
    ratio = (one_sided.values / both_sides.values).view(-1, 16).nanmean(1)
    expected = torch.exp2(torch.log2(one_sided.scale).round()) / one_sided.scale
    assert torch.allclose(ratio, expected, rtol=1e-5)
    assert expected.max() > 1.35
    assert expected.min() < 0.75
    error = (one_sided.values - x).norm() / x.norm()
    assert 0.24 < error.item() < 0.28


def test_the_fourth_root_errs_by_half_where_e3m2_errs_by_an_eighth():
    x = torch.cat([torch.logspace(-1, 0, 4000), torch.ones(1)]).mul(28.0)
    errors = {
        name: ((quantizer(name)(x) - x).abs() / x).max().item() for name in ("fp6e3m2:seed_compat", "fp6e3m2")
    }
    assert 0.45 < errors["fp6e3m2:seed_compat"] <= 0.53
    assert errors["fp6e3m2"] <= 0.125


def test_ternary_has_five_levels():
    values = rounded("1p58bit", gaussian(64, 64)).values
    assert values.unique().numel() == 5
    assert quantizer("1p58bit")(gaussian(64, 64)).unique().numel() == 3


@pytest.mark.parametrize(("base", "vanishes"), [("fp4e2m1", 2.5e-7), ("fp4e2m1b", 2.5e-10)])
def test_the_offset_of_the_scale_sends_small_tensors_to_zero(base, vanishes):
    half = torch.full((1, 16), 0.5)
    assert not rounded(base, torch.full((1, 16), vanishes), half).values.any()
    assert rounded(base, torch.full((1, 16), 4 * vanishes), half).values.all()
    assert quantizer(base)(torch.full((1, 16), vanishes)).all()


@pytest.mark.parametrize(("base", "bound"), [("fp6e3m2b", 625 * 65520), ("fp8e4m3b", 448 * 65520)])
def test_scales_kept_in_fp16_overflow(base, bound):
    assert rounded(base, torch.full((1, 16), 0.99 * bound)).values.isfinite().all()
    assert rounded(base, torch.full((1, 16), 1.01 * bound)).values.isnan().all()


def test_a_uniform_number_of_zero_moves_odd_codes():
    x = torch.tensor([[6.0, 3.0, 1.5, 2.0] * 4])
    moved = rounded("fp4e2m1b", x, torch.zeros_like(x)).values
    assert torch.allclose(moved[0, :4], torch.tensor([4.0, 2.0, 1.0, 2.0]))


@EVERY_BASE
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_elements_stay_visible(base, bad):
    x = gaussian(4, 32)
    x[1, 3] = bad
    quantize = quantizer(f"{base}:seed_compat")
    result = quantize.quantize(x, with_counts=True)
    assert result.values[1, 3].isnan()
    assert result.counts[4] == 1
    assert result.error.isfinite().all()


@EVERY_BASE
def test_shape_and_dtype_are_kept_nothing_is_packed_and_the_error_counted(base):
    quantize = quantizer(f"{base}:seed_compat")
    for shape in ((16,), (2, 3, 32), (0, 16), (5, 0)):
        x = gaussian(*shape).to(torch.bfloat16)
        got = quantize.quantize(x, with_counts=True)
        assert (got.shape, got.dtype, got.codes, got.tensor_scale) == (x.shape, x.dtype, None, None)
        assert got.counts[0].item() == x.numel()
        exact = x.double()
        assert got.error[0].item() == pytest.approx((exact - got.values.double()).square().sum().item())
        assert got.error[1].item() == pytest.approx(exact.square().sum().item())


@EVERY_BASE
def test_partial_blocks_and_foreign_maxima_are_refused(base):
    quantize = quantizer(f"{base}:seed_compat")
    if RULES[base].is_blockwise:
        with pytest.raises(UserError, match="whole blocks of 16, not 17"):
            quantize(gaussian(3, 17))
    else:
        assert quantize(gaussian(3, 17)).shape == (3, 17)
    with pytest.raises(UserError, match="does not support tensor_amax"):
        quantize.quantize(gaussian(2, 16), tensor_amax=torch.tensor(1.0))
