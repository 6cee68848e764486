import json
import shutil
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import DivergenceError, UserError
from megalowbit.pretrain.run import pretrain
from megalowbit.records.attempts import read_attempts


def test_a_run_ends_with_checkpoint_summary_and_model(resolve, tmp_path, capsys):
    config = resolve("megalowbit.run.steps=4", "megalowbit.telemetry.layers_every=2")
    folder = tmp_path / "run"
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=False)
    assert (folder / "checkpoints" / "step-00000004" / "manifest.json").exists()
    assert (folder / "hf" / "model.safetensors").exists()
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == 4
    assert summary["final_loss"] == rows[-1]["loss"]
    assert summary["tokens"] == 4 * 128
    table = [json.loads(line) for line in (folder / "overflow_layers.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in table}) == [2, 4]
    resolved = json.loads((folder / "config.json").read_text())
    assert resolved == config.to_dict()
    output = capsys.readouterr().out
    assert "7 layers converted, 2 kept" in output
    assert "4/4" in output


@pytest.mark.parametrize(("at", "hint"), [(0.5, ", with the switch where it was: {}"), (1, "")])
def test_a_finished_run_says_how_it_continues_after_a_late_switch(resolve, tmp_path, capsys, at, hint):
    config = resolve("megalowbit.run.steps=2", f"megalowbit.late_switch.at={at}")
    for is_resume in (False, True):
        pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=is_resume)
    kept = 'megalowbit.late_switch = {"at": 1, "scope": "forward"}'
    line = f"nothing left to do: raise megalowbit.run.steps above 2 to continue{hint.format(kept)}\n"
    assert line in capsys.readouterr().out
    longer = resolve("megalowbit.run.steps=4", "megalowbit.late_switch.at=1")
    pretrain(longer, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=True)
    assert json.loads((tmp_path / "run" / "DONE").read_text()) == {"step": 4}


def test_resuming_a_finished_run_does_nothing_unless_it_was_extended(resolve, tmp_path, capsys):
    folder = tmp_path / "run"
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), run_dir=folder, is_resume=False)
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), run_dir=folder, is_resume=True)
    assert "nothing left to do" in capsys.readouterr().out
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert [(each["event"], each["step"]) for each in attempts] == [
        ("begun", 0), ("ended", 2), ("begun", 2), ("ended", 2)
    ]  # fmt: skip
    first = torch.load(folder / "checkpoints" / "step-00000002" / "mp_rank_00_model_states.pt")["module"]
    pretrain(resolve("megalowbit.run.steps=3"), ProcessIdentity(), run_dir=folder, is_resume=True)
    assert "megalowbit.run.steps: 2 → 3" in capsys.readouterr().out
    exports = {name: load_file(folder / name / "model.safetensors") for name in ("hf", "hf-step-00000002")}
    bias = "transformer.h.0.mlp.c_fc.bias"
    assert torch.equal(exports["hf-step-00000002"][bias], first[bias])
    last = torch.load(folder / "checkpoints" / "step-00000003" / "mp_rank_00_model_states.pt")["module"]
    assert torch.equal(exports["hf"][bias], last[bias])
    assert not torch.equal(first[bias], last[bias])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.params.lr=1e-5", r"optimizer\.params\.lr was 0\.003 .* is 1e-05 now"),
        ("megalowbit.recipe=bf16", r"megalowbit\.recipe was 'nvfp4-first-block-fp8'"),
        ("megalowbit.model.overrides.n_head=4", "n_head"),
    ],
)
def test_an_incompatible_resume_is_rejected_and_the_run_is_unchanged(resolve, tmp_path, override, message):
    folder = tmp_path / "run"
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), run_dir=folder, is_resume=False)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=message):
        pretrain(
            resolve("megalowbit.run.steps=4", override), ProcessIdentity(), run_dir=folder, is_resume=True
        )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_records_that_cannot_be_opened_are_one_clear_error(resolve, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        pretrain(resolve(), ProcessIdentity(), run_dir=tmp_path / "run", is_resume=True)


def test_an_fp8_run_reports_the_precision_of_its_products_at_the_end(resolve, tmp_path, capsys):
    recipe = 'megalowbit.recipe={"base": "mxfp4", "gemm": "fp8"}'
    config = resolve("megalowbit.run.steps=1", recipe)
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("products")]
    # 8 layers, two micro-batches
    assert sum(int(word) for word in line.replace(",", " ").split() if word.isdigit()) == 3 * 8 * 2
    assert "output 16 fp8" in line


def test_a_finished_run_is_marked_and_a_stopped_one_is_not(resolve, tmp_path, stop_signals, capsys):
    arguments = {"run_dir": tmp_path / "run", "is_resume": True}
    done = tmp_path / "run" / "DONE"
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), **arguments)
    assert json.loads(done.read_text()) == {"step": 2}
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    pretrain(resolve("megalowbit.run.steps=4"), ProcessIdentity(), **arguments)
    assert "stopped after step 3 on request: continue with --resume auto" in capsys.readouterr().out
    assert not done.exists()
    signal.sigtimedwait([signal.SIGTERM], 0)
    for _ in range(2):  # the second time nothing is left to do
        pretrain(resolve("megalowbit.run.steps=4"), ProcessIdentity(), **arguments)
        assert json.loads(done.read_text()) == {"step": 4}


def test_the_next_start_summarises_and_exports_a_run_killed_after_its_last_checkpoint(resolve, tmp_path):
    settings = (
        "megalowbit.run.steps=2",
        "megalowbit.telemetry.layers_every=3",
        "megalowbit.late_switch.at=1",
    )
    config, run = resolve(*settings), tmp_path / "run"
    pretrain(config, ProcessIdentity(), run_dir=run, is_resume=False)
    whole = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    summary = json.loads(whole["summary.json"])
    for name in ("summary.json", "DONE"):
        (run / name).unlink()
    shutil.rmtree(run / "hf")
    pretrain(config, ProcessIdentity(), run_dir=run, is_resume=True)
    for name in ("metrics.jsonl", "overflow_layers.jsonl", "DONE"):
        assert (run / name).read_bytes() == whole[name]
    again = json.loads((run / "summary.json").read_text())
    unmeasured = {"tokens_per_second": None, "tflops_per_device": None}
    assert again == {**summary, **unmeasured}
    assert (run / "hf" / "model.safetensors").exists()


def test_consecutive_skips_are_counted_across_a_kill(resolve, tmp_path):
    limit = "megalowbit.run.max_consecutive_skips=4"
    scaler = 'megalowbit.grad_scaler={"initial_scale": 1e30, "min_scale": 1e30, "max_scale": 1e30}'
    arguments = ("megalowbit.precision=fp16", scaler, limit, "megalowbit.run.steps=9")
    config, run = resolve(*arguments, "megalowbit.checkpoint.every=3"), tmp_path / "run"
    for _ in range(2):  # as if killed before the fourth
        with pytest.raises(DivergenceError, match=r"4 steps in a row were not finite \(step 4"):
            pretrain(config, ProcessIdentity(), run_dir=run, is_resume=True)
        assert read_attempts(run, [])[-1]["error"] == "DivergenceError"
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000003"]
