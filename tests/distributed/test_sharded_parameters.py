"""Low-bit layers under torch's FSDP 2 on two real ranks, compared with unsharded models."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(launch_ranks):
    return launch_ranks("ranks_fsdp.py", is_compared=False).wait(
        timeout=180
    )  # FSDP's collectives are torch's


def steps(rank):
    return [*rank["gpt2"].values(), rank["llama"]]


def test_losses_and_gradients_are_those_of_unsharded_models_with_the_random_numbers_of_each_rank(seen):
    for rank in seen:
        for found in steps(rank):
            assert found["loss"] == found["expected_loss"]
            assert found["error"] < 1e-5  # rounded in another way, elements of FP4 would differ by a tenth
            assert found["num_weights"] > 16


def test_ranks_do_not_share_random_numbers(seen):
    assert all(rank["other_numbers"] > 1e-3 for rank in seen)


def test_what_is_exported_is_a_gpt2_of_transformers_with_the_same_loss(seen):
    for rank in seen:
        sharded, loaded, unsharded = rank["exported"]["losses"]
        assert sharded == loaded == pytest.approx(unsharded, abs=1e-6)
        assert rank["exported"]["are_shapes_equal"]


def test_a_run_resumed_from_a_sharded_checkpoint_has_the_same_losses(seen):
    for rank in seen:
        assert rank["resumed"]["found"] == rank["resumed"]["expected"]


def test_products_are_quantised_under_a_policy_of_bf16_whose_masters_are_fp32(seen):
    for rank in seen:
        assert rank["mixed"]["dtype"] == "torch.float32"
        assert rank["mixed"]["losses"][-1] < rank["mixed"]["losses"][0] - 0.5
        assert sum(rank["mixed"]["products"]["output"].values()) == 8 * 8  # layers and steps


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("convert", "convert the model before"),
        ("restore", "get a full state dict, which is the plain model's"),
        ("optimizer", "use torch's optimizer and an fp32 model with MixedPrecisionPolicy("),
        ("local_ddp", "leave out LocalDDP; FSDP averages gradients itself"),
        ("regularizer", "the regulariser needs whole weights, so train without FSDP"),
        ("split", "split the weights before, or train without FSDP"),
        ("early_optimizer", "build the optimizer after"),
    ],
)
def test_what_needs_whole_parameters_is_refused_with_a_remedy(seen, what, remedy):
    for rank in seen:
        assert remedy in str(rank["refused"][what])
