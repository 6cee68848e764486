from megalowbit.layers.conversion.report import ConversionReport, KeptLayer, SwappedLayer
from megalowbit.layers.recipe import recipe


def report_for(blocks: int) -> ConversionReport:
    swapped = tuple(
        SwappedLayer(f"transformer.h.{block}.{name}", "Conv1D", size, 3 * size)
        for block in range(blocks)
        for name, size in (("attn.c_attn", 64), ("mlp.c_fc", 128))
    )
    return ConversionReport(
        recipe=recipe("nvfp4"), swapped=swapped, kept=(KeptLayer("lm_head", "Linear", "output head"),)
    )


def test_96_blocks_fit_one_screen_with_their_number():
    text = str(report_for(96))
    assert len(text.splitlines()) < 25
    assert "transformer.h.*.attn.c_attn  Conv1D 64→192  × 96" in text
    assert "converted 192 layers" in text
    assert "kept 1 layer in high precision:" in text
    assert "lm_head  Linear: output head" in text


def test_a_single_block_is_listed_without_a_number():
    assert "×" not in str(report_for(1))


def test_digits_within_a_name_are_not_block_numbers():
    swapped = (SwappedLayer("fc1", "Linear", 2, 3), SwappedLayer("fc2", "Linear", 2, 3))
    text = str(ConversionReport(recipe=recipe("nvfp4"), swapped=swapped, kept=()))
    assert "fc1" in text
    assert "fc2" in text


def test_a_recipe_that_quantises_nothing_says_so():
    assert "quantises nothing" in str(ConversionReport(recipe=recipe("bf16"), swapped=(), kept=()))
