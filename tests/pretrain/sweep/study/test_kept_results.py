"""Results that are kept in files and continued in another folder."""

import json
from pathlib import Path

import pytest
from programs import call_main
from studies import NAMES, finish, report

from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.kept_results import changed, changes, read_kept
from megalowbit.pretrain.sweep.study.report.analysis import groups_of
from megalowbit.pretrain.sweep.study.study_file import read_study

TOOL = "tools/study.py"
ROOT = Path(__file__).parents[4]


def refused(study, out, capsys, *more):
    """The message of a command that fails, and copies nothing."""
    done = call_main(TOOL, study, "--out", out, *more, "--report", capsys=capsys)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not list(out.glob("cells/*/result.json"))
    return done.stderr


def test_a_report_of_kept_results_is_that_of_the_runs(study, tmp_path, capsys):
    finish(study, tmp_path / "whole", *NAMES)
    whole, _ = report(study, tmp_path / "whole", capsys)
    assert [row["num_diverged"] for group in whole["groups"] for row in group["rows"]] == [0]
    finish(study, tmp_path / "a", *NAMES[:2], commit="a" * 40, processor="first")
    finish(study, tmp_path / "b", *NAMES[1:3], commit="b" * 40, processor="second")
    for name in "ab":
        report(study, tmp_path / name, capsys)
        (tmp_path / name / "study.json").rename(tmp_path / f"{name}.json")
    out = tmp_path / "both"
    finish(study, out, NAMES[3], processor="third")
    (third,) = (out / "cells").glob("*/result.json")
    slow = json.loads(third.read_text())
    slow["cost"]["cpu_seconds"] *= 9  # of a slow machine, whose times are not compared with another's
    third.write_text(json.dumps(slow))
    files = ("--from", tmp_path / "a.json", tmp_path / "b.json")
    both, done = report(study, out, capsys, *files)
    assert "a.json: 2 cells, 2 of them chosen here, 2 taken over\n" in done.stdout
    assert "b.json: 2 cells, 2 of them chosen here, 1 taken over\n" in done.stdout  # one is in both
    origins = {name: both["origins"][cell["origin"]] for name, cell in both["cells"].items()}
    assert [origins[name]["processor"] for name in NAMES] == ["first", "first", "second", "third"]
    assert origins[NAMES[2]]["commit"] == "b" * 40
    (group,), (expected,) = both["groups"], whole["groups"]
    assert group.pop("mixed_pairs") == 1
    assert expected.pop("mixed_pairs") == 0
    costs, expected_costs = ([row.pop("cpu") for row in each["rows"]] for each in (group, expected))
    assert costs == expected_costs == [2.0]
    assert group == expected
    assert both["cells"].keys() == whole["cells"].keys()
    for name in NAMES:
        assert both["cells"][name]["losses"] == whole["cells"][name]["losses"]
    again, _ = report(study, out, capsys)  # the cells are here now
    assert again["cells"] == both["cells"]
    page = (out / "study.html").read_text()
    assert f"2 cells: commit <code>{'a' * 40}</code>" in page
    assert "The cells of 1 pair are of different kinds of processor" in page


@pytest.mark.slow
def test_a_study_goes_on_from_the_results_of_another_folder(study, tmp_path, capsys):
    """Real cells: those of one seed are taken over, the other seed runs, and one of the first is repeated."""
    first, second = tmp_path / "first", tmp_path / "second"
    done = call_main(TOOL, study, "--out", first, "--seed", 1, "--jobs", 2, capsys=capsys)
    assert done.returncode == 0, done.stderr
    kept = json.loads((first / "study.json").read_text())
    assert (set(kept["cells"]), kept["unfinished"]) == (set(NAMES[:2]), 2)
    for origin in kept["origins"]:
        origin.update(commit="of-another-machine", processor="of another machine")
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    files = ("--from", tmp_path / "kept.json")
    done = call_main(TOOL, study, "--out", second, "--jobs", 2, *files, capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert "4 cells, 2 finished" in done.stdout
    assert not list(second.glob("cells/*,1/metrics.jsonl"))  # they did not run here
    data = json.loads((second / "study.json").read_text())
    assert (set(data["cells"]), data["unfinished"]) == (set(NAMES), 0)
    for name in NAMES:
        origin = data["origins"][data["cells"][name]["origin"]]
        assert (origin["commit"] == "of-another-machine") == name.endswith(",1")
    assert {name: data["cells"][name]["losses"] for name in NAMES[:2]} == {
        name: kept["cells"][name]["losses"] for name in NAMES[:2]
    }
    (row,) = data["groups"][0]["rows"]
    assert row["gaps"]["8"]["num_pairs"] == 2
    assert data["groups"][0]["mixed_pairs"] == 0  # each pair is of one machine
    again = ("--reproduce", second / "study.json", NAMES[1], "--out", tmp_path / "again")
    done = call_main(TOOL, *again, capsys=capsys)
    assert done.stdout.endswith(f"{NAMES[1]} is reproduced exactly\n"), done.stderr


def test_only_chosen_cells_are_taken_over_and_the_list_has_them(study, tmp_path, capsys):
    finish(study, tmp_path / "a", *NAMES)
    report(study, tmp_path / "a", capsys)
    chosen = ("--out", tmp_path / "b", "--seed", 2, "--list")
    done = call_main(TOOL, study, *chosen, "--from", tmp_path / "a" / "study.json", capsys=capsys)
    assert "4 cells, 2 of them chosen here, 2 taken over" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("finished")] == [
        f"finished  {name}" for name in NAMES[2:]
    ]
    assert {path.parent.name for path in tmp_path.glob("b/cells/*/result.json")} == set(NAMES[2:])


