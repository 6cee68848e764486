import copy

import pytest

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.stock_precision import take_stock_precision
from megalowbit.errors import UserError
from megalowbit.layers.settings import DEFAULT_RECIPE, RegularizerSettings
from megalowbit.pretrain.resume import changed_settings, check_same_model
from megalowbit.speculation.settings import SpeculationSettings

SAVED = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "megalowbit": {
        "recipe": "nvfp4",
        "precision": "bf16",
        "run": {"steps": 10, "seed": 1},
        "telemetry": {"log_every": 10},
    },
}


def changed(*path, value):
    current = copy.deepcopy(SAVED)
    node = current
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return current


def test_nothing_changed_is_no_change():
    assert changed_settings(SAVED, copy.deepcopy(SAVED)) == []
    assert changed_settings(SAVED, changed("optimizer", "params", "betas", value=(0.9, 0.95))) == []


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("megalowbit", "run", "steps"), 20, "megalowbit.run.steps: 10 → 20"),
        (("train_batch_size",), 16, "train_batch_size: 8 → 16"),
        (("megalowbit", "telemetry", "log_every"), 1, "megalowbit.telemetry.log_every: 10 → 1"),
        (("megalowbit", "run", "deterministic"), True, "megalowbit.run.deterministic: False → True"),
        (
            ("megalowbit", "model"),
            {"overrides": {"attn_implementation": "eager"}},
            "megalowbit.model.overrides.attn_implementation: None → eager",
        ),
    ],
)
def test_length_frequency_and_number_of_processes_may_change_and_are_named(path, value, line):
    assert changed_settings(SAVED, changed(*path, value=value)) == [line]


def test_a_component_that_is_added_or_left_out_is_one_change():
    profiled = changed("megalowbit", "profile", value={"first_step": None, "steps": 3, "memory": True})
    assert changed_settings(profiled, SAVED) == ["megalowbit.profile: on → off"]
    assert changed_settings(SAVED, profiled) == ["megalowbit.profile: off → on"]
    later = copy.deepcopy(profiled)
    later["megalowbit"]["profile"]["first_step"] = 20
    assert changed_settings(profiled, later) == ["megalowbit.profile.first_step: None → 20"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("optimizer", "params", "lr"),
            1e-5,
            r"optimizer\.params\.lr was 0\.001 .* is 1e-05 now: resume with",
        ),
        (("optimizer", "type"), "SGD", r"optimizer\.type was 'AdamW'"),
        (("megalowbit", "recipe"), "bf16", r"megalowbit\.recipe was 'nvfp4' .* is 'bf16' now"),
        (("megalowbit", "precision"), "fp16", r"megalowbit\.precision was 'bf16'"),
        (("megalowbit", "run", "seed"), 2, r"megalowbit\.run\.seed was 1"),
        (("scheduler",), {"type": "WarmupLR"}, r"scheduler\.type was None"),
        (
            ("megalowbit", "gradient_norm"),
            "sum_of_norms",
            r"gradient_norm was 'global' .* 'sum_of_norms' now",
        ),
        (("megalowbit", "regularizer"), {"strength": 1e-4}, r"regularizer\.strength was 0\.0 .* is 0\.0001"),
    ],
)
def test_settings_fixed_by_the_checkpoint_cannot_change(path, value, message):
    with pytest.raises(UserError, match=message):
        changed_settings(SAVED, changed(*path, value=value))


@pytest.mark.parametrize("former", ["nvfp4", "nvfp4-keep-positions"])
def test_a_run_with_a_former_default_recipe_says_so(former):
    saved = changed("megalowbit", "recipe", value=former)
    now = changed("megalowbit", "recipe", value=DEFAULT_RECIPE)
    with pytest.raises(
        UserError,
        match=rf"^megalowbit\.recipe was '{former}', the default of earlier versions, in the run to resume "
        r"and is 'nvfp4-first-block-fp8' now: resume with the old value",
    ):
        changed_settings(saved, now)
    with pytest.raises(UserError, match=r"^megalowbit\.recipe was 'nvfp4-first-block-fp8' in the run"):
        changed_settings(now, saved)


