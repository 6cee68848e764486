"""What cannot be served as it was trained is refused, in one line with reason and remedy."""

import pytest

from megalowbit.errors import UserError
from megalowbit.hf.packed.recipes import packed_format
from megalowbit.layers.recipe import named_recipes, recipe

SIZES = {"hidden_size": 64, "intermediate_size": 96}
PACKED = {  # named recipe → format of its weights, and whether servers round inputs in the same way
    "nvfp4": ("nvfp4", True),
    "mxfp4": ("mxfp4", True),
    "nvidia-nvfp4": ("nvfp4", True),
    "metis-nvfp4": ("nvfp4", False),
    "nvfp4-keep-positions": ("nvfp4", True),
    "nvfp4-first-block-fp8": ("nvfp4", True),
    "nvfp4-attention-fp8": ("nvfp4", True),
    "nvfp4-unbiased": ("nvfp4", True),
    "nvfp4-token-scale": ("nvfp4", False),
    "four-over-six": ("nvfp4", False),
    "four-over-six-448": ("nvfp4", False),
    "four-over-six-rht": ("nvfp4", False),
    "nvfp4-unbiased-backward": ("nvfp4", False),
    "fp4-all-the-way": ("nvfp4", True),
    "quartet-2": ("nvfp4", False),
    "tetrajet-2": ("nvfp4", False),
    "nvfp4-dequantized-backward": ("nvfp4", True),
}


def nvfp4(**changes):
    return {"base": "nvfp4", **changes}


REFUSED = [
    ("bf16", "w4a16", "quantises no weight in the forward: use one like nvfp4"),
    ("fp8", "w4a16", "the weight quantizer 'fp8e4m3' is neither NVFP4 nor MXFP4"),
    (
        nvfp4(q_forward_weight="hif4nosr"),
        "w4a16",
        "'hif4nosr' is neither NVFP4 nor MXFP4: use one like nvfp4",
    ),
    (nvfp4(q_forward_weight="ue5m3fp4e2m1bnosr"), "w4a16", "'ue5m3fp4e2m1bnosr' is neither NVFP4 nor"),
    (nvfp4(q_forward_weight="nvfp4e2m1bnosr:token_scale"), "w4a16", "token_scale' is neither NVFP4 nor"),
    (nvfp4(q_forward_weight="nvfp4e2m1b"), "w4a16", "'nvfp4e2m1b' draws other codes at each micro-batch"),
    (nvfp4(split_weight={"method": "svd", "rank": 2}), "w4a16", "split_weight adds a low-rank part"),
    (nvfp4(parameter_split={"rank": 2}), "w4a16", "parameter_split adds a low-rank part to the weight"),
    (nvfp4(layout="per_gemm", hadamard=["output"]), "w4a16", "Hadamard-transformed in the forward (hadamard"),
    (
        "metis-nvfp4",
        "w4a4",
        "split_input adds a low-rank part, which servers do not multiply: leave inputs unrounded",
    ),
    (
        "four-over-six",
        "w4a4",
        "servers do not round inputs as 'nvfp4e2m1bnosr:4over6' does: leave inputs",
    ),
    (nvfp4(q_forward_input="nvfp4e2m1b"), "w4a4", "servers do not round inputs as 'nvfp4e2m1b' does"),
    (
        nvfp4(q_forward_input="fp32"),
        "w4a4",
        "servers round inputs to NVFP4, and it to 'fp32': leave inputs",
    ),
    (nvfp4(q_forward_input="mxfp4e2m1bnosr"), "w4a4", "servers round inputs to NVFP4, and it to 'mxfp4"),
]


@pytest.mark.parametrize("name", named_recipes())
def test_every_named_recipe_is_packed_or_refused_by_name(name):
    format, has_inputs = PACKED.get(name, (None, False))
    if format is None:
        with pytest.raises(UserError, match=f"^recipe '{name}' cannot be packed, "):
            packed_format(recipe(name), "w4a16")
        return
    assert packed_format(recipe(name), "w4a16").name == format
    assert packed_format(recipe(name), "w4a16").input_encoding is None
    if has_inputs:
        assert packed_format(recipe(name), "w4a4").input_encoding is not None
    else:
        with pytest.raises(UserError, match=f"recipe '{name}' cannot be packed, .*w4a16"):
            packed_format(recipe(name), "w4a4")


@pytest.mark.parametrize(("given", "precision", "message"), REFUSED)
def test_a_recipe_that_servers_cannot_run_is_refused(given, precision, message):
    with pytest.raises(UserError) as caught:
        packed_format(recipe(given), precision)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
