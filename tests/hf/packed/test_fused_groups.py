import math
from types import MappingProxyType

import numpy as np
import pytest
import torch
from packed_decoding import E2M1, e2m1, e4m3, e8m0, times_blocks

from megalowbit.hf.packed.fused_groups import pack, pack_group
from megalowbit.quantize.names import quantizer

NAMES = ("nvfp4e2m1bnosr", "nvfp4e2m1bnosr:tile16", "nvfp4e2m1bnosr:4over6", "nvfp4e2m1bnosr:tile16:4over6")
SIZES = MappingProxyType({"q": (48, 64), "k": (20, 64), "v": (16, 64)})


def weights_of(seed, *, spread=1.0, ratios=(1.0, 0.3, 0.04)):
    """Weights of a group, one smaller than the other, whose blocks of 16 differ by e^±spread."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for (name, shape), ratio in zip(SIZES.items(), ratios, strict=True):
        normal = torch.randn(shape, generator=generator)
        size = torch.randn(shape[0], shape[1] // 16, generator=generator).mul(spread).exp()
        found[name] = (normal * size.repeat_interleave(16, 1) * ratio).bfloat16()
    return found


def decoded(packed):
    """float64 numbers of NVFP4 codes and scales."""
    return times_blocks(e2m1(packed.codes), e4m3(packed.scales)) * packed.tensor_scale.double().item()


def as_blocks(values):
    return values.reshape(values.shape[0], -1, 16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_weights_are_those_that_a_layer_multiplies(name, dtype):
    for weight in weights_of(0).values():
        weight = weight.to(dtype)
        packed = pack(quantizer(name), weight)
        assert packed.scales.shape == (weight.shape[0], weight.shape[1] // 16)
        assert np.array_equal(decoded(packed), quantizer(name)(weight).double().numpy())


@pytest.mark.parametrize("name", NAMES)
def test_a_group_gets_one_scale_and_keeps_every_value_and_code(name):
    for seed in range(5):
        weights = weights_of(seed)
        group = pack_group(quantizer(name), weights)
        alone = {layer: pack(quantizer(name), weight) for layer, weight in weights.items()}
        largest = max(alone.values(), key=lambda packed: packed.tensor_scale.item())
        assert len({packed.tensor_scale.item() for packed in alone.values()}) == 3
        for layer, packed in group.items():
            assert packed.num_rounded == 0
            assert packed.relative_change == 0
            assert packed.tensor.tensor_scale.equal(largest.tensor_scale)
            assert packed.tensor.codes.equal(alone[layer].codes)
            assert np.array_equal(decoded(packed.tensor), decoded(alone[layer]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_training_with_the_largest_weight_of_the_group_gives_the_same_codes_and_scales(name, spread):
    """So no recipe has to share the tensor scale. Blocks with inexact scales are those that sharing rounds.

    Four-over-six tries two scales for a block; with subnormal ones sharing may choose the other one.
    """
    num_rounded = 0
    for seed in range(10):
        weights = weights_of(seed, spread=spread)
        largest = max(weight.abs().max().float() for weight in weights.values())
        for layer, packed in pack_group(quantizer(name), weights).items():
            shared = pack(quantizer(name), weights[layer], largest)
            assert packed.tensor.tensor_scale.equal(shared.tensor_scale)
            scales, values = e4m3(packed.tensor.scales), as_blocks(decoded(packed.tensor))
            compared = scales >= (1.6 * 2.0**-6 if "4over6" in name else 0)
            assert np.array_equal(values[compared], as_blocks(decoded(shared))[compared])
            codes, others = (as_blocks(e2m1(each.codes)) for each in (packed.tensor, shared))
            assert np.array_equal(codes[compared], others[compared])
            is_same = scales == e4m3(shared.scales)
            assert (is_same | ~compared | ~values.any(2)).all()  # zeros may have any scale
            num_rounded += packed.num_rounded
    assert (num_rounded > 0) == (spread == 3.0)


def test_exactly_the_blocks_whose_subnormal_scale_loses_bits_are_rounded_again():
    """s · 2⁻ᵃ is an E4M3 number if it is a multiple of 2⁻⁹; the scales here are 1 to 448, all exponents."""
    name = "nvfp4e2m1bnosr"
    generator = torch.Generator().manual_seed(3)
    small = torch.randn(512, 16, generator=generator) * torch.exp2(-(torch.arange(512) % 19.0)).unsqueeze(1)
    small[::7] = 0
    weights = {"q": torch.full((16, 16), 37.0), "k": small}
    alone = pack(quantizer(name), small)
    factor = alone.tensor_scale.item() / pack(quantizer(name), weights["q"]).tensor_scale.item()
    assert factor == 2.0 ** round(math.log2(factor)) < 1
    wanted = e4m3(alone.scales)[:, 0] * factor
    loses_bits = (wanted * 2**9 % 1 != 0) & e2m1(alone.codes).any(1)
    assert 20 < loses_bits.sum() < 400
    packed = pack_group(quantizer(name), weights)["k"]
    assert (packed.num_rounded, packed.num_blocks) == (loses_bits.sum(), 512)
    before, after = decoded(alone), decoded(packed.tensor)
    assert np.array_equal(before[~loses_bits], after[~loses_bits])
    # rounded from the weight, not from the codes: no code under the new scale is nearer
    scale = e4m3(packed.tensor.scales) * packed.tensor.tensor_scale.double().item()
    grid = np.concatenate([E2M1, -E2M1])
    nearest = np.abs(small.double().numpy()[:, :, None] - scale[:, :, None] * grid).min(2)
    distance = np.abs(small.double().numpy() - after)
    assert np.allclose(distance[loses_bits], nearest[loses_bits], rtol=1e-6, atol=0)
    expected = np.linalg.norm(before - after) / np.linalg.norm(before)
    assert packed.relative_change == pytest.approx(expected, rel=1e-5)


def test_fp32_tensor_scales_round_all_layers_but_the_largest_again():
    name = "nvfp4e2m1bnosr:fp32_scale"
    weights = weights_of(0)
    group = pack_group(quantizer(name), weights)
    assert group["q"].num_rounded == 0
    assert group["q"].tensor.codes.equal(pack(quantizer(name), weights["q"]).codes)
    for layer in ("k", "v"):
        packed = group[layer]
        assert packed.num_rounded > 0.9 * packed.num_blocks
        assert 0 < packed.relative_change < 0.15  # NVFP4 itself changes the weights by 0.09
        assert packed.tensor.tensor_scale.equal(group["q"].tensor.tensor_scale)
        # as near to the weight as with its own scale
        error = np.linalg.norm(decoded(packed.tensor) - weights[layer].double().numpy())
        own = pack(quantizer(name), weights[layer])
        assert error < 1.1 * np.linalg.norm(decoded(own) - weights[layer].double().numpy())


def test_a_layer_of_zeros_does_not_set_the_scale():
    weights = weights_of(0) | {"k": torch.zeros(20, 64)}
    group = pack_group(quantizer("nvfp4e2m1bnosr"), weights)
    assert group["k"].num_rounded == group["q"].num_rounded == 0
    assert not decoded(group["k"].tensor).any()
    assert len({packed.tensor.tensor_scale.item() for packed in group.values()}) == 1
    assert np.array_equal(
        decoded(group["q"].tensor), quantizer("nvfp4e2m1bnosr")(weights["q"]).double().numpy()
    )


def test_headroom_is_part_of_the_shared_scale():
    name = "nvfp4e2m1bnosr:q_scalar=1.5"
    weights = weights_of(1, spread=3.0)
    largest = max(weight.abs().max().float() for weight in weights.values()) * 1.5
    for layer, packed in pack_group(quantizer(name), weights).items():
        assert np.array_equal(decoded(packed.tensor), decoded(pack(quantizer(name), weights[layer], largest)))


def test_mxfp4_has_no_tensor_scale_to_share():
    weights = weights_of(0)
    for layer, packed in pack_group(quantizer("mxfp4e2m1bnosr"), weights).items():
        assert packed.num_rounded == 0
        assert packed.tensor.tensor_scale is None
        values = times_blocks(e2m1(packed.tensor.codes), e8m0(packed.tensor.scales))
        assert np.array_equal(values, quantizer("mxfp4e2m1bnosr")(weights[layer]).double().numpy())
