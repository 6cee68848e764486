import pytest

from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.config.zero import check_parameter_split
from megalowbit.errors import UserError, lines_of

CPU = {"device": "cpu"}


def read(zero, *, block=None, **keys):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "megalowbit": block or {},
        **keys,
    }
    return read_deepspeed_config(config)


@pytest.mark.parametrize(
    "zero",
    [
        {},
        {"stage": 0},
        {"stage": 1, "offload_optimizer": CPU},
        {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
        {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "stage3_max_live_parameters": 10},
        {"stage": 0, "offload_param": {"device": "none"}, "cpu_offload": False},
        {"stage": 3, "stage3_module_granularity_threshold": 0, "allgather_bucket_size": 3},
        {"stage": 3, "zero_hpz_partition_size": 1, "zenflow": None, "compute_grad_norm": True},
    ],
)
def test_settings_that_do_not_change_results_pass(zero):
    assert read(zero).deepspeed["zero_optimization"] == zero


@pytest.mark.parametrize(
    ("zero", "key"),
    [
        ({"stage": 4}, "zero_optimization.stage = 4"),
        ({"stage": "two"}, "zero_optimization.stage = 'two'"),
        ({"stage": True}, "zero_optimization.stage = True"),
        ({"stage": 0, "offload_optimizer": CPU}, "zero_optimization.offload_optimizer needs stage 1, 2 or 3"),
        ({"stage": 2, "offload_param": CPU}, "zero_optimization.offload_param needs stage 3, not 2"),
        (
            {"stage": 3, "offload_param": {"device": "nvme"}},
            "zero_optimization.offload_param.device = 'nvme'",
        ),
        (
            {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}},
            "zero_optimization.offload_optimizer.ratio",
        ),
        (
            {"stage": 3, "offload_optimizer": {**CPU, "super_offload": True}},
            "zero_optimization.offload_optimizer.super_offload",
        ),
        ({"stage": 2, "cpu_offload": True}, "zero_optimization.cpu_offload = True"),
        ({"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "zero_optimization.zenflow"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_optimization.zero_hpz_partition_size = 2"),
        ({"stage": 3, "zero_quantized_weights": True}, "zero_optimization.zero_quantized_weights = True"),
        ({"stage": 3, "zero_quantized_gradients": True}, "zero_optimization.zero_quantized_gradients = True"),
        ({"stage": 1, "elastic_checkpoint": True}, "zero_optimization.elastic_checkpoint = True"),
        ({"stage": 1, "round_robin_gradients": True}, "zero_optimization.round_robin_gradients = True"),
        (
            {"stage": 3, "stage3_module_granularity_threshold": 100_000},
            "zero_optimization.stage3_module_granularity_threshold = 100000",
        ),
        (
            {"stage": 3, "module_granularity_threshold": 1},
            "zero_optimization.module_granularity_threshold = 1",
        ),
        ({"stage": 2, "allgather_bucket_size": 3}, "zero_optimization.allgather_bucket_size = 3"),
        ({"stage": 1, "compute_grad_norm": False}, "zero_optimization.compute_grad_norm = False"),
        ({"stage": 1, "load_from_fp32_weights": False}, "zero_optimization.load_from_fp32_weights = False"),
    ],
)
def test_settings_that_change_results_or_prevent_saving_are_rejected(zero, key):
    with pytest.raises(UserError) as caught:
        read(zero)
    message = str(caught.value)
    assert message.startswith(key)
    assert ": " in message
    assert "\n" not in message


def test_deepspeeds_old_form_of_stage_0_is_accepted():
    assert read(False).deepspeed["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("block", "keys", "named"),
    [
        ({"layer_scaling": {"enabled": True}}, {}, "megalowbit.layer_scaling"),
        ({"fp32_norms": True}, {}, "megalowbit.fp32_norms"),
        ({}, {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op = 'sum'"),
        ({}, {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}, "optimizer.type = 'Adagrad'"),
    ],
)
def test_settings_that_need_full_gradients_require_stage_0(stage, block, keys, named):
    with pytest.raises(UserError) as caught:
        read({"stage": stage}, block={"precision": "fp16", **block}, **keys)
    assert named in lines_of(caught.value)[0]
    assert "zero_optimization.stage" in str(caught.value)


@pytest.mark.parametrize(("stage", "is_refused"), [(1, False), (2, True), (3, True)])
def test_prescaling_is_for_stages_0_and_1(stage, is_refused):
    if not is_refused:
        read({"stage": stage}, prescale_gradients=True)
        return
    with pytest.raises(UserError, match="prescale_gradients and gradient_predivide_factor need"):
        read({"stage": stage}, prescale_gradients=True)


@pytest.mark.parametrize("moved", [{"float32": ["linear"]}, {"promote": ["linear"]}])
def test_at_stage_3_linear_stays_in_its_class(moved):
    read({"stage": 2}, block={"autocast": moved})
    read({"stage": 3}, block={"autocast": {"float32": ["gelu"]}})
    with pytest.raises(UserError, match=r"autocast cannot move linear with zero_optimization\.stage 3"):
        read({"stage": 3}, block={"autocast": moved})


SPLIT = {"base": "nvfp4", "parameter_split": {"rank": 8}}


@pytest.mark.parametrize("zero", [True, {"stage": 1}, {"stage": 2}, {"stage": 3, "offload_param": None}])
@pytest.mark.parametrize("recipe", [SPLIT, {"base": SPLIT, "keep_last": 1}])
def test_splitting_parameters_under_zero_is_refused_with_the_way_out(zero, recipe):
    with pytest.raises(UserError, match=r"set zero_optimization.stage to 0, or use split_weight"):
        check_parameter_split({"zero_optimization": zero}, recipe)


@pytest.mark.parametrize("zero", [None, False, {}, {"stage": 0}])
def test_without_sharding_parameters_may_be_split(zero):
    assert check_parameter_split({"zero_optimization": zero}, SPLIT) is None
    assert check_parameter_split({}, SPLIT) is None


@pytest.mark.parametrize(
    "recipe",
    [None, "nvfp4", {"base": "nvfp4", "split_weight": {"rank": 8}}, {"base": SPLIT, "parameter_split": None}],
)
def test_zero_is_no_obstacle_to_other_recipes(recipe):
    check_parameter_split({"zero_optimization": {"stage": 2}}, recipe)
