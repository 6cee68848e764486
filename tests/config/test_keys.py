import pytest

from megalowbit.config.keys import check_keys, check_no_auto_left
from megalowbit.errors import UserError


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": False},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        {"tensor_parallel": {"tp": {}, "vocab_parallel_ce_backend": "torch", "kernel_inject": False}},
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1},
        {"data_types": {"grad_accum_dtype": "fp32"}, "torch_autocast": {"enabled": False}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"managed_gradient_accumulation": True, "hybrid_engine": {"enabled": False}},
    ],
)
def test_supported_configurations_pass(config):
    assert check_keys(config) is None


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"zero_optimization": True}, "zero_optimization = true is an old name of stage 1"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size = 2"),
        ({"tensor_parallel": {"tp": {"tp_size": 4}}}, "tensor_parallel.tp = {'tp_size': 4}"),
        ({"tensor_parallel": {"tensor_parallel": {"tp_size": 4}}}, "tensor_parallel.tensor_parallel = "),
        (
            {"tensor_parallel": {"replace_with_kernel_inject": True}},
            "tensor_parallel.replace_with_kernel_inject = True",
        ),
        ({"tensor_parallel": {"dtype": "fp16"}}, "tensor_parallel.dtype = 'fp16'"),
        (
            {"tensor_parallel": {"vocab_parallel_ce_backend": "liger"}},
            "tensor_parallel.vocab_parallel_ce_backend = 'liger'",
        ),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled = True"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled = True"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype = 'bf16'"),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing = "),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, "activation_checkpointing = "),
        ({"activation_checkpointing": True}, "activation_checkpointing = True"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation = False"),
    ],
)
def test_unsupported_settings_are_rejected_with_key_value_and_remedy(config, key):
    with pytest.raises(UserError) as caught:
        check_keys(config)
    message = str(caught.value)
    assert message.startswith(key)
    assert ": " in message
    assert "\n" not in message


@pytest.mark.parametrize("key", ["amp", "elasticity", "sparse_attention"])
def test_a_feature_deepspeed_removed_is_refused(key):
    with pytest.raises(UserError, match=f"^{key} = .* was removed from DeepSpeed: remove it"):
        check_keys({key: {"enabled": True}})


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match="unknown key 'gradient_cliping': did you mean 'gradient_clipping'"):
        check_keys({"gradient_cliping": 1.0})


def test_an_auto_that_nothing_fills_is_refused_by_its_path():
    with pytest.raises(UserError, match=r"^zero_optimization\.reduce_bucket_size = 'auto' cannot be filled"):
        check_no_auto_left({"zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}})


def test_deepspeeds_own_auto_stays():
    assert check_no_auto_left({"data_types": {"keep_in_fp32_modules": "auto"}}) is None


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"zero_optimization": {"stge": 2}},
            "unknown key 'zero_optimization.stge': did you mean 'zero_optimization.stage'?",
        ),
        (
            {"tensor_parallel": {"autotp_sise": 2}},
            "unknown key 'tensor_parallel.autotp_sise': did you mean 'tensor_parallel.autotp_size'? "
            "known: tensor_parallel.autotp_size",
        ),
    ],
)
def test_a_misspelt_key_of_a_block_that_sizes_the_run_names_the_nearest(config, line):
    with pytest.raises(UserError) as caught:
        check_keys(config)
    assert str(caught.value) == line


def test_a_key_outside_our_block_is_reported_with_the_block_it_belongs_to():
    with pytest.raises(UserError, match=r"'watchdog': move it into .*, megalowbit\.watchdog"):
        check_keys({"watchdog": {}}, ours=("watchdog",))
    with pytest.raises(UserError, match="unknown key 'wachdog'"):
        check_keys({"wachdog": {}}, ours=("watchdog",))
