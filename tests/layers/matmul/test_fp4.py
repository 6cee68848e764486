import logging

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import product_counts
from megalowbit.layers.matmul import fp4 as native_fp4
from megalowbit.layers.matmul.fp4 import hardware_operand, native_product, swizzled, why_unavailable
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream

NATIVE = {"base": "nvfp4", "layout": "per_gemm", "gemm": "fp4"}


def has_fp4():
    return torch.cuda.is_available() and why_unavailable(torch.device("cuda")) is None


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (64, 9), (300, 12)])
def test_scales_are_arranged_as_an_index_by_index_reference_says(shape):
    rows, blocks = shape
    scales = (torch.arange(rows * blocks) % 126 + 1).to(torch.uint8).view(shape).view(torch.float8_e4m3fn)
    tile_rows, tile_columns = -(-rows // 128), -(-blocks // 4)
    expected = [0] * (tile_rows * tile_columns * 512)
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * tile_columns + block // 4
            inside = (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
            expected[tile * 512 + inside] = scales.view(torch.uint8)[row, block].item()
    got = swizzled(scales)
    assert got.dtype == scales.dtype
    assert got.view(torch.uint8).tolist() == expected


@pytest.mark.parametrize(("name", "block"), [("nvfp4e2m1bnosr", 16), ("mxfp4e2m1bnosr", 32)])
def test_rows_are_padded_to_whole_steps_and_stay_what_they_were(name, block):
    tensor = quantizer(name).quantize(torch.randn(20, 80, generator=torch.Generator().manual_seed(0)))
    matrix, scales, recipes, swizzles = hardware_operand(tensor)
    codes = matrix.view(torch.uint8)
    assert matrix.dtype == torch.float4_e2m1fn_x2
    assert codes.shape == (20, 96 // 2)
    assert torch.equal(codes[:, :40], tensor.codes[:, :40])
    assert not codes[:, 40:].any()
    assert scales[0].numel() == 128 * -(-(96 // block) // 4) * 4
    assert swizzles[0] is SwizzleType.SWIZZLE_32_4_4
    if block == 16:
        assert recipes == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert scales[1] is tensor.tensor_scale
    else:
        assert recipes == [ScalingType.BlockWise1x32]


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1bnosr"])
def test_the_product_has_the_right_shape_on_meta_tensors(name):
    left, right = (quantizer(name).quantize(torch.ones(rows, 64)) for rows in (48, 32))
    meta = [
        part.to_parts()[1].from_parts(tuple(t.to("meta") for t in part.to_parts()[0]))
        for part in (left, right)
    ]
    try:
        product = native_product(*meta, torch.bfloat16)
    except NotImplementedError as error:
        pytest.skip(f"this torch has no shapes for scaled_mm: {error}")
    assert product.shape == (48, 32)
    assert product.dtype == torch.bfloat16


@pytest.mark.skipif(has_fp4(), reason="this machine has FP4 tensor cores")
def test_another_device_is_refused_by_name_with_the_remedy():
    for columns in (32, 24):  # sizes that hardware could not take are no way round
        layer = BitLinear(32, columns, recipe=NATIVE)
        with pytest.raises(UserError, match=r'gemm "fp4" cannot run on cpu: .*Blackwell.*set gemm to "bf16"'):
            layer(torch.randn(16, 32))
    assert "NVIDIA" in why_unavailable(torch.device("cpu"))


@pytest.fixture
def hardware(monkeypatch):
    """FP4 tensor cores, played by the product of decoded operands; holds the shapes it was asked for."""
    shapes = []

    def product(left, right, out_dtype):
        assert out_dtype in (torch.float32, torch.bfloat16, torch.float16)
        shapes.append((left.shape[0], right.shape[0]))
        a, b = left.dequantize(), right.dequantize()
        return (a.double() @ b.double().t()).to(out_dtype)

    monkeypatch.setattr(native_fp4, "why_unavailable", lambda device: None)
    monkeypatch.setattr(native_fp4, "native_product", product)
    return shapes


def trained(recipe, in_features, out_features, dtype=torch.float32):
    torch.manual_seed(0)
    layer = BitLinear(in_features, out_features, recipe=recipe, dtype=dtype)
    layer.random_stream = RandomStream(1)
    x = torch.randn(48, in_features, dtype=dtype, requires_grad=True)
    output = layer(x)
    output.backward(torch.randn(48, out_features, generator=torch.Generator().manual_seed(2)).to(dtype))
    return layer, [t.float() for t in (output.detach(), x.grad, layer.weight.grad, layer.bias.grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_products_reach_the_hardware_with_scales_and_bias(hardware, dtype):
    layer, got = trained(NATIVE, 64, 32, dtype)
    _, expected = trained({**NATIVE, "gemm": "bf16"}, 64, 32, dtype)
    assert hardware == [(48, 32), (48, 64), (32, 64)]
    assert product_counts(layer) == {name: {"fp4": 1} for name in ("output", "grad_input", "grad_weight")}
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-6
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def test_sizes_that_do_not_fit_run_in_bf16_are_counted_and_said_once(hardware, caplog):
    native_fp4._log_unsupported_size.cache_clear()
    with caplog.at_level(logging.INFO, logger="megalowbit"):
        layer, got = trained(NATIVE, 40, 24)
        trained(NATIVE, 40, 24)
    assert hardware == []
    assert product_counts(layer) == {name: {"bf16": 1} for name in ("output", "grad_input", "grad_weight")}
    said = [record.message for record in caplog.records if "fp4" in record.message]
    assert len(said) == 2
    assert "products with 24 columns run in bf16" in said[0]
    assert "products with 40 columns run in bf16" in said[1]
    _, expected = trained({**NATIVE, "gemm": "bf16"}, 40, 24)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_products_of_unquantised_operands_run_in_bf16():
    recipe = {**NATIVE, "q_forward_input": "fp32", "q_forward_weight": "fp32"}
    layer = BitLinear(32, 32, recipe=recipe)
    layer(torch.randn(16, 32))
    assert product_counts(layer) == {"output": {"bf16": 1}}


@pytest.mark.gpu
@pytest.mark.skipif(not has_fp4(), reason="needs a GPU with FP4 tensor cores")
@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1bnosr"])
def test_native_products_equal_those_of_decoded_operands(name):
    generator = torch.Generator().manual_seed(0)
    left, right = (
        quantizer(name).quantize(torch.randn(rows, 256, generator=generator).cuda()) for rows in (128, 64)
    )
    got = native_product(left, right, torch.bfloat16).double()
    expected = left.dequantize().double() @ right.dequantize().double().t()
    assert (got - expected).norm() / expected.norm() < 4e-3
