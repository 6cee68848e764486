"""A run that has lost its checkpoints is not silently retrained; one that never had any restarts."""

import json
import shutil

import pytest
from ended_runs import STEPS, Killed, contents, dangle, remove_manifests, rows
from quick_cases import every_value

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain import job as jobs
from megalowbit.pretrain.run import pretrain
from megalowbit.pretrain.run_folder.folder import RunFolder
from megalowbit.pretrain.run_folder.lost_checkpoints import check_checkpoints_are_there


def resume(config, folder, **more):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=True, **more)


def remove(folder):
    shutil.rmtree(folder / "checkpoints")


def remove_steps(folder):
    for path in (folder / "checkpoints").glob("step-*"):
        shutil.rmtree(path)


def put_a_file(folder):
    remove(folder)
    (folder / "checkpoints").write_text("")


LOSSES = {
    remove: "checkpoints does not exist",
    remove_steps: "checkpoints has none",
    dangle: "checkpoints is a link to .*gone.*, which does not exist",
    remove_manifests: r"no step in .*checkpoints has a manifest\.json",
    put_a_file: "checkpoints is not a folder",
}


@pytest.mark.parametrize("lose", LOSSES)
def test_a_run_without_its_checkpoints_is_rejected_and_unchanged(resolve, finished, lose):
    lose(finished)
    before = contents(finished)
    with pytest.raises(UserError, match=LOSSES[lose]) as caught:
        resume(resolve(*STEPS), finished)
    assert "\n" not in str(caught.value)
    assert contents(finished) == before


def end_marks(folder):
    for name in ("DONE", "summary.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "hf")


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ("saved.json", r"\(saved.json names step 2\)"),
        ("latest", r"there is checkpoints/latest"),
        ("records", r"metrics.jsonl ends at step 4, the first was due after step 2"),
        ("records without configuration", r"metrics.jsonl has step 4, though config.json is missing"),
        ("folder", r"step-00000002 is there"),
        ("damaged note", r"saved.json is not JSON"),
        ("strange note", r"saved.json is damaged: its step is \[\]"),
    ],
)
def test_any_trace_of_a_checkpoint_is_detected(resolve, finished, evidence, message):
    end_marks(finished)
    note, latest = finished / "saved.json", finished / "checkpoints" / "latest"
    if evidence == "folder":
        remove_manifests(finished)
        latest.unlink()
        note.write_text('{"step": null}')
    elif evidence == "latest":
        remove_steps(finished)
        note.unlink()
    else:
        remove(finished)
    if evidence.startswith("records"):
        note.unlink()
    if evidence == "records without configuration":
        (finished / "config.json").unlink()
    if "note" in evidence:
        note.write_text("{" if evidence == "damaged note" else '{"step": []}')
    before = contents(finished)
    with pytest.raises(UserError, match=message):
        resume(resolve(*STEPS), finished)
    assert contents(finished) == before


@every_value(is_in_save=[False, True], is_earlier_version=[False, True])
def test_a_run_killed_before_its_first_checkpoint_restarts_and_keeps_its_records(
    resolve, tmp_path, monkeypatch, caplog, is_in_save, is_earlier_version
):
    folder, config = tmp_path / "run", resolve(*STEPS)

    def die(job):
        if is_in_save:
            (job.store.path_of(2)).mkdir(parents=True)
            (job.store.path_of(2) / ".saving").touch()
            (job.store.path_of(2) / "mp_rank_00_model_states.pt").write_bytes(b"half")
        raise Killed

    monkeypatch.setattr(jobs.Job, "save", die)
    for start in (1, 2):  # a job script tries again and again
        with pytest.raises(Killed):
            resume(config, folder)
        assert rows(folder) == [1, 2]
        assert (
            sorted(path.name for path in folder.glob("metrics.jsonl.*")) == ["metrics.jsonl.1"][: start - 1]
        )
        if is_earlier_version:
            (folder / "saved.json").unlink()
        shutil.rmtree(folder / "checkpoints", ignore_errors=not is_in_save)
    monkeypatch.undo()
    resume(config, folder)
    assert rows(folder) == [1, 2, 3, 4]
    for name in ("metrics.jsonl.1", "metrics.jsonl.2"):
        assert rows(folder, name) == [1, 2]
    assert "its records are kept as metrics.jsonl.2" in caplog.text
    assert json.loads((folder / "saved.json").read_text()) == {"step": 2}


NEAREST = {"base": "nvfp4-first-block-fp8", "q_backward_outputgrad": "nvfp4e2m1bnosr"}


def test_a_run_without_its_configuration_is_compared_with_its_checkpoint(resolve, finished):
    (finished / "config.json").unlink()
    with pytest.raises(
        UserError, match=r"megalowbit\.recipe was 'nvfp4-first-block-fp8' in the run to resume"
    ):
        resume(resolve(*STEPS, f"megalowbit.recipe={json.dumps(NEAREST)}"), finished)
    resume(resolve(*STEPS), finished)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"megalowbit": 3}', r"config\.json is damaged \(megalowbit is 3, not an object\)"),
        ('{"megalowbit": {"run": [1]}}', r"megalowbit\.run is \[1\], not an object"),
        ("{}", "megalowbit is None, not an object"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": ' * 500 + "1" + "}" * 500, "is nested too deeply"),
        ("[]", "holds a list, not an object"),
    ],
)
def test_a_damaged_configuration_of_the_run_is_a_one_line_error(resolve, finished, text, message):
    (finished / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        resume(resolve(*STEPS), finished)


def test_a_tokenizer_that_no_run_has_written_is_not_overwritten(resolve, tmp_path):
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    (run / "tokenizer" / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match=r"tokenizer was not written by a run, .*: move it away"):
        pretrain(resolve(*STEPS), ProcessIdentity(), run_dir=run, is_resume=True)
    assert contents(run) == {"tokenizer/tokenizer.json": b"mine"}
    (run / "metrics.jsonl").touch()  # a run that was killed between its first files
    check_checkpoints_are_there(RunFolder(run), is_resume=True)