def test_cells_that_would_come_out_differently_are_refused_and_named(study, tmp_path, capsys):
    finish(study, tmp_path / "a", *NAMES[:2], torch="2.9.0+cpu")
    report(study, tmp_path / "a", capsys)
    kept, out, name = tmp_path / "a" / "study.json", tmp_path / "out", NAMES[0]
    message = refused(study, out, capsys, "--from", kept)
    assert message.startswith(f"error: {kept}: {name} was made with torch 2.9.0, and ")
    assert message.endswith(" is installed: install 2.9.0, or leave study.json out\n")

    finish(study, tmp_path / "a", *NAMES[:2])
    report(study, tmp_path / "a", capsys)
    raw = json.loads(study.read_text())
    default = [{"name": "bf16"}, raw["recipes"][1]]  # the first names no recipe
    for changes_of_study, expected in (
        ({"set": {**raw["set"], "gradient_clipping": 0.5}}, "config.gradient_clipping = 0.5 (was 1.0)"),
        ({"recipes": default}, "config.megalowbit.recipe = 'nvfp4-first-block-fp8' (was 'bf16')"),
    ):
        study.write_text(json.dumps({**raw, **changes_of_study}))
        message = refused(study, out, capsys, "--from", kept)
        assert f"{kept}: {name} was run with other settings: {expected}: change them back" in message
    study.write_text(json.dumps({**raw, "window": 1}))
    message = refused(study, out, capsys, "--from", kept)
    assert f"{name} has means of 2 steps: make `window` and `marks` of the study multiples of it" in message

    study.write_text(json.dumps(raw))
    data = json.loads(kept.read_text())
    data["texts"]["parts"]["train_sha256"] = "0" * 64
    kept.write_text(json.dumps(data))
    message = refused(study, out, capsys, "--from", kept)
    assert f"{kept}: {name}: the text is not that of the study: files of parts (" in message


def test_a_setting_that_came_later_had_its_default(study, tmp_path):
    (cell,) = finish(study, tmp_path / "out", NAMES[1])
    saved = json.loads((cell.path / "cell.json").read_text())
    present = json.loads(json.dumps(saved))
    assert saved["config"]["megalowbit"].pop("gradient_norm") == "global"
    del saved["config"]["megalowbit"]["regularizer"]
    assert cell.changed_settings(saved, present) == ""
    present["config"]["megalowbit"]["gradient_norm"] = "other"
    assert cell.changed_settings(saved, present) == (
        "config.megalowbit.gradient_norm = 'other' (was 'global')"
    )
    saved["config"]["megalowbit"]["gone"] = 1
    assert "config.megalowbit.gone = 'nothing' (was 1)" in cell.changed_settings(saved, present)


def test_a_report_does_not_replace_one_with_more_cells(study, tmp_path, capsys):
    out = tmp_path / "out"
    finish(study, out, *NAMES)
    report(study, out, capsys)
    before = (out / "study.json").read_text()
    folder = out / "cells" / NAMES[3]
    folder.rename(tmp_path / "away")
    done = call_main(TOOL, study, "--out", out, "--report", capsys=capsys)
    assert done.returncode == 2
    assert f"study.json has cells that are not finished here ({NAMES[3]}) and would be lost" in done.stderr
    assert (out / "study.json").read_text() == before
    after, _ = report(study, out, capsys, "--from", out / "study.json")
    assert after["cells"] == json.loads(before)["cells"]


def test_each_cell_is_a_short_line(study, tmp_path, capsys):
    finish(study, tmp_path / "out", *NAMES)
    data, _ = report(study, tmp_path / "out", capsys)
    lines = (tmp_path / "out" / "study.json").read_text().splitlines()
    for name in NAMES:
        (line,) = [line for line in lines if line.startswith(f'  "{name}": ')]
        assert len(line) < 1000
        assert json.loads(line.partition(": ")[2].rstrip(",")) == data["cells"][name]
    assert len(data["origins"]) == 1
    assert str(tmp_path) not in json.dumps([data["origins"], data["cells"], data["report_made_with"]])


