"""Quantizers against public packages that tests have: compressed-tensors, and transformers for decoding.

Their functions run unchanged on a CPU. Where compressed-tensors follows another rule, a test states it:

- A block that is too small for a scale gets .125 instead of 0. Its elements are 0 either way.
- Elements are divided by their scale, not multiplied by its inverse (as here and in TransformerEngine). So a
  number exactly between two elements may become the other one, if 1/scale is not exact.
- The block scale of NVFP4 is the maximum / 6 · S, here the maximum / (6 / S): a ratio that is exactly between
  two E4M3 numbers may become the other one, unless S is a power of two.
- MX scales are rounded up from maxima of 1.75 · 2ⁿ on, for all elements.
"""

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="needs Python 3.11")
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megalowbit.formats.block_scale import decode_scales
from megalowbit.formats.codes import code_values, unpack_codes
from megalowbit.quantize.names import quantizer

EMPTY_BLOCK = 0.125  # the scale of compressed-tensors for a block that would have 0
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
KINDS = ("gaussian", "lognormal", "small", "subnormal", "large", "outliers", "ties", "zeros")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def matrix(kind, rows=64, cols=256):
    """An fp32 matrix in which no random number is exactly between two elements."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    x = torch.randn(rows, cols, generator=generator)
    if kind == "lognormal":
        x *= torch.randn(rows, cols, generator=generator).mul(3).exp()
    if kind in ("small", "subnormal", "large"):
        x *= 2.0 ** {"small": -110, "subnormal": -140, "large": 124}[kind]
    if kind == "outliers":
        x = torch.where(torch.arange(cols) % 16 == 5, x * 50, x * 1e-3)
    if kind == "ties":  # under scales that are powers of two, whose inverse is exact
        steps = torch.randint(-24, 25, (rows, cols), generator=generator) / 4
        steps[:, ::16] = 6.0
        powers = 2.0 ** torch.randint(-6, 9, (rows, cols // 128), generator=generator)
        x = steps * powers.repeat_interleave(128, 1)
        x[0, 0] = 6 * 448.0
    if kind == "zeros":
        x[:, :128] = 0.0
        x[3] = -0.0
    return x


def arguments(preset, operand="input_activations"):
    return getattr(preset_name_to_scheme(preset, ["Linear"]), operand)


def numbers(tensor):
    """The elements without their scales, fp32; a zero is equal to a zero of the other sign."""
    element = tensor.format.element
    return code_values(unpack_codes(tensor.codes, element.bits), element)[:, : tensor.shape[1]]


def theirs_in_nvfp4(x, encode_scale):
    """Block scales and elements by compressed-tensors, for a tensor scale of 1 / `encode_scale`."""
    chosen = arguments("NVFP4")
    scales, zero_point = compute_dynamic_scales_and_zp(x, chosen, None, global_scale=encode_scale)
    return scales.float(), quantize(x, scales, zero_point, chosen, global_scale=encode_scale).float()


def encode_scale_of(name, x, tensor):
    """S, fp32: 2688 / max, as packages have it, but at most 2¹²⁶; or the power of two of the result."""
    if "fp32_scale" not in name:
        return 1 / tensor.tensor_scale.view(1)
    largest = x.abs().amax().view(1)
    return (torch.full_like(largest, 2688.0) / largest).clamp(max=2.0**126)


@EVERY_KIND
@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "nvfp4e2m1bnosr:fp32_scale"])
def test_nvfp4_scales_and_elements_are_those_of_compressed_tensors(name, kind):
    x = matrix(kind)
    ours = quantizer(name).quantize(x)
    encode_scale = encode_scale_of(name, x, ours)
    scales, elements = theirs_in_nvfp4(x, encode_scale)
    stored = ours.scales.float()
    assert torch.where(stored == 0, EMPTY_BLOCK, stored).equal(scales)
    assert numbers(ours).equal(elements)
    if kind != "subnormal":
        own = generate_gparam(x.amin(), x.amax())
        exact = 2688 / x.double().abs().amax()
        assert (own / exact - 1).abs() < 2**-22  # S of compressed-tensors is rounded twice
        assert "fp32_scale" not in name or (1 / ours.tensor_scale / exact - 1).abs() < 2**-22


def test_an_element_may_differ_only_if_it_is_exactly_between_two():
    differing = 0
    for seed in range(4):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
        ours = quantizer("nvfp4e2m1bnosr").quantize(x)
        scales, elements = theirs_in_nvfp4(x.float(), 1 / ours.tensor_scale.view(1))
        assert ours.scales.float().equal(scales)
        differs = numbers(ours) != elements
        steps = x.double().abs() / (scales.double() * ours.tensor_scale.double()).repeat_interleave(16, 1)
        assert torch.isin(steps[differs], MIDPOINTS).all()
        differing += int(differs.sum())
    assert differing > 0


def test_a_block_scale_may_differ_if_its_ratio_is_exactly_between_two():
    """A maximum of 3/8 of the tensor's has the ratio 168; its neighbours in E4M3 are 160 and 176."""
    x = torch.zeros(2, 16)
    found = set()
    for mantissa in range(513, 1024, 8):  # S is not exact in fp32
        x[0, 0], x[1, 0] = mantissa / 512, mantissa / 512 * 3 / 8
        ours = quantizer("nvfp4e2m1bnosr:fp32_scale").quantize(x)
        scales, _ = theirs_in_nvfp4(x, encode_scale_of("fp32_scale", x, ours))
        assert ours.scales[0].item() == scales[0].item() == 448
        found.add((ours.scales[1].item(), scales[1].item()))
    assert found <= {(160, 160), (176, 176), (160, 176), (176, 160)}
    assert any(one != other for one, other in found)


