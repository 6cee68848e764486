import json
from pathlib import Path

from programs import call_main
from studies import RESULT

from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.study_file import read_study
from megalowbit.pretrain.sweep.study.texts import write_text

TOOL = "tools/study.py"
PROGRAM = Path(__file__).parents[5] / "launch" / "pretrain.py"


def test_cells_of_another_study_or_with_other_settings_are_not_reported(study, tmp_path, capsys):
    out = tmp_path / "out"
    cell = cells_of(read_study(study), out, PROGRAM)[1]
    (facts,) = (write_text(text, cell.text_folder, heldout_bytes=3000) for text in read_study(study).texts)
    cell.write("result.json", RESULT)
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
