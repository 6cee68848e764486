import copy
import json
import subprocess
import sys
from typing import get_args

import pytest

from megalowbit.config.deepspeed_json import LOOP_SECTIONS, load_json, read_deepspeed_config
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.errors import UserError
from megalowbit.optim.gradients.norm import GradientNorm
from megalowbit.pretrain.config import SETTINGS_MODEL

PLAIN = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_a_stock_config_with_auto_everywhere_is_complete_after_reading(tmp_path):
    stock = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 3,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "fp16": {"enabled": True, "initial_scale_power": 10},
        "zero_optimization": {"stage": 0},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(stock))
    parts = read_deepspeed_config(path, world_size=4, total_steps=200)
    assert "auto" not in json.dumps(parts.deepspeed)
    assert not {"fp16", "bf16", "megalowbit"} & parts.deepspeed.keys()
    assert parts.deepspeed["train_batch_size"] == 12
    assert parts.deepspeed["gradient_clipping"] == 1.0
    assert parts.deepspeed["scheduler"]["params"]["warmup_max_lr"] == 3e-4
    assert parts.settings.precision == "fp16"
    assert parts.settings.grad_scaler.initial_scale == 1024


def test_the_resolved_configuration_reads_back_as_itself():
    first = read_deepspeed_config({**PLAIN, "fp16": {"enabled": True}, "megalowbit": {"recipe": "nvfp4"}})
    written = {**first.deepspeed, "megalowbit": first.settings.model_dump(mode="json")}
    again = read_deepspeed_config(json.loads(json.dumps(written)))
    assert again.deepspeed == first.deepspeed
    assert again.settings.model_dump() == first.settings.model_dump()


def test_reading_does_not_change_what_was_passed():
    config = {**copy.deepcopy(PLAIN), "bf16": {"enabled": True}, "gradient_clipping": "auto"}
    before = copy.deepcopy(config)
    read_deepspeed_config(config)
    assert config == before


@pytest.mark.parametrize(("precision", "kind"), [("fp16", "dynamic"), ("bf16", "none"), ("fp32", "none")])
def test_the_scaler_follows_the_precision(precision, kind):
    assert EngineSettings(precision=precision).grad_scaler.type == kind


def test_the_default_precision_is_bf16_without_a_recipe():
    settings = read_deepspeed_config(PLAIN).settings
    assert (settings.precision, settings.recipe) == ("bf16", None)


def test_clipping_is_global_and_the_regularizer_off_unless_asked_for():
    settings = read_deepspeed_config(PLAIN).settings
    assert (settings.gradient_norm, settings.regularizer.strength) == ("global", 0)
    block = {"gradient_norm": "sum_of_norms", "regularizer": {"strength": 1e-4, "epsilon": 1e-5}}
    settings = read_deepspeed_config({**PLAIN, "megalowbit": block}).settings
    assert (settings.gradient_norm, settings.regularizer.epsilon) == ("sum_of_norms", 1e-5)


def test_the_norms_that_can_be_configured_are_those_of_the_optimizer():
    assert get_args(EngineSettings.model_fields["gradient_norm"].annotation) == get_args(GradientNorm)


def test_a_stock_block_that_is_off_leaves_fp32_as_in_deepspeed():
    assert read_deepspeed_config({**PLAIN, "bf16": {"enabled": False}}).settings.precision == "fp32"


def test_the_sections_accepted_without_the_loop_are_those_it_reads():
    assert list(LOOP_SECTIONS) == list(SETTINGS_MODEL.model_fields)


