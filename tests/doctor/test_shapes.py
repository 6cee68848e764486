import pytest

from megalowbit.doctor.shapes import block_size, check_shapes, sizes_of
from megalowbit.families.vocabulary import num_tokens
from megalowbit.layers.recipe import recipe

EVEN = {"n_embd": 128, "n_head": 2, "vocab_size": 256}
SAMPLE = ("megalowbit.data.sequence_length=64",)


def codes(plan):
    return [each.code for each in check_shapes(plan)]


def test_even_sizes_have_no_notices(tiny):
    plan = tiny(*SAMPLE, model=EVEN)
    assert codes(plan) == []
    assert all(size.value % size.wanted == 0 and not size.fix for size in sizes_of(plan))


def test_the_fix_of_the_vocabulary_is_one_that_works(tiny):
    plan = tiny(*SAMPLE, model={**EVEN, "vocab_size": 50257})
    (found,) = check_shapes(plan)
    assert (found.level, found.code) == ("warning", "shape-vocabulary")
    option, key_and_value = found.fix.split()[:2]
    assert option == "--set"
    assert "50,304 rows, 47 of them without a token" in found.fix
    fixed = tiny(*SAMPLE, key_and_value, model={**EVEN, "vocab_size": 50257})
    assert codes(fixed) == []
    assert (fixed.model.vocab_size, num_tokens(fixed.model)) == (50304, 50257)


def test_a_vocabulary_of_a_multiple_of_8_is_only_a_note(tiny):
    (found,) = check_shapes(tiny(*SAMPLE, model={**EVEN, "vocab_size": 264}))
    assert found.level == "note"


def test_hidden_sizes_that_are_no_multiple_of_8_are_warned_of(tiny):
    found = check_shapes(tiny(*SAMPLE, model={**EVEN, "n_embd": 36, "n_head": 2}))
    units = [each for each in found if each.code == "shape-units"]
    assert any("hidden size 36" in each.text for each in units)
    assert any(each.code == "shape-head" and "size 18" in each.text for each in found)


def test_the_micro_batch_fills_tiles(tiny):
    plan = tiny("megalowbit.data.sequence_length=32", model=EVEN)
    assert plan.micro_tokens == 64
    (found,) = check_shapes(plan)
    assert found.code == "shape-tokens"
    fixed = tiny("megalowbit.data.sequence_length=32", found.fix.removeprefix("--set "), model=EVEN)
    assert fixed.micro_tokens % 128 == 0
    assert codes(fixed) == []


@pytest.mark.parametrize(
    ("name", "size"), [("nvfp4", 16), ("mxfp4", 32), ("speculative-int8", 128), ("bf16", 1), ("fp8", 1)]
)
def test_block_sizes_of_recipes(name, size):
    assert block_size(recipe(name)) == size


def test_sizes_that_leave_blocks_partly_empty_are_notes(tiny):
    plan = tiny(*SAMPLE, "megalowbit.recipe=mxfp4", model={**EVEN, "n_inner": 272})  # 17 · 16
    found = [each for each in check_shapes(plan) if each.code == "shape-blocks"]
    assert found
    assert all(each.level == "note" and "272" in each.text for each in found)


def test_tensor_parallel_sizes_are_those_of_a_rank(tiny):
    parallel = ("tensor_parallel.autotp_size=2", "megalowbit.recipe=bf16")  # others refuse partial blocks
    plan = tiny(*SAMPLE, *parallel, processes=2, model={**EVEN, "n_inner": 24})
    found = [each for each in check_shapes(plan) if each.code == "shape-units"]
    assert any("on a rank 12" in each.text for each in found)
