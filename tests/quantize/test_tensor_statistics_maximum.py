"""The maximum that shards agree on is the one that a quantizer finds itself."""

import math

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.tensor_statistics import needs_maximum, tensor_maximum

NAMES = ("nvfp4e2m1bnosr", "nvfp4e2m1bnosr:tile16", "nvfp4e2m1bnosr:4over6", "nvfp4e2m1bnosr:q_scalar=1.5")


def values(rows=32, cols=64, dtype=torch.float32):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", [*NAMES, "fp8e4m3"])
def test_shards_under_a_common_maximum_are_those_of_the_whole(name, dtype):
    x, chosen = values(dtype=dtype), quantizer(name)
    whole = chosen.quantize(x).dequantize()
    shards = x.chunk(2, 0)
    largest = torch.stack([tensor_maximum(shard, chosen.encoding) for shard in shards]).amax()
    joined = torch.cat([chosen.quantize(shard, tensor_amax=largest).dequantize() for shard in shards])
    assert torch.equal(joined, whole)


@pytest.mark.parametrize("name", NAMES[:1])
def test_shards_of_a_transformed_operand_are_those_of_the_whole(name):
    x, chosen, signs = values(), quantizer(name), 0b1011001110001011
    whole = chosen.quantize_transposed(x, signs=signs).dequantize()
    shards = x.chunk(2, 1)
    largest = torch.stack([tensor_maximum(each.t(), chosen.encoding, signs) for each in shards]).amax()
    made = [chosen.quantize_transposed(each, signs=signs, tensor_amax=largest) for each in shards]
    assert torch.equal(torch.cat([each.dequantize() for each in made]), whole)


def test_a_block_with_an_infinity_does_not_count_but_spoils_a_tensor_under_one_scale():
    x = values()
    x[0, 0], x[3, 20] = math.nan, math.inf
    rest = x.clone()
    rest[0, :16] = rest[3, 16:32] = 0
    assert tensor_maximum(x, quantizer(NAMES[0]).encoding) == rest.abs().amax()
    assert tensor_maximum(x, quantizer("fp8e4m3").encoding) == math.inf


def test_an_empty_shard_has_a_maximum_of_zero():
    assert tensor_maximum(torch.empty(0, 16), quantizer(NAMES[0]).encoding) == 0


def test_which_quantizers_need_one():
    assert needs_maximum(quantizer("nvfp4e2m1b"))
    assert needs_maximum(quantizer("int8"))
    assert not needs_maximum(quantizer("mxfp4e2m1b"))
    assert not needs_maximum(quantizer("fp8e4m3b"))
    assert not needs_maximum(quantizer("fp32"))
    for name in ("1p58bit", "fp4e2m1b:seed_compat"):
        with pytest.raises(UserError, match="needs the full tensor"):
            needs_maximum(quantizer(name))
