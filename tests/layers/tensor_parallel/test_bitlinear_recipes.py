"""Which recipes fit layers in shards."""

import pytest

from megalowbit.errors import UserError
from megalowbit.layers.recipe import recipe
from megalowbit.layers.tensor_parallel.bitlinear import check_sharded_recipe


@pytest.mark.parametrize(
    ("name", "is_row", "shard", "is_fit"),
    [
        ("nvfp4", True, 16, True),
        ("nvfp4", True, 24, False),
        ("nvfp4", False, 16, True),
        ("nvfp4", False, 8, False),  # output gradients lie in blocks along the output features
        ("mxfp4", True, 16, False),
        ("mxfp4", True, 32, True),
        ("nvidia-nvfp4", False, 16, True),
        ("nvidia-nvfp4", False, 8, False),  # tiles of 16 × 16
        ("nvidia-nvfp4", True, 8, False),
        ("fp8", True, 3, True),
        ("speculative-int8", True, 64, False),  # blocks of 128
        ("speculative-int8", True, 256, True),
        ("speculative-int8", False, 64, False),
        ("bf16", False, 3, True),
    ],
)
def test_blocks_must_not_straddle_shards(name, is_row, shard, is_fit):
    def check():
        check_sharded_recipe(recipe(name), "layer x", is_row=is_row, shards=[shard])

    if is_fit:
        check()
    else:
        with pytest.raises(UserError, match=f"layer x: a shard of {shard} features"):
            check()


def test_groups_of_the_hadamard_transform_must_not_straddle_shards_either():
    block = {"base": "fp8", "layout": "per_gemm"}
    for products, is_row in ((["output"], True), (["grad_input"], False)):
        chosen = recipe({**block, "hadamard": products})
        check_sharded_recipe(chosen, "layer x", is_row=is_row, shards=[48])
        check_sharded_recipe(chosen, "layer x", is_row=not is_row, shards=[40])
        with pytest.raises(UserError, match="a shard of 40 features does not hold whole blocks of 16"):
            check_sharded_recipe(chosen, "layer x", is_row=is_row, shards=[40])


def test_the_block_that_does_not_fit_is_named_with_its_quantizer_in_one_line():
    with pytest.raises(UserError) as caught:
        check_sharded_recipe(recipe("speculative-int8"), "layer x", is_row=True, shards=[192])
    assert str(caught.value) == (
        "layer x: a shard of 192 features does not hold whole blocks of 128 of 'int8e5m2b': "
        "lower tensor_parallel.autotp_size, keep the layer in high precision, or use formats with one scale "
        "a tensor (recipe fp8; in speculation also candidates without mixed)"
    )


@pytest.mark.parametrize("is_row", [False, True])
def test_a_gradient_of_grad_weights_own_is_cut_in_column_parallel_layers_alone(is_row):
    own = recipe({"base": "fp8", "q_backward_outputgrad_for_weight": "mxfp4e2m1b"})
    if is_row:
        check_sharded_recipe(own, "layer x", is_row=is_row, shards=[16])
        return
    with pytest.raises(
        UserError, match="a shard of 16 features does not hold whole blocks of 32 of 'mxfp4e2m1b'"
    ):
        check_sharded_recipe(own, "layer x", is_row=is_row, shards=[16])


def test_splits_are_refused():
    with pytest.raises(UserError, match="split_input, which needs full tensors"):
        check_sharded_recipe(recipe("metis-nvfp4"), "layer x", is_row=True, shards=[16])
