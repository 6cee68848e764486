import pytest

from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.config.pipeline import check_pipeline, interval_of, partition_of, stages_of
from megalowbit.errors import UserError


def read(pipeline=None, block=None, **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megalowbit": block or {},
        **({} if pipeline is None else {"pipeline": pipeline}),
        **more,
    }
    return read_deepspeed_config(config)


def test_a_block_is_filled_with_what_it_leaves_out():
    parts = read({"stages": 2, "activation_checkpoint_interval": 3})
    filled = parts.deepspeed["pipeline"]
    assert filled["stages"] == 2
    assert filled["use_reentrant"] is False
    assert partition_of(parts.deepspeed) == "parameters"
    assert interval_of(parts.deepspeed) == 3


def test_no_block_stays_none():
    parts = read()
    assert "pipeline" not in parts.deepspeed
    assert partition_of(parts.deepspeed) == "parameters"
    assert interval_of(parts.deepspeed) == 0


def test_partitions_are_handed_on_by_deepspeeds_names():
    assert partition_of(read({"stages": 2, "partition": "type:block"}).deepspeed) == "type:block"


@pytest.mark.parametrize(
    ("pipeline", "parts"),
    [
        ({"stage": 2}, ("pipeline.stage", "pipeline.stages")),
        ({"stages": 0}, ("pipeline.stages = 0", "≥ 1")),
        ({"stages": True}, ("pipeline.stages = True", "≥ 1")),
        ({"stages": "auto"}, ("pipeline.stages = 'auto'", "≥ 1")),
        ({"activation_checkpoint_interval": -1}, ("interval = -1", "≥ 0")),
        ({"partition": "profile"}, ("pipeline.partition", "parameters")),
        ({"seed_layers": True}, ("pipeline.seed_layers = true", "remove it")),
        ({"use_reentrant": True}, ("pipeline.use_reentrant = true", "remove it")),
        ({"pipe_partitioned": 1}, ("pipeline.pipe_partitioned = 1", "true or false")),
    ],
)
def test_a_wrong_key_or_value_is_named(pipeline, parts):
    with pytest.raises(UserError) as error:
        read(pipeline)
    for part in parts:
        assert part in str(error.value)


SPLIT = {"base": {"base": "nvfp4", "parameter_split": {"warmup_steps": 1, "rank": 2}}}


@pytest.mark.parametrize(
    ("block", "more", "part"),
    [
        ({}, {"zero_optimization": {"stage": 2}}, "zero_optimization.stage = 2"),
        ({"gradient_norm": "sum_of_norms"}, {}, "gradient_norm"),
        ({"layer_scaling": {"enabled": True}, "precision": "fp16"}, {}, "layer_scaling"),
        ({"recipe": "nvfp4", "regularizer": {"strength": 0.1}}, {}, "regularizer"),
        ({"recipe": SPLIT}, {}, "parameter_split"),
        ({"activation_checkpointing": {"every": 1}}, {}, "pipeline.activation_checkpoint_interval"),
        ({"chunked_cross_entropy": True}, {}, "chunked_cross_entropy"),
    ],
)
def test_settings_that_need_all_layers_are_rejected_with_stages(block, more, part):
    parts = read(block=block, **more)
    check_pipeline(parts.deepspeed, parts.settings, 1)
    with pytest.raises(UserError, match=r"pipeline\.stages = 2") as error:
        check_pipeline(parts.deepspeed, parts.settings, 2)
    assert part in str(error.value)


@pytest.mark.parametrize("pipeline", [None, {}])
def test_one_stage_is_the_default(pipeline):
    assert stages_of(read(pipeline).deepspeed) == 1
