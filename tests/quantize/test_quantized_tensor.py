import pytest
import torch

from megalowbit.quantize.names import quantizer


@pytest.fixture
def quantized():
    return quantizer("nvfp4e2m1bnosr").quantize(
        torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(2))
    )


def test_storage_is_four_bits_an_element_and_a_byte_a_block(quantized):
    assert quantized.codes.shape == (24, 32)
    assert quantized.codes.dtype == torch.uint8
    assert quantized.scales.shape == (24, 4)
    assert quantized.scales.dtype == torch.float8_e4m3fn
    assert quantized.tensor_scale.shape == ()
    assert quantized.nbytes == 24 * 32 + 24 * 4 + 4
    large = quantizer("nvfp4e2m1bnosr").quantize(torch.randn(512, 512))
    assert large.nbytes * 8 / 512**2 == pytest.approx(4.5, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_operand_is_exact_in_every_dtype(quantized, dtype):
    assert torch.equal(quantized.operand(dtype).double(), quantized.operand(torch.float64))


def test_operand_times_tensor_scale_is_the_dequantised_tensor(quantized):
    back = quantized.operand(torch.float32) * quantized.tensor_scale
    assert torch.equal(quantized.dequantize(), back.view(6, 4, 50))


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "fp32"])
def test_parts_hold_all_tensors_and_give_the_same_tensor_back(name):
    x = torch.randn(3, 20)
    whole = quantizer(name).quantize(x, with_counts=True)
    tensors, rest = whole.to_parts()
    held = [value for value in vars(rest).values() if isinstance(value, torch.Tensor)]
    assert all(value.numel() == 0 for value in held)
    assert torch.equal(rest.from_parts(tensors).dequantize(), whole.dequantize())