DAMAGE = [
    (lambda data: data.pop("cells"), "is damaged ('cells' is missing or has another type)"),
    (lambda data: data.update(cells=[1]), "is damaged ('cells' is missing or has another type)"),
    (lambda data: data.update(format=1), "has no 'format' 2"),
    (lambda data: data["texts"]["parts"].pop("train_sha256"), "is damaged ('texts.parts.train_sha256'"),
    (lambda data: data["cells"][NAMES[0]].update(origin=7), f"{NAMES[0]} is damaged"),
    (lambda data: data["cells"][NAMES[0]].pop("changes"), f"{NAMES[0]} is damaged"),
    (lambda data: data["cells"][NAMES[0]].update(changes=[[["x", "y"], 1]]), f"{NAMES[0]} is damaged"),
    (lambda data: data["cells"][NAMES[0]].update(losses=3), "'losses' is missing or damaged"),
    (lambda data: data["cells"][NAMES[0]]["losses"].pop("block"), "'losses' is missing or damaged"),
    (lambda data: data["cells"][NAMES[0]].pop("cost"), "'cost' is missing or damaged"),
    (lambda data: data["settings"].update(config=3), "'settings.config' is missing or damaged"),
    (lambda data: data["cells"][NAMES[0]].update(origin=-1), "damaged ('origin' or 'changes')"),
    (lambda data: data["cells"][NAMES[0]].update(origin=False), "damaged ('origin' or 'changes')"),
    (lambda data: data["cells"][NAMES[0]].update(origin=0.0), "damaged ('origin' or 'changes')"),
]


def test_a_damaged_file_is_one_line(study, tmp_path, capsys):
    finish(study, tmp_path / "a", *NAMES[:2])
    report(study, tmp_path / "a", capsys)
    text, damaged = (tmp_path / "a" / "study.json").read_text(), tmp_path / "damaged.json"
    for damage, expected in DAMAGE:
        data = json.loads(text)
        damage(data)
        damaged.write_text(json.dumps(data))
        for command in ((study, "--from", damaged), ("--reproduce", damaged, NAMES[0])):
            done = call_main(TOOL, *command, "--out", tmp_path / "out", capsys=capsys)
            assert done.returncode == 2
            assert done.stderr.count("\n") == 1, done.stderr
            assert done.stderr.startswith(f"error: {damaged}")
            assert expected in done.stderr


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda cell: cell["losses"].update(steps=4, means=cell["losses"]["means"][:2]), "losses of 4 of 8"),
        (lambda cell: cell.update(diverged_at=99), "diverged_at 99 of 8 steps"),
    ],
)
def test_a_result_of_other_steps_is_not_taken_over(study, tmp_path, capsys, damage, expected):
    finish(study, tmp_path / "a", *NAMES[:2])
    report(study, tmp_path / "a", capsys)
    kept = tmp_path / "a" / "study.json"
    data = json.loads(kept.read_text())
    damage(data["cells"][NAMES[0]])
    kept.write_text(json.dumps(data))
    message = refused(study, tmp_path / "out", capsys, "--from", kept)
    assert message.startswith(f"error: {kept}: {NAMES[0]} has ")
    assert expected in message


def test_changes_turn_one_object_into_the_other():
    before = {"a": {"b": 1, "c": None, "d.e": [1, 2]}, "f": True, "g": {"h": 1}}
    for now in (
        before,
        {},
        {"a": {"b": 1.0, "c": {}, "d.e": [2]}, "f": 1, "g": None},
        {"a": {"c": 1}, "new": {"x": {"y": None}}, "f": True, "g": {"h": 1, "i": 2}},
    ):
        found = json.loads(json.dumps(changes(before, now)))
        assert json.dumps(changed(before, found), sort_keys=True) == json.dumps(now, sort_keys=True)
    assert changes(before, before) == []
    assert changes({"a": 1, "b": 2}, {"a": 3}) == [[["b"]], [["a"], 3]]


def test_kept_results_with_longer_blocks_than_the_window_are_named_in_a_report(study, tmp_path, capsys):
    finish(study, tmp_path / "a", *NAMES[:2])
    report(study, tmp_path / "a", capsys)
    kept = tmp_path / "a" / "study.json"
    assert read_kept(kept).results[NAMES[0]].losses.block == 2
    report(study, tmp_path / "b", capsys, "--from", kept)
    study.write_text(json.dumps({**json.loads(study.read_text()), "marks": [3]}))
    changed_study = read_study(study)
    with pytest.raises(UserError, match=f"{NAMES[0]} has means of 2 steps: make `window`"):
        groups_of(changed_study, cells_of(changed_study, tmp_path / "b", ROOT / "launch" / "pretrain.py"))


@pytest.mark.parametrize(
    ("own", "mixed", "unknown", "cpu"),
    [
        ({}, 0, 0, 2.0),
        ({"gemm": "bf16"}, 0, 0, 2.0),
        ({"gemm": "fp32"}, 2, 0, None),  # the baseline records none: it was multiplied in bf16
        ({"units": "another"}, 2, 0, None),
        ({"units": None}, 0, 2, None),  # of an earlier version
    ],
)
def test_pairs_of_other_instructions_are_mixed_and_have_no_ratio_of_times(
    study, tmp_path, capsys, own, mixed, unknown, cpu
):
    out = tmp_path / "out"
    finish(study, out, *NAMES[::2])
    finish(study, out, *NAMES[1::2], **own)
    data, _ = report(study, out, capsys)
    (group,) = data["groups"]
    assert (group["mixed_pairs"], group["unknown_pairs"], group["pairs"]) == (mixed, unknown, 2)
    assert group["rows"][0]["cpu"] == cpu
