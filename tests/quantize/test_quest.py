"""`quest`: MXFP4 scales from the root mean square, and masks of what saturates, against float64."""

import math

import numpy as np
import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.formats.codes import unpack_codes
from megalowbit.quantize.hadamard import hadamard, inverse_hadamard
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.quantized_tensor import masked

NAME, SIGNS = "mxfp4e2m1bnosr:quest", 0xB5A3
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest(number):
    """Of the nearest magnitudes the one with the even code, with the number's sign."""
    distances = [abs(abs(number) - each) for each in GRID]
    closest = [code for code, distance in enumerate(distances) if distance == min(distances)]
    return math.copysign(GRID[next((code for code in closest if code % 2 == 0), closest[0])], number)


def by_the_book(matrix):
    """Numbers and masks of a float64 matrix, block by block, element by element."""
    numbers, inside = np.zeros_like(matrix), np.zeros(matrix.shape, dtype=bool)
    for row, values in enumerate(matrix):
        for start in range(0, values.size, 32):
            block = values[start : start + 32]
            mean_square = sum(float(each) ** 2 for each in block) / block.size
            best = math.sqrt(mean_square) * 2.92247856 / 6
            scale = 2.0 ** min(max(round(math.log2(best)), -127), 127) if best else 2.0**-127
            numbers[row, start : start + 32] = [nearest(each / scale) * scale for each in block]
            inside[row, start : start + 32] = [abs(each / scale) < 6 for each in block]
    return numbers, inside


def matrices():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 112, generator=generator)
    yield x
    yield x * torch.randn(24, 112, generator=generator).mul(2).exp()  # log-normal, many scales
    yield x.to(torch.bfloat16).float()
    yield x * 10.0 ** torch.randint(-30, 30, (24, 1), generator=generator)
    yield x[:, :37]  # its last block has five columns
    yield torch.zeros(2, 64)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("signs", [None, SIGNS])
def test_numbers_and_masks_are_those_of_the_emulation(index, signs):
    x = list(matrices())[index]
    chosen = quantizer(NAME)
    turned = x
    if signs is not None:
        turned = hadamard(torch.nn.functional.pad(x, (0, -x.shape[1] % 16)), signs)
    made = chosen.quantize(x) if signs is None else chosen.quantize_transformed(x, signs=signs)
    numbers, inside = by_the_book(turned.double().numpy())
    assert np.array_equal(made.dequantize().double().numpy(), numbers)
    mask = unpack_codes(made.range_mask(x, signs), 1).bool()
    assert mask.shape[1] == -(-x.shape[1] // 16) * 16
    assert np.array_equal(mask[:, : turned.shape[1]].numpy(), inside)
    assert x.any() == bool((~inside).any()) or index == 5  # each case but zeros saturates something


def test_the_error_of_a_gaussian_of_any_size_is_near_that_of_the_best_scale():
    """.0127 with the best scale, .0133 with its nearest power of two, .0214 with it rounded down."""
    x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(2))
    chosen, errors = quantizer(NAME), []
    for step in range(8):
        sized = x * 2 ** (step / 8)
        errors.append(float((chosen(sized) - sized).square().sum() / sized.square().sum()))
    assert 0.0125 < sum(errors) / 8 < 0.0139
    assert max(errors) < 0.0148


def test_an_outlier_in_the_first_channel_of_each_group_is_kept():
    """The transform makes it a constant block, whose standard deviation is that of the rest."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)) * 1e-3
    x[:, ::16] = 5.0
    made = quantizer(NAME).quantize_transformed(x, signs=SIGNS)
    back = inverse_hadamard(made.dequantize(), SIGNS)
    assert (back[:, ::16] - 5).abs().max() < 1
    assert unpack_codes(made.range_mask(x, SIGNS), 1).all()


def test_the_inverse_transform_undoes_it_and_a_mask_is_a_projection():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, 48, generator=generator, dtype=torch.float64) * 0.8  # its scales are small
    assert torch.allclose(inverse_hadamard(hadamard(x, SIGNS), SIGNS), x, atol=1e-14)
    made = quantizer(NAME).quantize_transformed(x.float(), signs=SIGNS)
    mask = made.range_mask(x.float(), SIGNS)
    once = masked(x, mask, SIGNS)
    kept = unpack_codes(mask, 1)
    assert not kept.all()
    assert torch.allclose(hadamard(once, SIGNS), hadamard(x, SIGNS) * kept, atol=1e-14)
    assert torch.allclose(masked(once, mask, SIGNS), once, atol=1e-14)
    assert torch.equal(masked(x, mask, None), x * kept)


def test_stochastic_rounding_gives_a_neighbour_and_spoiled_blocks_stay_alone():
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(5)) * 0.8
    drawn = quantizer("mxfp4e2m1b:quest").quantize(x, random_key=RandomKey(1))
    assert torch.equal(drawn.scales.view(torch.uint8), quantizer(NAME).quantize(x).scales.view(torch.uint8))
    x[1, 40] = math.inf
    made = quantizer(NAME).quantize(x, with_counts=True)
    spoiled = torch.zeros(16, 96, dtype=torch.bool)
    spoiled[1, 32:64] = True
    assert torch.equal(made.dequantize().isnan(), spoiled)
    assert made.counts[1] > 0  # it saturates


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4e2m1bnosr:quest", "use mxfp4e2m1bnosr:quest"),
        ("mxfp8e4m3b:quest", "use mxfp4e2m1bnosr:quest"),
        ("int8:quest", "use mxfp4e2m1bnosr:quest"),
        ("mxfp4e2m1b:quest:unbiased", "quest and unbiased contradict"),
        ("mxfp4e2m1bnosr:quest:floor", "quest and floor contradict"),
    ],
)
def test_other_formats_and_options_are_refused(name, message):
    with pytest.raises(UserError, match=message) as caught:
        quantizer(name)
    assert "\n" not in str(caught.value)
