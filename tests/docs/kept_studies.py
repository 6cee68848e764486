"""The studies in `docs/results`, and what a report on their cells says now."""

import json
import tempfile
from pathlib import Path

from megalowbit.pretrain.sweep.study.cells import RESULT, cells_of
from megalowbit.pretrain.sweep.study.kept_results import read_kept
from megalowbit.pretrain.sweep.study.report.written import Results, to_text
from megalowbit.pretrain.sweep.study.reproduction import unpack
from megalowbit.pretrain.sweep.study.results import made_with
from megalowbit.pretrain.sweep.study.study_file import read_study

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path for path in (ROOT / "docs" / "results").glob("*.json") if '"cells"' in path.read_text())


def shown_by(path, folder):
    """What the cells of a study show, without a check of texts and versions, which would be computed anew."""
    study_file, kept = unpack(path, next(iter(read_kept(path).results)), folder)
    study = read_study(study_file)
    cells = cells_of(study, folder, ROOT / "launch" / "pretrain.py")
    for cell in cells:
        if cell.name in kept.results:
            cell.write(RESULT, kept.results[cell.name].model_dump())
    return json.loads(json.dumps(Results.of(study, cells).to_dict()))


def rewrite(path, folder, origin):
    """Bring what a file says about its cells up to date, after a change of the analysis."""
    before = json.loads(path.read_text())
    path.write_text(to_text({**before, **shown_by(path, folder), "report_made_with": origin}))


if __name__ == "__main__":
    ORIGIN = made_with(ROOT)  # before a file changes
    for each in STUDIES:
        with tempfile.TemporaryDirectory() as folder:
            rewrite(each, Path(folder), ORIGIN)
