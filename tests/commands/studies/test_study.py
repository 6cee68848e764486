"""Studies from the command line: real cells, killed ones, repeated ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import call_main
from studies import NAMES, RESULT, finish, report

from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.study_file import read_study
from megalowbit.pretrain.sweep.study.texts import write_text

TOOL = "tools/study.py"
ROOT = Path(__file__).parents[3]
STEPS = 8


def result(out, name):
    return json.loads((out / "cells" / name / "result.json").read_text())


@pytest.mark.slow
def test_a_study_runs_its_cells_once_and_one_is_reproduced_from_its_results(
    study, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    done = call_main(TOOL, study, "--out", out, "--jobs", 2, capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert "4 cells, 0 finished" in done.stdout
    data = json.loads((out / "study.json").read_text())
    assert data["unfinished"] == 0
    (group,) = data["groups"]
    losses = {name: result(out, name)["losses"] for name in data["cells"]}
    assert {len(each) for each in losses.values()} == {STEPS}
    gaps = [
        sum(losses[f"tiny,parts,8,nvfp4,{seed}"][-2:]) / 2 - sum(losses[f"tiny,parts,8,bf16,{seed}"][-2:]) / 2
        for seed in (1, 2)
    ]
    (row,) = group["rows"]
    assert row["gaps"]["8"]["mean"] == pytest.approx(sum(gaps) / 2, abs=2e-9)
    assert row["gaps"]["8"]["num_pairs"] == 2
    for seed in (1, 2):
        heldout = result(out, f"tiny,parts,8,bf16,{seed}")["heldout"]
        assert heldout["own"] == heldout["bf16"]
        heldout = result(out, f"tiny,parts,8,nvfp4,{seed}")["heldout"]
        assert heldout["own"] != heldout["bf16"]
    assert (out / "study.html").read_text().count("<polyline") == 1
    assert not list(out.glob("cells/*/checkpoints"))
    times = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}
    again = call_main(TOOL, study, "--out", out, capsys=capsys)
    assert "4 cells, 4 finished" in again.stdout
    assert times == {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}

    repeated = tmp_path / "repeated"
    study.unlink()  # the results are enough
    arguments = ("--reproduce", out / "study.json", "tiny,parts,8,nvfp4,2", "--out", repeated)
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("tiny,parts,8,nvfp4,2 is reproduced exactly\n")
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 2
    assert "is finished already: use another --out, so that the cell runs again" in done.stderr
    data["cells"]["tiny,parts,8,nvfp4,2"]["losses"]["means"][-1] += 0.25
    (out / "other.json").write_text(json.dumps(data))
    for within, code, message in (
        (0.0, 1, "differs by up to 2.50e-01 nats from that of commit"),
        (0.3, 0, "is reproduced to 2.50e-01 nats"),
    ):
        arguments = ("--reproduce", out / "other.json", "tiny,parts,8,nvfp4,2", "--within", within)
        done = call_main(TOOL, *arguments, "--out", tmp_path / f"within-{within}", capsys=capsys)
        assert done.returncode == code, done.stderr
        assert message in done.stdout
        assert "It was made on" not in done.stdout
    origin = data["origins"][data["cells"]["tiny,parts,8,nvfp4,2"]["origin"]]
    assert origin["gemm"] == "bf16"
    origin["gemm"] = "fp32"
    (out / "other.json").write_text(json.dumps(data))
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", "")  # then the recorded dtype is used
    arguments = ("--reproduce", out / "other.json", "tiny,parts,8,nvfp4,2", "--out", tmp_path / "elsewhere")
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 1, done.stderr
    assert result(tmp_path / "elsewhere", "tiny,parts,8,nvfp4,2")["made_with"]["gemm"] == "fp32"
    assert "It was made on" not in done.stdout


def test_a_job_script_has_a_task_for_each_unfinished_cell(study, tmp_path, capsys):
    out, bin = tmp_path / "out", tmp_path / "bin"
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"gpus_per_node": 0, "cpus_per_task": 2, "time": "60", "setup": ["export A=b"]}')
    cells_of(read_study(study), out, ROOT)[0].write("result.json", {**RESULT, "losses": [1.0] * 8})
    cells = cells_of(read_study(study), out, ROOT / "launch" / "pretrain.py")
    (facts,) = (
        write_text(text, cells[0].text_folder, heldout_bytes=3000) for text in read_study(study).texts
    )
    cells[0].write("cell.json", cells[0].settings(facts))
    done = call_main(TOOL, study, "--out", out, "--jobs", 3, "--slurm", cluster, capsys=capsys)
    assert done.returncode == 0, done.stderr
    job = out / "slurm" / "study.sbatch"
    assert f"sbatch {job}\n" in done.stdout
    script = job.read_text()
    assert "{{" not in script
    assert "#SBATCH --array=1-3%3\n" in script
    bin.mkdir()
    stand_ins = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; "$@"',
        "python": 'printf "%s\\n" "$@" "$OMP_NUM_THREADS" "$A"; exit 3',
        "scontrol": 'echo "scontrol $*"',
    }
    for name, text in stand_ins.items():
        (bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin / name).chmod(0o755)
    script = script.replace(f"export PATH={Path(sys.executable).parent}:", f"export PATH={bin}:")
    task = {**os.environ, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    ended = subprocess.run(["bash", "-c", script], env=task, capture_output=True, text=True)
    assert ended.returncode == 3
    assert ended.stdout.splitlines() == [
        *(str(ROOT / TOOL), str(study), "--out", str(out), "--cell", cells[2].name),
        *("2", "b", "scontrol requeue 7_2"),
    ]
    cluster.write_text('{"gpus_per_node": 8, "cpus_per_task": 2}')
    done = call_main(TOOL, study, "--out", out, "--slurm", cluster, capsys=capsys)
    assert done.returncode == 2
    assert "a cell of a study is one process, but the cluster's settings have nodes 1 with 8" in done.stderr


MISTAKES = [
    (
        ("study.json", "--recipe", "nvfp5"),
        "unknown --recipe 'nvfp5': did you mean 'nvfp4'? known: bf16, nvfp4",
    ),
    (("study.json", "--jobs", "0"), "--jobs 0 must be at least 1"),
    ((), "name either a STUDY.json or --reproduce RESULTS.json CELL"),
    (("--reproduce", "x.json", "cell", "--within", "nan"), "--within nan is no difference in nats"),
    (("--reproduce", "x.json", "cell", "--within", "-1"), "--within -1.0 is no difference in nats"),
    (
        ("--from", "a.json", "--reproduce", "study.json", "x"),
        "--from goes with STUDY.json, not with --reproduce or --cell: leave it out",
    ),
    (("study.json", "--from", "none.json", "--out", "o"), "cannot read none.json"),
    (("none.json",), "cannot read none.json"),
    (
        ("--reproduce", "study.json", "x"),
        "study.json has no 'format' 2: name a study.json that megalowbit study has written",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_line_and_runs_nothing(study, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_list_names_a_mistake_in_a_recipe(study, tmp_path, capsys):
    raw = json.loads(study.read_text())
    raw["recipes"].append({"name": "mine", "set": {"megalowbit.recipe": "nvfp5"}})
    study.write_text(json.dumps(raw))
    done = call_main(TOOL, study, "--out", tmp_path / "out", "--list", capsys=capsys)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'mine'" in done.stderr
    assert "did you mean 'nvfp4'" in done.stderr


def test_the_list_names_cells_and_which_are_finished(study, tmp_path, capsys):
    cells = cells_of(read_study(study), tmp_path / "out", ROOT)
    cells[0].write("result.json", {**RESULT, "losses": [1.0] * 8})
    done = call_main(TOOL, study, "--out", tmp_path / "out", "--list", "--seed", 1, capsys=capsys)
    assert done.stdout.splitlines() == ["finished  tiny,parts,8,bf16,1", "-         tiny,parts,8,nvfp4,1"]


def test_a_report_on_a_part_of_a_folder_needs_another_folder(study, tmp_path, capsys):
    out, part = tmp_path / "out", tmp_path / "part"
    finish(study, out, *NAMES)
    report(study, out, capsys)
    before = (out / "study.json").read_bytes()
    done = call_main(TOOL, study, "--out", out, "--report", "--seed", 1, capsys=capsys)
    assert done.returncode == 2
    assert "tiny,parts,8,bf16,2, which the options do not select: leave them out" in done.stderr
    assert f"another --out and, once there is a study.json, --from {out / 'study.json'}" in done.stderr
    assert (out / "study.json").read_bytes() == before
    for more in (["--from", out / "study.json"], []):  # the second time with what was taken over
        data, _ = report(study, part, capsys, *more, "--seed", 1)
        assert list(data["cells"]) == ["tiny,parts,8,bf16,1", "tiny,parts,8,nvfp4,1"]
        assert data["groups"][0]["rows"][0]["gaps"]["8"]["num_pairs"] == 1
    done = call_main(
        TOOL, study, "--out", part, "--from", out / "study.json", "--report", "--seed", 2, capsys=capsys
    )
    assert done.returncode == 2
    assert not (part / "cells" / "tiny,parts,8,bf16,2").exists()  # refused before anything is taken over