def test_runs_of_earlier_versions_parsed_special_tokens():
    before = changed("megalowbit", "data", value={"tokenizer": "bpe"})
    now = changed("megalowbit", "data", value={"tokenizer": "bpe", "parse_special_tokens": False})
    with pytest.raises(UserError, match=r"data.parse_special_tokens was True in .* and is False now"):
        changed_settings(before, now)
    now["megalowbit"]["data"]["parse_special_tokens"] = True
    assert changed_settings(before, now) == []
    for each in (before, now):  # bytes have no special tokens
        each["megalowbit"]["data"]["tokenizer"] = "byte"
    now["megalowbit"]["data"]["parse_special_tokens"] = False
    assert changed_settings(before, now) == []


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("key", ["recipe", "model"])
def test_a_name_replaced_by_a_block_is_reported_with_both_values(key, is_reversed):
    block = {"base": "nvfp4", "keep": ["*.h.0.*"]}
    named, long = changed("megalowbit", key, value="mxfp4"), changed("megalowbit", key, value=block)
    before, now = (long, named) if is_reversed else (named, long)
    old, new = (repr(each["megalowbit"][key]) for each in (before, now))
    with pytest.raises(UserError) as caught:
        changed_settings(before, now)
    expected = f"megalowbit.{key} was {old} in the run to resume and is {new} now: resume with"
    assert str(caught.value).startswith(expected)


def test_a_block_of_the_models_configuration_is_said_as_it_was():
    with pytest.raises(UserError, match=r"rope_scaling was \{'factor': 2\} in the .* and is 'no' now"):
        check_same_model({"rope_scaling": {"factor": 2}}, {"rope_scaling": "no"})


def test_a_model_with_equal_shapes_but_another_computation_is_rejected():
    saved = {"n_head": 2, "n_embd": 32, "transformers_version": "5.1", "use_cache": True}
    check_same_model(saved, {**saved, "transformers_version": "5.2", "use_cache": False})
    with pytest.raises(UserError, match="the model's n_head was 2 in the checkpoint and is 4 now"):
        check_same_model(saved, {**saved, "n_head": 4})


def test_a_setting_missing_in_an_older_run_has_its_default():
    now = changed("megalowbit", "gradient_norm", value="global")
    now["megalowbit"]["regularizer"] = RegularizerSettings().model_dump(mode="json")
    assert changed_settings(SAVED, now) == []


def with_speculation(**settings):
    block = SpeculationSettings(**settings).model_dump(mode="json")
    return changed("megalowbit", "speculation", value=block)


def test_an_older_run_counted_every_step():
    now = changed("megalowbit", "telemetry", "count_every", value=10)
    assert changed_settings(SAVED, now) == ["megalowbit.telemetry.count_every: 1 → 10"]


def test_a_run_without_a_speculation_section_has_it_off():
    assert changed_settings(SAVED, changed("megalowbit", "speculation", value=None)) == []


@pytest.mark.parametrize("is_reversed", [False, True])
def test_speculation_may_not_be_added_or_left_out(is_reversed):
    before, now = (with_speculation(), SAVED) if is_reversed else (SAVED, with_speculation())
    was, is_now = ("on", "off") if is_reversed else ("off", "on")
    with pytest.raises(
        UserError, match=rf"^megalowbit\.speculation was {was} in .* and is {is_now} now: resume"
    ):
        changed_settings(before, now)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"candidates": ["int4", "bf16"]},
            r"speculation\.candidates was \['int8', 'fp8', 'bf16'\] .* is \['int4', 'bf16'\]",
        ),
        ({"candidates": ["int8", "bf16"], "every": 5}, r"speculation\.candidates was "),
        (
            {"threshold_db": 20.0},
            r"speculation\.threshold_db was 15\.0 .* is 20\.0 now: resume with the old",
        ),
        (
            {"threshold_db": {"int8": 20, "fp8": 15}},
            r"speculation\.threshold_db was 15\.0 .* is \{'int8': 20\.0, 'fp8': 15\.0\} now",
        ),
        ({"estimator": {"sample": 64}}, r"speculation\.estimator\.sample was 8192 .* is 64 now"),
    ],
)
def test_decisions_cannot_resume_with_other_candidates_or_another_threshold(settings, message):
    assert changed_settings(with_speculation(), with_speculation()) == []
    with pytest.raises(UserError, match=f"^megalowbit\\.{message}"):
        changed_settings(with_speculation(), with_speculation(**settings))


