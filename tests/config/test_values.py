import sys

import pytest

from megalowbit.config.values import check_values
from megalowbit.errors import UserError, shown

OBJECTS = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "checkpoint",
    "comet",
    "comms_logger",
    "compile",
    "csv_monitor",
    "data_efficiency",
    "data_types",
    "datastates_ckpt",
    "expert_parallel",
    "flops_profiler",
    "hybrid_engine",
    "pipeline",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "torch_autocast",
    "wandb",
    "weight_quantization",
    "zero_optimization",
)
SWITCHES = (
    "dataloader_drop_last",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "memory_breakdown",
    "prescale_gradients",
    "use_data_before_expert_parallelism",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"steps_per_print": 10, "vocabulary_size": 50304, "dataloader_drop_last": True},
        {"steps_per_print": None, "log_level": None, "communication_data_type": None},
        {"log_level": "WARNING", "communication_data_type": "fp32", "gradient_allreduce_op": "sum"},
        {"prescale_gradients": True, "gradient_predivide_factor": 8},
        {"zero_optimization": False, "checkpoint": {}, "csv_monitor": {"enabled": True}},
        {"comet": {"enabled": False}, "wandb": {}},
    ],
)
def test_what_deepspeed_can_use_passes(config):
    check_values(config)


@pytest.mark.parametrize("key", OBJECTS)
@pytest.mark.parametrize("value", [[], 3, "on", None])
def test_a_block_that_is_no_object_is_refused(key, value):
    with pytest.raises(UserError, match=f"^{key} = .* must be an object {{…}}"):
        check_values({key: value})


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "true", [], None])
def test_a_switch_that_is_no_boolean_is_refused(key, value):
    with pytest.raises(UserError, match=f"^{key} = .* must be true or false"):
        check_values({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps_per_print", 0),
        ("steps_per_print", "a"),
        ("steps_per_print", 2.5),
        ("steps_per_print", True),
        ("gradient_predivide_factor", 0),
        ("gradient_predivide_factor", -2.0),
        ("gradient_predivide_factor", 1e-300),
        ("gradient_predivide_factor", 10**400),
        ("gradient_predivide_factor", float("nan")),
        ("gradient_predivide_factor", True),
        ("gradient_predivide_factor", None),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_one_line_with_key_and_value(key, value):
    with pytest.raises(UserError) as caught:
        check_values({key: value})
    assert str(caught.value).startswith(f"{key} = {shown(value)} must be")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_level", "bogus"),
        ("log_level", 10),
        ("gradient_allreduce_op", "max"),
        ("gradient_allreduce_op", None),
        ("communication_data_type", "fp99"),
        ("communication_data_type", 16),
        ("seq_parallel_communication_data_type", True),
    ],
)
def test_a_name_deepspeed_does_not_know_is_refused_with_those_it_knows(key, value):
    with pytest.raises(UserError, match=f"^unknown {key} {value!r}: .*known: "):
        check_values({key: value})


@pytest.mark.parametrize(
    ("key", "package"), [("comet", "comet_ml"), ("wandb", "wandb"), ("tensorboard", "tensorboard")]
)
def test_a_monitor_needs_its_package(key, package, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=f"^{key}.enabled = True .* pip install {package}"):
        check_values({key: {"enabled": True}})
    # what an earlier run leaves in the working directory is no package
    (tmp_path / package).mkdir()
    with pytest.raises(UserError, match=f"pip install {package}"):
        check_values({key: {"enabled": True}})
    (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "elsewhere"])
    sys.path_importer_cache.pop(str(tmp_path), None)
    check_values({key: {"enabled": True}})
