import json

import pytest

from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import RunSettings
from megalowbit.pretrain.components.late_switch import LateSwitch, LateSwitchSettings
from megalowbit.pretrain.config import load_config


def config(at=None, scope="forward", steps=100):
    switch = None if at is None else {"at": at, "scope": scope}
    return {"megalowbit": {"run": {"steps": steps}, "late_switch": switch}}


@pytest.mark.parametrize(
    ("at", "total", "step"),
    [
        (12, 100, 12),
        (1, 2, 1),
        (0.9, 700, 630),
        (0.5, 5, 2),
        (0.29, 100, 29),
        (0.001, 100, 1),
        (0.999, 10, 9),
        (0.7, 1, 1),
    ],
)
def test_a_whole_number_is_a_step_and_a_fraction_a_share_of_the_run(at, total, step):
    settings = LateSwitchSettings(at=at)
    assert settings.step(total) == step
    assert type(settings.at) is type(at)
    LateSwitch.check(settings, RunSettings(steps=total), "nvfp4")


@pytest.mark.parametrize("at", [0, -1, 0.0, 1.0, 1.5, -0.1, float("nan"), True, "0.9", None])
def test_values_that_are_neither_steps_nor_fractions_are_rejected(at):
    with pytest.raises(ValueError, match="expected a whole number of steps ≥ 1, or a fraction"):
        LateSwitchSettings(at=at)


@pytest.mark.parametrize(("at", "total"), [(100, 100), (101, 100), (1, 1)])
def test_a_switch_after_the_last_step_is_refused(at, total):
    with pytest.raises(UserError, match=rf"late_switch\.at = {at} leaves no step .*run\.steps is {total}"):
        LateSwitch.check(LateSwitchSettings(at=at), RunSettings(steps=total), "nvfp4")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (config(), config()),
        (config(30), config(30)),
        (config(0.3), config(30)),  # the same step
        (config(0.3, steps=100), config(0.15, steps=200)),
        (config(60), config(80)),  # both ahead
        (config(50), config(90, "all")),  # the switch is due now, and put off
        (config(), config(50)),
        (config(60), config()),
        ({"megalowbit": {"run": {"steps": 100}}}, config(60)),  # written by an earlier version
    ],
)
def test_a_future_switch_may_be_changed(before, now):
    LateSwitch.check_resumed(before, now, step=50)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (config(30), config(40), r"'forward' after step 40, .* 50 steps .* after step 30: resume with .*30"),
        (config(30), config(30, "all"), r"'all' after step 30, .*\"scope\": \"forward\""),
        (config(30), config(), "would switch nothing, but"),
        (config(30), config(80), "after step 80"),
        (config(), config(49), "has switched nothing: leave late_switch out"),
        (config(80), config(49), "after step 49"),
        # the same fraction of a longer run
        (config(0.4, steps=100), config(0.4, steps=200), "after step 80, .*after step 40"),
    ],
)
def test_a_switch_that_would_change_trained_steps_is_rejected(before, now, message):
    with pytest.raises(UserError, match=message):
        LateSwitch.check_resumed(before, now, step=50)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (".at=1.5", r"megalowbit\.late_switch\.at = 1\.5 is not valid: expected a whole number"),
        (".at=6", r"megalowbit\.late_switch\.at = 6 leaves no step after the switch"),
        (
            '={"at": 2, "scope": "forwards"}',
            r"megalowbit\.late_switch\.scope = 'forwards' .* 'forward' or 'all'",
        ),
        ('={"at": 2, "scop": "all"}', r"late_switch\.scop.*did you mean 'megalowbit\.late_switch\.scope'"),
        ('={"scope": "all"}', r"megalowbit\.late_switch\.at is missing: optimizer steps before the switch"),
        ("=0.9", r"megalowbit\.late_switch = 0\.9 is not valid"),
    ],
)
def test_a_wrong_block_names_its_key(resolve, override, message):
    with pytest.raises(UserError, match=message):
        resolve(f"megalowbit.late_switch{override}")


def test_a_switch_can_be_set_where_a_resolved_configuration_has_none(resolve, tmp_path):
    path = tmp_path / "resolved.json"
    path.write_text(json.dumps(resolve().to_dict()))
    config = load_config(path, ["megalowbit.late_switch.at=0.5"], world_size=1)
    assert config.to_dict()["megalowbit"]["late_switch"] == {"at": 0.5, "scope": "forward"}
