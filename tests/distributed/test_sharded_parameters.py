"""Low-bit layers under torch's FSDP 2 on two real ranks, compared with unsharded models."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(launch_ranks):
    # not compared: a rank alone saves the model, and torch's checkpoints have a coordinator
    return launch_ranks("ranks_fsdp.py", is_compared=False).wait(timeout=240)


def test_losses_and_gradients_have_the_bits_of_unsharded_models_with_the_random_numbers_of_each_rank(seen):
    for rank in seen:
        for found in rank["steps"].values():
            assert found["loss"] == found["expected"]
            assert found["different"] == []
            assert found["are_nonzero"]


def test_ranks_do_not_share_random_numbers(seen):
    assert all(rank["other_numbers"] > 1e-3 for rank in seen)


def test_what_is_exported_is_a_gpt2_of_transformers_with_the_same_loss(seen):
    for rank in seen:
        sharded, loaded, unsharded = rank["exported"]["losses"]
        assert sharded == loaded == pytest.approx(unsharded, abs=1e-6)
        assert rank["exported"]["are_shapes_equal"]


def test_a_run_resumed_from_a_sharded_checkpoint_has_the_same_losses_unless_a_split_carries_directions(seen):
    for rank in seen:
        plain, split = rank["resumed"]["nvfp4"], rank["resumed"]["metis-qb"]
        assert plain["found"] == plain["expected"]
        assert split["found"] != split["expected"]  # as the page says
        assert split["found"] == pytest.approx(split["expected"], rel=0.01)


def test_a_model_learns_under_a_policy_of_bf16_and_low_bit_layers_make_all_its_products(seen):
    for rank in seen:
        assert rank["trained"]["losses"][-1] < rank["trained"]["losses"][0] - 0.5
        layers, steps = 8, 8
        assert set(rank["trained"]["products"].values()) == {layers * steps}


def test_checkpointing_changes_no_bit_of_accumulated_gradients(seen):
    assert all(rank["accumulated"] == [] for rank in seen)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("convert", "call convert before the model is sharded"),
        ("initialize", "leave out fully_shard, because DeepSpeed shards it"),
        ("pipeline", "leave out fully_shard"),
        ("restore", "restore: torch's fully_shard has sharded GPT2LMHeadModel: its full state dict is"),
        ("optimizer", "use torch's optimizer and an fp32 model with MixedPrecisionPolicy("),
        ("local_ddp", "leave it out, because FSDP averages gradients itself"),
        ("regularizer", "leave it out, because it needs whole weights"),
        ("keep_fp32", "leave it out, and give modules to fully_shard with a policy of fp32"),
        ("cache", "leave it out, because each forward gathers weights anew"),
        ("plain_state", "pass a full state dict, on the CPU"),
        ("split", "choose a recipe without parameter_split"),
        ("split_in_training", "choose a recipe without parameter_split"),
        ("early_optimizer", "AdamW holds 28 weights that the model no longer has"),
        ("early_optimizer", "build the optimizer after fully_shard"),
        ("early_optimizer_of_ours", "build the optimizer after fully_shard"),
    ],
)
def test_what_needs_whole_parameters_is_refused_with_a_remedy_also_after_an_evaluation(seen, what, message):
    for rank in seen:
        at_once, later = rank["refused"]
        assert message in str(at_once[what])
        assert message in str(later[what])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("regularizer", "leave it out, because it needs whole weights"),
        ("layer", "has a sharded weight: call the module that fully_shard was given"),
        ("optimizer", "FP32Optimizer: torch's fully_shard or parallelize_module has sharded parameter"),
    ],
)
def test_calls_that_see_no_model_refuse_its_shards(seen, what, message):
    assert all(message in str(rank["refused_without_a_model"][what]) for rank in seen)


def test_an_optimizer_that_holds_gathered_weights_is_refused_and_one_that_holds_shards_is_not(seen):
    for rank in seen:
        right, wrong = rank["checked"]
        assert right is None
        assert "after fully_shard, and after model.reshard() if the model ran" in wrong
