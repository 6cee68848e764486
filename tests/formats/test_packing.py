import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.formats.element import E2M1
from megalowbit.formats.packing import (
    PIECE_BLOCKS,
    in_pieces,
    pack_codes,
    pack_keys,
    unpack_codes,
    unpack_values,
)
from megalowbit.formats.rounding import nearest_key_codes, stochastic_key_codes


def test_first_code_lies_in_the_low_nibble():
    assert pack_codes(torch.tensor([[0x3, 0xA]], dtype=torch.uint8)).tolist() == [[0xA3]]


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
@settings(deadline=None, max_examples=50)
def test_packing_codes_and_unpacking_them_is_the_identity(codes):
    tensor = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(tensor)), tensor)


def test_unpack_values_decodes_all_256_bytes():
    packed = torch.arange(256, dtype=torch.uint8)
    expected = [E2M1.code_values()[code] for byte in range(256) for code in (byte & 15, byte >> 4)]
    assert unpack_values(packed, E2M1).tolist() == expected


@pytest.mark.parametrize("key_codes", [nearest_key_codes(E2M1), stochastic_key_codes(E2M1)])
def test_pack_keys_equals_coding_each_key_and_packing_pairs(key_codes):
    keys = torch.arange(-48, 48, dtype=torch.int8)[
        torch.randperm(96, generator=torch.Generator().manual_seed(0))
    ]
    codes = torch.tensor([key_codes[key % 256] for key in keys.tolist()], dtype=torch.uint8)
    assert torch.equal(pack_keys(keys, key_codes), pack_codes(codes))
    out = torch.empty(48, dtype=torch.uint8)
    pack_keys(keys, key_codes, out=out)
    assert torch.equal(out, pack_codes(codes))


def test_an_odd_number_of_keys_is_refused():
    with pytest.raises(RuntimeError):
        pack_keys(torch.zeros(3, dtype=torch.int8), nearest_key_codes(E2M1))


@pytest.mark.parametrize("num_blocks", [1, PIECE_BLOCKS, PIECE_BLOCKS + 1, 2 * PIECE_BLOCKS + 5])
def test_pieces_cover_every_block_once_and_in_step(num_blocks):
    blocks = torch.arange(num_blocks).view(-1, 1)
    halves = torch.arange(2 * num_blocks)
    seen = list(in_pieces(num_blocks, blocks.device, blocks, halves))
    assert torch.equal(torch.cat([piece for piece, _ in seen]), blocks)
    assert torch.equal(torch.cat([half for _, half in seen]), halves)
    assert all(len(half) == 2 * len(piece) <= 2 * PIECE_BLOCKS for piece, half in seen)