def test_a_run_that_wrote_ladder_has_not_changed():
    before, now = (with_speculation(candidates=["int4", "bf16"]) for _ in range(2))
    section = before["megalowbit"]["speculation"]
    section["ladder"] = section.pop("candidates")
    assert changed_settings(before, now) == []
    section["ladder"] = ["int8", "bf16"]
    message = r"candidates was \['int8', 'bf16'\] .* is \['int4', 'bf16'\] now"
    with pytest.raises(UserError, match=message):
        changed_settings(before, now)


def test_a_run_that_recorded_former_settings_of_speculation_has_not_changed_unless_they_mattered():
    before = with_speculation()
    section = before["megalowbit"]["speculation"]
    section["model"] = "calibrated"
    section["estimator"] |= {"type": "quantile", "negative_k": 5}
    assert changed_settings(before, with_speculation()) == []
    section["estimator"]["type"] = "mad"
    message = r"the run to resume used .* \(type 'mad' was removed.* start a new run from its weights"
    with pytest.raises(UserError, match=message):
        changed_settings(before, with_speculation())


def with_scaler(**scaler):
    return changed(
        "megalowbit", "grad_scaler", value=EngineSettings(grad_scaler=scaler).grad_scaler.model_dump()
    )


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            {"type": "dynamic"},
            {"type": "max_value"},
            r"grad_scaler\.type was 'dynamic' .* is 'max_value' now",
        ),
        ({"type": "controller"}, {"type": "constant", "scale": 8.0}, r"grad_scaler\.type was 'controller'"),
        (
            {"type": "dynamic"},
            {"type": "dynamic", "mode": "torch"},
            r"grad_scaler\.mode was 'megatron' .* 'torch'",
        ),
    ],
)
def test_another_scaler_is_named_by_its_type_or_mode(before, now, message):
    with pytest.raises(UserError, match=f"^megalowbit\\.{message}"):
        changed_settings(with_scaler(**before), with_scaler(**now))


def test_another_precision_is_named_before_the_scaler_that_came_with_it():
    now = with_scaler(type="dynamic")
    now["megalowbit"]["precision"] = "fp16"
    with pytest.raises(UserError, match=r"^megalowbit\.precision was 'bf16'"):
        changed_settings(with_scaler(type="none"), now)


def test_a_scaler_saved_without_a_mode_follows_megatrons_rules():
    old = changed(
        "megalowbit", "grad_scaler",
        value={"type": "dynamic", "initial_scale": 2.0**16, "min_scale": 1.0, "growth_factor": 2.0,
               "backoff_factor": 0.5, "growth_interval": 1000, "hysteresis": 2},
    )  # fmt: skip
    assert changed_settings(old, with_scaler(type="dynamic", initial_scale=2.0**16)) == []
    stock = take_stock_precision({"fp16": {"enabled": True}}, {})["grad_scaler"]
    with pytest.raises(
        UserError, match=r"grad_scaler\.mode was 'megatron' .* is 'deepspeed' now: resume with"
    ):
        changed_settings(old, with_scaler(**stock))


def with_schedule(**section):
    return changed("megalowbit", "lr_schedule", value=section)


def test_a_schedule_may_change_its_end_but_not_its_type():
    before = with_schedule(type="wsd", total_steps=100, decay_steps=20)
    now = with_schedule(type="wsd", total_steps=60, decay_steps=10)
    assert changed_settings(before, now) == [
        "megalowbit.lr_schedule.decay_steps: 20 → 10",
        "megalowbit.lr_schedule.total_steps: 100 → 60",
    ]
    with pytest.raises(UserError, match=r"^megalowbit.lr_schedule.type was 'wsd' .* is 'constant' now"):
        changed_settings(before, with_schedule(type="constant", total_steps=100, decay_steps=20))
    with pytest.raises(UserError, match=r"^megalowbit.lr_schedule.type was None .* is 'wsd' now"):
        changed_settings(changed("megalowbit", "recipe", value="nvfp4"), before)


def test_the_order_of_the_layers_of_a_recipe_is_part_of_it():
    layers = {"*.mlp.*": "mxfp8", "*.h.0": "bf16"}
    before, now, exempt = (
        changed("megalowbit", "recipe", value=EngineSettings(recipe={"base": "nvfp4", "layers": each}).recipe)
        for each in (layers, dict(reversed(layers.items())), {"*.h.1": {}, **layers})
    )
    assert changed_settings(before, copy.deepcopy(before)) == []
    for other in (now, exempt):
        with pytest.raises(UserError, match=r"^megalowbit\.recipe\.layers was .*'mxfp8'.* now: resume with"):
            changed_settings(before, other)