def test_keys_of_other_packages_in_our_block_are_left_to_them():
    parts = read_deepspeed_config({**PLAIN, "megalowbit": {"run": {"steps": 3}, "precision": "fp32"}})
    assert parts.megalowbit["run"] == {"steps": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"megalowbit": {"precision": "fp8"}}, "megalowbit.precision = 'fp8'"),
        (
            {"megalowbit": {"precision": "fp16", "grad_scaler": {"type": "none"}}},
            "^megalowbit.grad_scaler = .*: fp16 expects a grad scaler",
        ),
        (
            {"megalowbit": {"grad_scaler": {"hysteresys": 2}}},
            "unknown key 'megalowbit.grad_scaler.hysteresys'",
        ),
        (
            {"megalowbit": {"precision": "fp16", "grad_scaler": {"growth_interval": 0}}},
            "^megalowbit.grad_scaler.growth_interval = 0 is not valid",
        ),
        (
            {"megalowbit": {"precision": "fp16", "grad_scaler": {"initial_scale": 2.0**33}}},
            "^megalowbit.grad_scaler.initial_scale = 8589934592.0 is not valid: it must be from min_scale",
        ),
        ({"megalowbit": {"grad_scaler": []}}, "megalowbit.grad_scaler = "),
        (
            {"megalowbit": {"precison": "fp16"}},
            "unknown key 'megalowbit.precison': did you mean 'megalowbit.precision'",
        ),
        ({"megalowbit": {"runs": {}}}, "unknown key 'megalowbit.runs': did you mean 'megalowbit.run'"),
        ({"bf16": {"enabled": False}, "megalowbit": {"precision": "bf16"}}, "bf16.enabled = false"),
        ({"steps_per_print": 0}, "steps_per_print = 0"),
        ({"gradient_clipping": 10**400}, "gradient_clipping = 1000.* must be a finite number"),
        ({"megalowbit": {"gradient_norm": "sum"}}, "megalowbit.gradient_norm = 'sum' is not valid"),
        (
            {"megalowbit": {"regularizer": {"strenght": 1}}},
            "unknown key 'megalowbit.regularizer.strenght': did you mean 'megalowbit.regularizer.strength'",
        ),
        (
            {"megalowbit": {"regularizer": {"epsilon": 0}}},
            "^megalowbit.regularizer.epsilon = 0 is not valid",
        ),
        (
            {"megalowbit": {"recipe": "bf16", "regularizer": {"strength": 1e-4}}},
            '^megalowbit.regularizer = .* is not valid: .* recipe "bf16" has none: set strength to 0',
        ),
        ({"megalowbit": []}, "must be an object"),
        ({"optimizer": None}, "optimizer is missing"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping = inf"),
        ({"gradient_clipping": True}, "gradient_clipping = True"),
        ({"train_batch_size": 7}, "train_batch_size 7"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4"),
        ({"tensorbord": {}}, "did you mean 'tensorboard'"),
        ({"wandb": {"team": "auto"}}, "wandb.team = 'auto'"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(change, message):
    with pytest.raises(UserError, match=message) as caught:
        read_deepspeed_config({**PLAIN, **change}, world_size=1)
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_the_callers_own_replaces_the_block():
    config = {"train_batch_size": 4}
    assert "optimizer" not in read_deepspeed_config(config, has_optimizer=True).deepspeed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": }', "is not JSON: line 2, column 7"),
        ('{"a": {"b": 1, "b": 2}}', "key 'b' occurs twice"),
        ("[1]", "holds a list"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("", "line 1, column 1"),
        ("[" * 100_000, "nested too deeply"),
        ('{"steps": ' + "9" * 5000 + "}", "an integer of thousands of digits"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_with_its_place(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_json(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*missing\.json: No such file"):
        load_json(tmp_path / "missing.json")
    with pytest.raises(UserError, match="Is a directory"):
        load_json(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(UserError, match="not UTF-8"):
        load_json(tmp_path / "latin.json")


def test_reading_a_configuration_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys; from megalowbit.config.deepspeed_json import read_deepspeed_config; "
        f"read_deepspeed_config({PLAIN!r}); "
        "sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_parameter_split_under_zero_is_refused_before_zero_itself():
    raw = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "megalowbit": {"recipe": {"base": "nvfp4", "parameter_split": {"rank": 8}}},
    }
    with pytest.raises(UserError, match="cannot be used with parameter_split in the recipe"):
        read_deepspeed_config(raw)


def test_our_schedule_gets_its_steps_from_the_run_and_is_written_out_only_where_it_is():
    section = {"type": "wsd", "warmup_steps": 5, "decay_steps": 20}
    parts = read_deepspeed_config({**PLAIN, "megalowbit": {"lr_schedule": section}}, total_steps=100)
    assert parts.settings.lr_schedule.total_steps == 100
    assert parts.settings.model_dump()["lr_schedule"]["total_steps"] == 100
    assert "lr_schedule" not in read_deepspeed_config(PLAIN).settings.model_dump()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "cosine"}, "^megalowbit.lr_schedule.total_steps = 'auto' needs the number of steps"),
        ({"type": "cosine", "total_steps": 0}, "^megalowbit.lr_schedule.total_steps = 0 is not valid"),
        (
            {"type": "cosin"},
            "^megalowbit.lr_schedule.type = 'cosin' is not valid: Input should be ",
        ),
        ({"total_steps": 9}, "^megalowbit.lr_schedule.type is missing"),
        ("cosine", "^megalowbit.lr_schedule = 'cosine' is not valid"),
    ],
)
def test_a_wrong_schedule_of_ours_is_refused_in_one_line(section, message):
    with pytest.raises(UserError, match=message):
        read_deepspeed_config({**PLAIN, "megalowbit": {"lr_schedule": section}})


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_our_schedule_and_deepspeeds_exclude_each_other(kind):
    both = {**PLAIN, "scheduler": {"type": "WarmupLR"}, "megalowbit": {"lr_schedule": {"type": kind}}}
    with pytest.raises(UserError) as caught:
        read_deepspeed_config(both)
    assert str(caught.value) == (
        "scheduler and megalowbit.lr_schedule both set the learning rate: remove one of them"
    )
