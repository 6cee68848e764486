import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.formats.codes import pack_codes, unpack_codes

EVERY_WIDTH = pytest.mark.parametrize("bits", [2, 4, 6, 8])


def as_one_number(codes: list[int], bits: int) -> list[int]:
    """Bytes of the codes as one big integer, the first code in the lowest bits."""
    number = sum(code << bits * place for place, code in enumerate(codes))
    return list(number.to_bytes(len(codes) * bits // 8, "little"))


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (4, [0x3, 0xA], [0xA3]),
        (2, [1, 2, 3, 0], [0b00111001]),
        (6, [1, 2, 3, 63], [0x81, 0x30, 0xFC]),
        (8, [5, 200], [5, 200]),
    ],
)
def test_the_first_code_lies_in_the_lowest_bits(bits, codes, packed):
    assert pack_codes(torch.tensor([codes], dtype=torch.uint8), bits).tolist() == [packed]


@EVERY_WIDTH
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_packing_equals_one_big_integer_and_unpacking_undoes_it(bits, data):
    count = 4 * data.draw(st.integers(1, 12))
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = pack_codes(tensor, bits)
    assert packed.tolist() == as_one_number(codes, bits)
    assert torch.equal(unpack_codes(packed, bits), tensor)


@EVERY_WIDTH
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 3, 8)])
def test_any_number_of_axes_is_packed_along_the_last_even_empty_ones(bits, shape):
    codes = torch.randint(2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_codes(codes, bits)
    assert packed.shape == (*shape[:-1], shape[-1] * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize(("bits", "count"), [(4, 3), (2, 6), (6, 6)])
def test_codes_that_do_not_fill_whole_bytes_are_refused(bits, count):
    with pytest.raises(RuntimeError):
        pack_codes(torch.zeros(count, dtype=torch.uint8), bits)
