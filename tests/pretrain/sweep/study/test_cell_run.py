"""One cell: killed, locked, and with other settings."""

import json
import subprocess
import time
from pathlib import Path

import pytest
import torch
from programs import call_main
from studies import RESULT

from launchers import metrics
from megalowbit.errors import TransientError, UserError
from megalowbit.pretrain.sweep.study import cell_run, execution
from megalowbit.pretrain.sweep.study.cell_run import run_cell
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.results import Origin, made_with
from megalowbit.pretrain.sweep.study.study_file import read_study
from megalowbit.pretrain.sweep.study.texts import TextFacts

TOOL = "tools/study.py"
ROOT = Path(__file__).parents[4]
LOSSES = ((1, 3.0), (2, 2.5), (3, None))  # by step
FACTS = TextFacts(
    description="",
    train_bytes=1,
    heldout_bytes=1,
    heldout_documents=1,
    heldout_repeated=0.0,
    train_sha256="a" * 64,
    heldout_sha256="b" * 64,
)


def result(out, name):
    return json.loads((out / "cells" / name / "result.json").read_text())


@pytest.mark.slow
def test_a_killed_cell_continues_to_the_same_result_and_other_settings_are_refused(study, tmp_path, capsys):
    out, name = tmp_path / "out", "tiny,parts,8,nvfp4,1"
    few = ("--recipe", "nvfp4", "--seed", 1)
    assert call_main(TOOL, study, "--out", out, *few, capsys=capsys).returncode == 0
    whole = result(out, name)

    killed = tmp_path / "killed"
    (killed / "logs").mkdir(parents=True)
    cells = {cell.name: cell for cell in cells_of(read_study(study), killed, ROOT / "launch" / "pretrain.py")}
    process = execution.starter(ROOT / TOOL, study)(cells[name], killed / "logs" / "first.log")
    while not (seen := metrics(cells[name].path)) or seen[-1]["step"] < 5:
        assert process.poll() is None, (killed / "logs" / "first.log").read_text()
        time.sleep(0.005)
    process.kill()
    process.wait()
    parts = cells[name].path / "parts.json"
    begun = json.loads(parts.read_text())
    begun["begun_with"][0]["commit"] = "an earlier one"
    parts.write_text(json.dumps(begun))
    if not (cells[name].path / "result.json").exists():  # else it was faster than this test
        done = call_main(TOOL, study, "--out", killed, *few, capsys=capsys)
        assert done.returncode == 0, done.stderr
        origin = result(killed, name)["made_with"]
        assert origin["commit"] == f"an earlier one and {whole['made_with']['commit']}"
        assert origin["processor"] == whole["made_with"]["processor"]
    again = result(killed, name)
    assert again["losses"] == whole["losses"]
    assert again["heldout"] == whole["heldout"]
    assert again["tokens"] == whole["tokens"]

    changed = json.loads(study.read_text())
    changed["set"]["gradient_clipping"] = 0.5
    study.write_text(json.dumps(changed))
    done = call_main(TOOL, study, "--out", out, *few, capsys=capsys)
    assert done.returncode == 2
    assert "was run with other settings: config.gradient_clipping = 0.5 (was 1.0)" in done.stderr
    assert result(out, name) == whole


@pytest.mark.slow
def test_a_stopped_cell_adds_up_its_cpu_time(study, tmp_path, capsys):
    raw = json.loads(study.read_text())
    study.write_text(json.dumps({**raw, "steps": [60], "seeds": [1], "marks": []}))
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    cells = cells_of(read_study(study), out, ROOT / "launch" / "pretrain.py")
    log = out / "logs" / "first.log"
    process = execution.starter(ROOT / TOOL, study)(cells[1], log)
    while not (seen := metrics(cells[1].path)) or seen[-1]["step"] < 5:
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)
    process.terminate()
    assert process.wait() == execution.EXIT_STOPPED
    (part,) = json.loads((cells[1].path / "parts.json").read_text())["parts"]
    assert part["steps"] == len(metrics(cells[1].path)) < 60
    done = call_main(TOOL, study, "--out", out, capsys=capsys)
    assert done.returncode == 0, done.stderr
    cost = result(out, cells[1].name)["cost"]
    assert cost["steps"] == 60
    assert cost["cpu_seconds"] > part["cpu_seconds"] > 0
    assert cost["wall_seconds"] > part["wall_seconds"] > 0
    (row,) = json.loads((out / "study.json").read_text())["groups"][0]["rows"]
    assert row["cpu"] == pytest.approx(
        cost["cpu_seconds"] / result(out, cells[0].name)["cost"]["cpu_seconds"]
    )


def test_a_cell_is_not_continued_with_other_versions(study, tmp_path):
    cell = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")[0]
    earlier = {**made_with(ROOT), "torch": "2.4.0"}
    cell.write("parts.json", {"begun_with": [earlier], "parts": []})
    manifest = cell.path / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    with pytest.raises(
        UserError, match=r"was begun with torch 2\.4\.0, and .* is installed: install 2\.4\.0"
    ):
        run_cell(cell, FACTS)


