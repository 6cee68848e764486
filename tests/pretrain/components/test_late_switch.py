import json
import math
from collections import OrderedDict

import pytest
import torch
from quick_cases import slow_except
from torch import nn

from launchers import SPEEDS
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.hf.training_checkpoint import read_checkpoint
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.components.late_switch import WINDOW, LateSwitch, LateSwitchSettings
from megalowbit.pretrain.estimate.dry_run import describe
from megalowbit.pretrain.run import pretrain

AT = "megalowbit.late_switch.at"


def switch_of(at, *, steps=100, scope="forward"):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert(model, "nvfp4")
    settings = LateSwitchSettings(at=at, scope=scope)
    return LateSwitch(settings, model, recipe("nvfp4"), total_steps=steps, num_layers=2), model


def log_lines(switch, losses, start=0):
    """The lines logged before and after each step."""
    lines = {}
    for step, loss in enumerate(losses, start=start):
        before = switch.before_step(step)
        if before is not None:
            lines.setdefault(step, []).append(before)
        for text in switch.after_step(step + 1, {"loss": loss}):
            lines.setdefault(step + 1, []).append(text)
    return lines


def load(switch, state, step):
    switch.load_state_dict(state, step=step, source="a checkpoint")


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(rows):
    return [{key: value for key, value in row.items() if key not in SPEEDS} for row in rows]


def weights(folder, step):
    return torch.load(folder / "checkpoints" / f"step-{step:08d}" / "mp_rank_00_model_states.pt")["module"]


def test_the_loss_of_20_steps_before_and_after_is_reported():
    switch, model = switch_of(50)
    losses = [float(n) for n in range(1, 101)]
    lines = log_lines(switch, losses)
    assert sorted(lines) == [50, 50 + WINDOW]
    before, since = sum(range(31, 51)) / 20, sum(range(51, 71)) / 20
    assert lines[50] == [
        "precision switched after step 50: 2 layers now use nvfp4, forward in high precision; "
        f"mean loss {before:.4f} over the 20 steps before"
    ]
    assert lines[70] == [
        f"precision switched after step 50: mean loss {since:.4f} over the 20 steps since, "
        f"mean loss {before:.4f} over the 20 steps before"
    ]
    assert {layer.recipe.q_forward_input for layer in bit_layers(model).values()} == {"fp32"}


def test_means_cover_only_existing_steps():
    switch, _ = switch_of(2, steps=4)
    lines = log_lines(switch, [8.0, math.nan, 3.0, 1.0])
    assert "mean loss 8.0000 over the step before" in lines[2][0]
    assert "mean loss 2.0000 over the 2 steps since" in lines[4][0]  # the run ends before 20 are
    switch, _ = switch_of(1)
    assert "no finite loss in the steps before" in log_lines(switch, [math.inf, 1.0])[1][0]


def test_the_summary_has_the_losses_around_the_switch():
    switch, _ = switch_of(2, steps=4, scope="all")
    assert switch.summary().entries == {}
    log_lines(switch, [8.0, 4.0])
    switch.before_step(2)
    entry = {"step": 2, "scope": "all", "loss_before": 6.0, "loss_after": None}
    assert switch.summary().entries == {"late_switch": entry}
    log_lines(switch, [3.0, math.inf], start=2)
    assert switch.summary().entries == {"late_switch": {**entry, "loss_after": 3.0}}


def test_nothing_is_switched_before_its_time():
    switch, model = switch_of(3)
    log_lines(switch, [1.0] * 3)
    assert not switch.is_switched
    assert {layer.recipe.name for layer in bit_layers(model).values()} == {"nvfp4"}
    assert switch.facts({}) == {"precision_switched": 0}
    switch.before_step(3)
    assert switch.facts({}) == {"precision_switched": 1}


