import json
from pathlib import Path

from programs import call_main
from studies import NAMES, RESULT, finish, report

from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.study_file import read_study
from megalowbit.pretrain.sweep.study.texts import write_text

TOOL = "tools/study.py"
PROGRAM = Path(__file__).parents[5] / "launch" / "pretrain.py"


def test_cells_of_another_study_or_with_other_settings_are_not_reported(study, tmp_path, capsys):
    out = tmp_path / "out"
    cell = cells_of(read_study(study), out, PROGRAM)[1]
    (facts,) = (write_text(text, cell.text_folder, heldout_bytes=3000) for text in read_study(study).texts)
    result = {**RESULT, "settings": cell.settings(facts), "losses": [1.0] * 8}
    cell.write("result.json", result)
    cell.write("cell.json", cell.settings(facts))
    (out / "study.json").write_text("of this study")
    raw = json.loads(study.read_text())
    for changes, message in (
        ({"set": {**raw["set"], "gradient_clipping": 0.5}}, "gradient_clipping = 0.5 (was 1.0)"),
        ({"sizes": [{"name": "other"}]}, f"finished cells that are not in this study ({cell.name})"),
    ):
        study.write_text(json.dumps({**raw, **changes}))
        done = call_main(TOOL, study, "--out", out, "--report", capsys=capsys)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert message in done.stderr
        assert (out / "study.json").read_text() == "of this study"


def test_a_report_without_pairs_says_what_is_finished(study, tmp_path, capsys):
    out = tmp_path / "out"
    cells = {(cell.label, cell.seed): cell for cell in cells_of(read_study(study), out, PROGRAM)}
    (text,) = read_study(study).texts
    done = call_main(TOOL, study, "--out", out, "--report", capsys=capsys)
    assert "No cell is finished: 4 are left." in done.stdout
    folder = next(iter(cells.values())).text_folder
    facts = write_text(text, folder, heldout_bytes=3000)
    for finished, has_pair in ((("nvfp4", 2), False), (("bf16", 1), False), (("bf16", 2), True)):
        cell = cells[finished]
        settings = cell.settings(facts)
        cell.write("cell.json", settings)
        cell.write("result.json", {**RESULT, "settings": settings, "losses": [1.0] * 8})
        done = call_main(TOOL, study, "--out", out, "--report", capsys=capsys)
        assert done.returncode == 0, done.stderr
        assert ("No gaps for tiny, 8 steps, text parts" in done.stdout) != has_pair
        assert ("no run has a seed in common with bf16" in (out / "study.html").read_text()) != has_pair
        assert bool(json.loads((out / "study.json").read_text())["missing"]) != has_pair
        if finished == ("bf16", 1):
            assert "Finished seeds: bf16: 1; nvfp4: 2." in (out / "study.md").read_text()


def test_a_report_says_why_runs_of_one_seed_have_no_gap(study, tmp_path, capsys):
    out = tmp_path / "out"
    finish(study, out, *NAMES)
    for cell in cells_of(read_study(study), out, PROGRAM):
        if cell.label == "bf16":
            path = cell.path / "result.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "diverged_at": 2}))
    data, done = report(study, out, capsys)
    (missing,) = data["missing"]
    assert missing in done.stdout
    assert "bf16, or a fork of it, has diverged or is not finished for the seeds of the others." in missing
    assert "in common" not in missing


def test_results_of_other_cells_and_incomplete_ones_are_not_reported(study, tmp_path, capsys):
    out = tmp_path / "out"
    one, two, *_ = cells_of(read_study(study), out, PROGRAM)
    (facts,) = (write_text(text, one.text_folder, heldout_bytes=3000) for text in read_study(study).texts)
    whole = {**RESULT, "settings": one.settings(facts), "losses": [1.0] * 8}
    two.write("cell.json", two.settings(facts))
    for result, message in (
        (whole, f"the result in {two.path} is of another cell: cell.recipe"),
        ({**whole, "losses": [1.0] * 7}, "has the losses of 7 of 8 steps: remove"),
        ({**whole, "losses": [1.0] * 9}, "has the losses of 9 of 8 steps: remove"),
        ({**whole, "diverged_at": 0}, "has diverged_at 0 of 8 steps: remove"),
    ):
        two.write("result.json", result)
        done = call_main(TOOL, study, "--out", out, "--report", capsys=capsys)
        assert done.returncode == 2
        assert message in done.stderr
    (two.path / "result.json").write_text("")
    done = call_main(TOOL, study, "--out", out, "--report", capsys=capsys)
    assert f"remove {two.path} to run the cell again" in done.stderr
