import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megalowbit.formats.tables import cached_table


@pytest.fixture
def squares():
    calls = []

    @cached_table
    def build(size, device):
        calls.append(size)
        return torch.arange(size, device=device) ** 2

    return build, calls


def test_a_table_is_built_once_for_each_argument(squares):
    build, calls = squares
    first = build(4, torch.device("cpu"))
    assert first.tolist() == [0, 1, 4, 9]
    assert build(4, torch.device("cpu")) is first
    assert build(5, torch.device("cpu")).tolist() == [0, 1, 4, 9, 16]
    assert calls == [4, 5]


def test_a_table_first_needed_under_fake_tensors_is_a_real_one(squares):
    build, _ = squares
    with FakeTensorMode():
        table = build(4, torch.device("cpu"))
    assert not isinstance(table, FakeTensor)
    assert table.tolist() == [0, 1, 4, 9]


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1b", "fp8e4m3"])
def test_a_quantizer_traced_first_still_works_on_real_tensors(name):
    from megalowbit.formats import block_scale, codes
    from megalowbit.quantize.names import quantizer

    for cached in (codes._boundaries, codes._values, block_scale._powers_of_two):
        cached.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(quantizer(name)(torch.ones(2, 16)), FakeTensor)
    # .75 is on the grid of every one of these
    x = torch.full((2, 16), 0.75)
    assert torch.allclose(quantizer(name)(x), x, rtol=1e-6, atol=0)