def test_a_run_that_goes_on_between_both_lines_tells_the_second_one():
    losses = [float(n) for n in range(1, 101)]
    whole, _ = switch_of(50)
    expected = log_lines(whole, losses)[70]
    first, _ = switch_of(50)
    log_lines(first, losses[:60])
    again, model = switch_of(50)
    load(again, json.loads(json.dumps(first.state_dict())), step=60)
    lines = log_lines(again, losses[60:], start=60)
    assert lines == {70: expected}
    assert {layer.recipe.q_forward_input for layer in bit_layers(model).values()} == {"fp32"}


@pytest.mark.parametrize("scope", ["forward", "all"])
def test_a_run_switches_and_records_it(resolve, tmp_path, capsys, scope):
    config = resolve(f'megalowbit.late_switch={{"at": 0.5, "scope": "{scope}"}}')
    rows = run(config, tmp_path / "run")
    assert [row["precision_switched"] for row in rows] == [0, 0, 0, 1, 1, 1]
    plain = run(resolve(), tmp_path / "plain")
    losses = [[row["loss"] for row in each] for each in (rows, plain)]
    assert losses[0][:3] == losses[1][:3]
    assert losses[0][3] != losses[1][3]
    assert "precision_switched" not in plain[0]
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "plain")]
    assert summaries[0]["late_switch"] == {
        "step": 3,
        "scope": scope,
        "loss_before": pytest.approx(sum(losses[0][:3]) / 3),
        "loss_after": pytest.approx(sum(losses[0][3:]) / 3),
    }
    assert "late_switch" not in summaries[1]
    printed = capsys.readouterr().out
    assert f"switch    after step 3: nvfp4-first-block-fp8, {scope} in high precision" in printed
    line = f"precision switched after step 3: 7 layers now use nvfp4-first-block-fp8, {scope} in high"
    assert line in printed
    assert "over the 3 steps since" in printed
    stored = read_checkpoint(tmp_path / "run")
    assert stored.recipe == recipe("nvfp4-first-block-fp8")  # the one configured


# before, at and after the switch
@pytest.mark.parametrize("stop", slow_except([3], [2, 3, 5]))
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(resolve, tmp_path, stop, capsys):
    settings = (f"{AT}=3", "megalowbit.checkpoint.every=1", "megalowbit.checkpoint.keep=null")
    whole = run(resolve(*settings, "scheduler=null"), tmp_path / "whole")
    run(resolve(*settings, "scheduler=null", "megalowbit.run.steps=6"), tmp_path / "parts")
    for step in range(stop + 1, 7):  # as a kill after step `stop` leaves it
        for path in sorted(
            (tmp_path / "parts" / "checkpoints" / f"step-{step:08d}").rglob("*"), reverse=True
        ):
            path.unlink()
        (tmp_path / "parts" / "checkpoints" / f"step-{step:08d}").rmdir()
    (last_line,) = {line for line in capsys.readouterr().out.splitlines() if "steps since" in line}
    resumed = run(resolve(*settings, "scheduler=null"), tmp_path / "parts", is_resume=True)
    printed = capsys.readouterr().out
    assert f"resumed after step {stop}" in printed
    assert [line for line in printed.splitlines() if "steps since" in line] == [last_line]
    assert without_time(resumed) == without_time(whole)
    one, two = weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_a_future_switch_may_be_moved_and_a_past_one_may_not(resolve, tmp_path, capsys):
    folder = tmp_path / "run"
    run(resolve("megalowbit.run.steps=3", f"{AT}=2"), folder)
    with pytest.raises(UserError, match=r"late_switch would switch 'forward' after step 4, .* after step 2"):
        run(resolve(f"{AT}=4"), folder, is_resume=True)
    with pytest.raises(UserError, match="late_switch would switch nothing"):
        run(resolve(), folder, is_resume=True)
    run(resolve(f"{AT}=2"), folder, is_resume=True)
    other = tmp_path / "other"
    run(resolve("megalowbit.run.steps=3"), other)
    rows = run(resolve(f"{AT}=4"), other, is_resume=True)
    assert "changed   megalowbit.late_switch: off → on" in capsys.readouterr().out
    assert [row.get("precision_switched") for row in rows] == [None, None, None, 0, 1, 1]