@EVERY_KIND
@pytest.mark.parametrize(("preset", "name"), [("MXFP4", "mxfp4e2m1bnosr"), ("MXFP8", "mxfp8e4m3b")])
def test_mx_blocks_are_rounded_up_or_down_as_compressed_tensors_chooses(preset, name, kind):
    """Each of its blocks is that of the quantizer which rounds the scale up, or of `floor`."""
    x, chosen = matrix(kind), arguments(preset)
    scales, zero_point = compute_dynamic_scales_and_zp(x, chosen, None)
    values = fake_quantize(x, scales, zero_point, chosen)
    up, down = quantizer(name).quantize(x), quantizer(f"{name}:floor").quantize(x)
    largest = x.abs().unflatten(1, (-1, 32)).amax(2)
    is_up = torch.frexp(largest).mantissa * 2 >= 1.75
    assert torch.where(is_up, decode_scales(up.scales), decode_scales(down.scales)).equal(scales)
    of_element = is_up.repeat_interleave(32, 1)
    assert torch.where(of_element, up.dequantize(), down.dequantize()).equal(values)
    if kind == "gaussian":
        assert is_up.any()
        assert not is_up.all()


def test_mxfp8_scales_differ_where_the_largest_element_is_exact():
    """448 is 1.75 · 2⁸: rounded up here, its scale is 1; compressed-tensors takes 2."""
    x = torch.zeros(1, 32)
    x[0, 0] = 448.0
    scales, _ = compute_dynamic_scales_and_zp(x, arguments("MXFP8"), None)
    assert decode_scales(quantizer("mxfp8e4m3b").quantize(x).scales).item() == 1
    assert scales.item() == 2


@EVERY_KIND
@pytest.mark.parametrize("name", ["fp8e4m3", "fp8e4m3b:block128", "fp8e4m3b:tile128"])
def test_fp8_scales_and_elements_are_those_of_compressed_tensors(name, kind):
    x = matrix(kind, rows=128)
    ours = quantizer(name).quantize(x)
    if name == "fp8e4m3":
        chosen = arguments("FP8")
        scales, zero_point = calculate_qparams(x.amin(), x.amax(), chosen)
        stored = ours.tensor_scale.view(1)
    elif name == "fp8e4m3b:block128":
        chosen = arguments("FP8_BLOCK")
        scales, zero_point = compute_dynamic_scales_and_zp(x, chosen, None)
        stored = ours.scales
    else:
        chosen = arguments("FP8_BLOCK", "weights")
        tiles = x.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scales, zero_point = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), chosen)
        stored = ours.scales
    is_empty = stored == 0  # theirs is then the smallest step of fp32 at 1
    assert torch.where(is_empty, torch.finfo(torch.float32).eps, stored).equal(scales)
    assert numbers(ours).equal(quantize(x, scales, zero_point, chosen))
    assert bool(is_empty.any()) == (kind == "zeros" and name != "fp8e4m3")


@EVERY_KIND
def test_transformers_decodes_mxfp4_to_the_same_numbers(kind):
    ours = quantizer("mxfp4e2m1bnosr").quantize(matrix(kind))
    blocks = ours.codes.unflatten(1, (-1, 16)).unsqueeze(0)  # (experts, rows, blocks, bytes)
    scales = ours.scales.view(torch.uint8).unsqueeze(0)
    decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert decoded[0].t().equal(ours.operand(torch.float32))
