"""Windows of a run: when weights are measured and reset, what is recorded, and what is refused."""

import json
import shutil

import pytest

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.components.base import RunSettings
from megalowbit.pretrain.components.oscillation_reset import OscillationReset, OscillationResetSettings
from megalowbit.pretrain.run import pretrain

KEY = "megalowbit.oscillation_reset"
SETTINGS = {"start": 1, "period": 3, "window": 2, "threshold": 4.0}
LENGTH = "megalowbit.run.steps=8"


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_windows_are_recorded_and_change_the_weights_from_then_on(resolve, tmp_path, capsys):
    overrides = (LENGTH, "megalowbit.checkpoint.every=2", "megalowbit.checkpoint.keep=null")
    own = resolve(*overrides, f"{KEY}={json.dumps(SETTINGS)}")
    rows = run(own, tmp_path / "own")
    lines = [line for line in capsys.readouterr().out.splitlines() if "oscillat" in line]
    plain = run(resolve(*overrides), tmp_path / "plain")
    found = {row["step"]: row for row in rows if "oscillation/ratio" in row}
    assert list(found) == [4, 7]  # the steps after the windows 1 to 3 and 4 to 6
    for row in found.values():
        assert row["oscillation/ratio"] > 0.3
        assert 0.001 < row["oscillation/reset_share"] < 0.5
        assert row["oscillation/share"] == row["oscillation/reset_share"]
    assert "measured for 2 steps every 3 from step 1 on; reset" in lines[0]
    assert "oscillation in 2 steps to 3: quantised weights moved" in lines[1]
    losses = [[row["loss"] for row in each] for each in (rows, plain)]
    assert losses[0][:4] == losses[1][:4]  # half-precision weights follow with the step
    assert losses[0][4:] != losses[1][4:]
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())["oscillation_reset"]
    shares = [row["oscillation/reset_share"] for row in found.values()]
    assert summary == {"windows": 2, "mean_share": pytest.approx(sum(shares) / 2)}


def test_windows_without_a_reset_change_nothing_and_find_the_same_at_first(resolve, tmp_path, capsys):
    for name, section in (("plain", "null"), ("reset", SETTINGS), ("measured", {**SETTINGS, "reset": False})):
        run(
            resolve(LENGTH, f"{KEY}={section if section == 'null' else json.dumps(section)}"), tmp_path / name
        )
    rows = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("plain", "reset", "measured")
    }
    assert [row["loss"] for row in rows["measured"]] == [row["loss"] for row in rows["plain"]]
    measured = {row["step"]: row for row in rows["measured"] if "oscillation/share" in row}
    assert list(measured) == [4, 7]
    assert measured[4]["oscillation/share"] == rows["reset"][3]["oscillation/reset_share"] > 0
    assert not any("oscillation/reset_share" in row for row in rows["measured"])
    printed = capsys.readouterr().out
    assert "counted if they oscillate" in printed
    assert "of the weights at a ratio of 4 or more" in printed


@pytest.mark.parametrize("switch", [5, 6])  # in the second window, and at its end
def test_a_late_switch_ends_a_window_without_a_reset(resolve, tmp_path, capsys, switch):
    late = f"megalowbit.late_switch={json.dumps({'at': switch, 'scope': 'forward'})}"
    rows = run(resolve(LENGTH, late, f"{KEY}={json.dumps(SETTINGS)}"), tmp_path / "run")
    assert [row["step"] for row in rows if "oscillation/ratio" in row] == [4]
    lines = [line for line in capsys.readouterr().out.splitlines() if "no longer measured" in line]
    assert len(lines) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["oscillation_reset"]["windows"] == 1


def test_windows_open_again_after_a_rollback_to_before_the_switch(build_job, tmp_path):
    module = build_job(LENGTH).engine.module
    component = OscillationReset(OscillationResetSettings(**SETTINGS), module, total_steps=8)
    component.before_step(1)
    for layer in bit_layers(module).values():
        layer.recipe = "bf16"
    assert "no longer measured" in component.before_step(2)
    assert component.before_step(4) is None
    for layer in bit_layers(module).values():
        layer.recipe = "nvfp4"
    component.load_state_dict(None, step=0, source=tmp_path)
    component.before_step(1)
    component.before_step(2)
    assert "quantised weights moved" in component.before_step(3)


def test_a_window_with_a_resume_in_it_is_dropped(resolve, tmp_path):
    overrides = (f"{KEY}={json.dumps(SETTINGS)}", "megalowbit.checkpoint.every=5")
    run(resolve(LENGTH, *overrides), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")  # as if it had ended after step 5
    rows = run(resolve(LENGTH, *overrides), tmp_path / "run", is_resume=True)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if "oscillation/ratio" in row] == [4]


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        ({"window": 5, "period": 4}, 100, "window = 5 is above .*period = 4: lower window"),
        ({}, 100, "first window after step 120, but megalowbit.run.steps is 100"),
        ({"start": 50}, 100, "first window after step 100"),
    ],
)
def test_windows_that_do_not_fit_are_rejected(settings, steps, message):
    with pytest.raises(UserError, match=message):
        OscillationReset.check(OscillationResetSettings(**settings), RunSettings(steps=steps), "nvfp4")


@pytest.mark.parametrize("start", [-1, 1.0, 0.0, True, "5", None])
def test_a_start_that_is_neither_a_step_nor_a_fraction_is_rejected(start):
    with pytest.raises(ValueError, match="expected a whole number of steps ≥ 0, or a fraction"):
        OscillationResetSettings(start=start)
    assert OscillationResetSettings(start=0.25).first(100) == 25


def test_speculation_and_recipes_without_cells_are_refused(build_job):
    section = f"{KEY}={json.dumps(SETTINGS)}"
    stochastic = recipe({"base": "nvfp4", "q_forward_weight": "nvfp4e2m1b"})
    with pytest.raises(UserError, match="rounds weights stochastically"):
        OscillationReset.check_recipe(OscillationResetSettings(**SETTINGS), stochastic)
    with pytest.raises(UserError, match="speculation changes it during the run"):
        build_job(LENGTH, section, "megalowbit.recipe=speculative-int8", "megalowbit.speculation={}")