def test_after_a_switch_to_high_precision_nothing_is_counted(resolve, tmp_path):
    run(
        resolve('megalowbit.late_switch={"at": 1, "scope": "all"}', "megalowbit.run.steps=2"),
        tmp_path / "run",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["gradient_overflow/element_overflow_rate"] is not None
    assert rows[1]["gradient_overflow/element_overflow_rate"] is None


@pytest.mark.parametrize("start", [run, lambda config, folder: describe(config)])
def test_a_recipe_with_nothing_to_switch_is_refused_and_leaves_no_folder(resolve, tmp_path, start):
    config = resolve("megalowbit.recipe=mxfp4-rht", f"{AT}=2")  # its forward is in high precision already
    with pytest.raises(
        UserError, match=r"^megalowbit\.late_switch: .*'mxfp4-rht' quantises nothing there: leave"
    ):
        start(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_override_makes_the_bf16_baseline_of_a_run_with_a_switch(resolve, tmp_path):
    plain = run(resolve("megalowbit.recipe=bf16"), tmp_path / "plain")
    rows = run(resolve("megalowbit.recipe=bf16", f"{AT}=2"), tmp_path / "run")
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    assert "precision_switched" not in rows[-1]
    assert "== late switch" not in describe(resolve("megalowbit.recipe=bf16", f"{AT}=2"))


def test_a_dry_run_describes_later_splits_and_their_memory(resolve):
    text = describe(resolve('megalowbit.late_switch={"at": 2, "scope": "all"}'))
    parts = dict(part.split("\n", 1) for part in text.removeprefix("== ").split("\n\n== "))
    assert parts["late switch"].startswith(
        "after step 2: nvfp4-first-block-fp8, all in high precision (forward: input fp32"
    )
    kept = [
        float(
            next(
                line for line in parts[f"memory {title} (estimate)"].splitlines() if "saved" in line
            ).split()[-2]
        )
        for title in ("of the only process", "after the late switch")
    ]
    assert kept[1] >= kept[0]


def test_a_stage_without_low_bit_layers_counts_those_of_all_stages():
    settings = LateSwitchSettings(at=1, scope="all")
    switch = LateSwitch(settings, nn.Embedding(4, 4), recipe("nvfp4"), total_steps=4, num_layers=5)
    lines = log_lines(switch, [1.0, 2.0])
    assert lines[1][0].startswith("precision switched after step 1: 5 layers now use")
    assert switch.is_switched


def test_a_stage_whose_layers_round_nothing_in_the_scope_does_not_change():
    settings = LateSwitchSettings(at=1, scope="forward")
    backward_only = {"q_forward_input": "fp32", "q_forward_weight": "fp32"}
    whole = recipe({"base": "nvfp4", "layers": {"first": backward_only}})
    stage = nn.Sequential(OrderedDict(first=nn.Linear(32, 32)))
    convert(stage, whole.of_layer("first"))
    switch = LateSwitch(settings, stage, whole, total_steps=4, num_layers=2)
    lines = log_lines(switch, [1.0, 2.0])
    assert "2 layers now use nvfp4 with own layers, forward in high precision;" in lines[1][0]
    assert switch.is_switched
    assert stage.first.recipe == whole.of_layer("first")
    load(switch, {"before": [1.0], "since": []}, step=1)
    assert not switch.is_switched


@pytest.mark.parametrize("scope", ["forward", "all"])
def test_a_rollback_to_before_the_switch_repeats_the_switch(scope):
    switch, model = switch_of(3, scope=scope)
    lines = log_lines(switch, [1.0] * 5)
    state = {"before": [1.0] * 3, "since": []}
    load(switch, {**state, "since": [1.0]}, step=4)
    assert switch.is_switched  # that far back it was switched already
    load(switch, state, step=3)
    assert not switch.is_switched
    assert {layer.recipe for layer in bit_layers(model).values()} == {recipe("nvfp4")}
    assert log_lines(switch, [1.0, 1.0], start=3) == lines
    assert switch.is_switched
