import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.checkpoints.layout import Layout, Slice, StoredParameter
from megalowbit.errors import UserError


def parameter(name, numel, **place):
    return StoredParameter(name=name, shape=(numel,), dtype="bfloat16", **{"group": 0, "state": 0, **place})


def layout(stage, data_size, *parameters, sizes=()):
    part = Slice(parameters=parameters, partition_sizes=sizes, buffers={"mask": ("a.pt", "mask")})
    return Layout(stage=stage, data_size=data_size, slices=(part,), tied={"head": "embedding"})


def held(written, index=0):
    part = written.slices[0]
    return [tuple(piece) for piece in written.fragments(part, part.parameters[index])]


def test_a_whole_master_is_one_fragment():
    assert held(layout(0, 4, parameter("a", 7))) == [(0, 0, 0, 7)]


def test_a_flat_group_is_cut_where_its_partitions_end():
    written = layout(1, 3, parameter("a", 5), parameter("b", 8, offset=5), sizes=(6,))
    assert held(written, 0) == [(0, 0, 0, 5)]
    assert held(written, 1) == [(0, 5, 0, 1), (1, 0, 1, 6), (2, 0, 7, 1)]


def test_each_rank_holds_an_equal_part_at_stage_three_and_the_last_one_less():
    written = layout(3, 3, parameter("a", 7, offset=4, size=3))
    assert held(written) == [(0, 4, 0, 3), (1, 4, 3, 3), (2, 4, 6, 1)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 9))
def test_fragments_cover_every_element_exactly_once(sizes, data_size, padding):
    total = sum(sizes) + padding
    partition = -(-total // data_size)
    places = [sum(sizes[:index]) for index in range(len(sizes))]
    flat = [parameter(str(i), size, offset=places[i]) for i, size in enumerate(sizes)]
    written = layout(2, data_size, *flat, sizes=(partition,))
    written.check("here")
    taken = set()
    for index, size in enumerate(sizes):
        pieces = held(written, index)
        elements = [start + i for _, _, start, numel in pieces for i in range(numel)]
        assert elements == list(range(size))
        places_of = [(rank, start + i) for rank, start, _, numel in pieces for i in range(numel)]
        assert not taken & set(places_of)
        taken |= set(places_of)


def test_what_is_written_is_read_back():
    cut = {"dim": 0, "parts": [4, 4]}
    written = layout(3, 2, parameter("a", 7, size=4, weight=("f", "k"), cut=cut))
    assert Layout.from_dict(written.to_dict(), where="here") == written
    assert written.describe() == "ZeRO 3 on 2 data-parallel ranks"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (layout(1, 1, parameter("a", 5), parameter("b", 5, offset=4), sizes=(9,)), "a and b overlap"),
        (layout(1, 2, parameter("a", 5), sizes=(2,)), "holds 4 of the 5 elements of a"),
        (layout(3, 2, parameter("a", 5, size=2)), "holds 4 of the 5 elements of a"),
        (layout(0, 1, parameter("a", 5), parameter("a", 5, offset=1)), "is in slice 0 twice"),
        (layout(0, 1, parameter("a", 5), parameter("b", 5)), "a and b overlap"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(broken, message):
    with pytest.raises(UserError, match=message):
        Layout.from_dict(broken.to_dict(), where="here")


def test_other_formats_and_damage_are_refused():
    saved = layout(0, 1, parameter("a", 5)).to_dict()
    with pytest.raises(UserError, match="layout of format 2, not 1"):
        Layout.from_dict({**saved, "format": 2}, where="here")
    with pytest.raises(UserError, match="cannot be read"):
        Layout.from_dict({**saved, "slices": [{}]}, where="here")