def test_what_left_no_checkpoint_is_no_origin_of_a_result(study, tmp_path):
    cell = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")[0]
    cell.write("parts.json", {"begun_with": [{**made_with(ROOT), "torch": "2.4.0"}], "parts": []})
    record = cell_run._begin(cell)
    assert [each.torch for each in record.begun_with] == [made_with(ROOT)["torch"]]
    assert json.loads((cell.path / "parts.json").read_text()) == record.model_dump()


def test_the_origin_of_a_resumed_cell_has_all_commits_and_processors():
    here = {**RESULT["made_with"], "commit": "b"}
    origins = [Origin(**{**here, "commit": None, "processor": "two"}), Origin(**here), Origin(**here)]
    assert (
        cell_run._joined(origins)
        == Origin(**{**here, "commit": "unknown and b", "processor": "two and one"}).model_dump()
    )
    assert cell_run._joined(origins[:1])["commit"] is None


def ended_after_nan(cell, monkeypatch, code, error):
    """Let the cell's run record two losses and one of NaN, and end with this code and error."""

    def train(_):
        cell.path.mkdir(parents=True, exist_ok=True)
        rows = [
            {"step": step, "loss": loss, "skipped_steps": 0, "tokens": 64 * step} for step, loss in LOSSES
        ]
        (cell.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ended = {"event": "ended", "time": 1.0, "rank": 0, "step": 3, "how": "error", "error": error}
        (cell.path / "attempts.jsonl").write_text((json.dumps(ended) + "\n") * (error is not None))
        (cell.path / "checkpoints").mkdir()
        return code

    monkeypatch.setattr(cell_run, "_train", train)


@pytest.mark.parametrize(
    ("code", "error"), [(75, "TransientError"), (2, "UserError"), (1, "ValueError"), (130, None)]
)
def test_another_fault_after_a_loss_of_nan_is_no_divergence(study, tmp_path, monkeypatch, code, error):
    cell = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")[0]
    ended_after_nan(cell, monkeypatch, code, error)
    with pytest.raises(UserError, match=f"{cell.name} has failed with exit code {code}: see its log"):
        run_cell(cell, FACTS)
    assert cell.result() is None
    assert (cell.path / "checkpoints").exists()


def test_a_run_that_ends_because_it_diverges_is_a_result(study, tmp_path, monkeypatch):
    cell = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")[0]
    ended_after_nan(cell, monkeypatch, 2, "DivergenceError")
    assert run_cell(cell, FACTS)
    assert cell.result().diverged_at == 3
    assert cell.result().heldout is None


@pytest.mark.slow
def test_a_real_divergence_is_the_result_of_a_cell(study, tmp_path, capsys):
    raw = json.loads(study.read_text())
    raw["sizes"][0]["lr_factor"] = 1e30
    raw["set"]["megalowbit.run.max_consecutive_skips"] = 2
    study.write_text(json.dumps(raw))
    few = ("--recipe", "nvfp4", "--seed", 1)
    done = call_main(TOOL, study, "--out", tmp_path / "out", *few, capsys=capsys)
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "out", "tiny,parts,8,nvfp4,1")
    assert found["diverged_at"] is not None
    assert len(found["losses"]) < 8


def test_a_cell_that_another_process_runs_is_left_to_it(study, tmp_path):
    cell = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")[0]
    (tmp_path / "out" / "locks").mkdir(parents=True)
    lock = tmp_path / "out" / "locks" / cell.name
    holder = subprocess.Popen(["flock", str(lock), "sleep", "60"])
    try:
        while subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 0:
            time.sleep(0.01)
        with pytest.raises(TransientError, match=f"^{cell.name} is run by another process: wait for it$"):
            run_cell(cell, FACTS)
    finally:
        holder.kill()
        holder.wait()
    assert not cell.path.exists()


def test_only_bf16_cells_on_a_cpu_have_a_dtype_of_gemms_and_keep_it(study, tmp_path, monkeypatch):
    cells = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")
    bf16, nvfp4 = cells[:2]
    assert (bf16.label, nvfp4.label) == ("bf16", "nvfp4")
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", "fp32")
    assert cell_run._gemm(bf16, []) == cell_run._gemm(nvfp4, []) == "fp32"
    earlier, begun = [Origin(**RESULT["made_with"])], [Origin(**{**RESULT["made_with"], "gemm": "bf16"})]
    assert cell_run._gemm(nvfp4, earlier) is None  # its checkpoint has another one, perhaps
    with pytest.raises(
        UserError, match="was begun with MEGALOWBIT_CPU_GEMM=bf16, and now it is fp32: set it"
    ):
        cell_run._gemm(nvfp4, begun)
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", "")
    assert cell_run._gemm(nvfp4, begun) == "bf16"  # the checkpoint has it, whatever is faster here
    monkeypatch.setattr(cell_run, "this_device", lambda: torch.device("cuda"))
    assert cell_run._gemm(nvfp4, begun) is None
