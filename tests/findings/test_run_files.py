"""Reading a folder: damaged, torn, empty and huge files, runs that train, and folders that hold none."""

import fcntl
import json
import math
import os
import time
from unittest.mock import ANY

import pytest

from megalowbit.commands.runs.diagnose import main
from megalowbit.errors import UserError
from megalowbit.findings.layer_tables import TABLES_KEPT
from megalowbit.findings.run_files import read_run
from megalowbit.findings.verdict import diagnosis_of


def test_a_torn_last_line_and_damaged_lines_are_left_out_and_noted(records, tmp_path):
    path = records.write(tmp_path / "run") / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join([*lines[:3], "{broken\n", '{"step": "four"}\n', "[1]\n", *lines[3:5], lines[5][:30]])
    )
    run = read_run(tmp_path / "run")
    assert run.metrics.steps.tolist() == [1, 2, 3, 4, 5]
    assert run.notes == [
        "metrics.jsonl ends in the middle of line 9, which is left out",
        "metrics.jsonl: 3 damaged lines left out, the first is line 4",
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "overflow_layers.jsonl", "attempts.jsonl", "config.json"])
def test_an_empty_file_is_not_an_error(records, tmp_path, name):
    (records.write(tmp_path / "run") / name).write_text("")
    run = read_run(tmp_path / "run")
    assert (len(run.metrics) == 0) == (name == "metrics.jsonl")
    assert (run.layers is None) == (name == "overflow_layers.jsonl")
    assert (not run.attempts) == (name == "attempts.jsonl")
    assert (not run.config) == (name == "config.json")


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("attempts.jsonl", "?\n" * 50, "attempts.jsonl: 50 damaged lines left out, the first is line 1"),
        ("attempts.jsonl", '{"event": 1}\n', "1 damaged line left out"),
        ("attempts-rank1.jsonl", "[]\n", "attempts-rank1.jsonl: 1 damaged line left out"),
        ("summary.json", "{garbage", "summary.json is not JSON"),
        ("summary.json", "[]", "summary.json holds a list"),
        ("DONE", "{garbage", "DONE is not JSON"),
        ("config.json", "{garbage", "config.json is not JSON"),
        ("overflow_layers.jsonl", "?\n" * 50, "overflow_layers.jsonl: 50 damaged lines left out"),
        ("slurm/refusal-7-0", b"\xff", "refusal-7-0 is not UTF-8"),
    ],
)
def test_what_is_damaged_reaches_the_verdict_and_what_is_missing_does_not(
    records, tmp_path, capsys, name, text, note
):
    run = records.write(tmp_path / "run")
    assert main([str(run)]) == 0
    assert "unusual (step 60" in capsys.readouterr().out
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    main([str(run)])
    shown = capsys.readouterr().out
    assert sum(note in line for line in shown.splitlines() if line.startswith("note: ")) == 1
    assert "unusual (" not in shown


@pytest.mark.parametrize(
    ("value", "found"), [(0.1, (0.1, "config.json")), ("wide", (0.02, ANY)), (0.0, (0.02, ANY))]
)
def test_the_initial_deviation_of_the_overrides_counts_first(records, tmp_path, value, found):
    records.config["megalowbit"]["model"] = {"overrides": {"initializer_range": value}}
    assert records.read(tmp_path / "run").initial_deviation == found


def test_a_damaged_configuration_of_the_export_is_noted_when_it_is_asked(records, tmp_path):
    run = records.read(tmp_path / "run")
    assert run.initial_deviation[0] == 0.02
    assert run.notes == []
    (tmp_path / "run" / "hf").mkdir()
    (tmp_path / "run" / "hf" / "config.json").write_text("{garbage")
    run = read_run(tmp_path / "run")
    assert run.initial_deviation[0] == 0.02
    assert "hf/config.json is not JSON" in run.notes[0]


def test_binary_rubbish_is_damaged_lines(records, tmp_path):
    path = records.write(tmp_path / "run") / "metrics.jsonl"
    path.write_bytes(bytes(range(256)) * 100 + b"\n")
    run = read_run(tmp_path / "run")
    assert len(run.metrics) == 0
    assert "damaged lines left out" in run.notes[0]


def test_tables_are_counted_since_the_one_before_also_after_counts_begin_again(records, tmp_path):
    path = records.write(tmp_path / "run") / "overflow_layers.jsonl"
    run = read_run(tmp_path / "run")
    assert run.layers.steps.tolist() == [10, 20, 30, 40, 50, 60]
    assert (run.layers.counts["elements"] == 4096).all()
    assert run.layers.first_step_of(0) == 1
    assert run.layers.first_step_of(2) == 21
    line = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        file.write(json.dumps({**line, "step": 70, "elements": 5}) + "\n")
    assert read_run(tmp_path / "run").layers.counts["elements"][-1][0] == 5


def test_totals_that_began_again_are_recognised_by_row_and_not_by_count(records, tmp_path):
    """A count that is now higher than before the restart has begun again as well."""
    path = records.write(tmp_path / "run") / "overflow_layers.jsonl"
    line = {"layer": "h.0", "role": "weight", "underflow": 0}
    tables = ((10, 1000, 50), (20, 1500, 40), (30, 2500, 60))
    path.write_text(
        "".join(
            json.dumps({"step": step, **line, "elements": elements, "saturated": saturated}) + "\n"
            for step, elements, saturated in tables
        )
    )
    counts = read_run(tmp_path / "run").layers.counts
    assert counts["elements"][:, 0].tolist() == [1000, 1500, 1000]
    assert counts["saturated"][:, 0].tolist() == [50, 40, 20]


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_what_is_no_run_is_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    with pytest.raises(UserError, match="name the folder of a run"):
        read_run(tmp_path / name)


def test_a_checkpoint_leads_to_its_run_and_a_folder_without_configuration_is_read(records, tmp_path):
    run = records.write(tmp_path / "run")
    (run / "checkpoints" / "step-00000040").mkdir(parents=True)
    assert read_run(run / "checkpoints" / "step-00000040").folder == run
    (run / "config.json").unlink()
    assert read_run(run).planned_steps is None
    assert "config.json is missing" in read_run(run).notes[0]


def test_a_run_that_holds_its_lock_is_running(records, tmp_path):
    run = records.write(tmp_path / "run")
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).is_running
    assert not read_run(run).is_running


@pytest.mark.slow
def test_diagnosing_a_hundred_thousand_steps_takes_as_long_as_parsing_them_four_times(records, tmp_path):
    """Four seconds on an idle machine. A busy one slows both, so it is compared with parsing."""
    run = records.write(tmp_path / "run")
    row = {**records.rows[-1], **{f"quantization/{name}/snr_db": 17.123456789 for name in range(30)}}
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            loss = 3 + 2 / step + 0.1 * math.sin(step * step)
            of_ranks = dict.fromkeys(("slowest", "highest_loss_rank"), step * step % 7)
            values = dict.fromkeys(
                ("slowest_milliseconds", "other_milliseconds", "highest_loss", "other_loss")
            )
            values = {name: loss + 0.1 * (number + step % 3) for number, name in enumerate(values)}
            ranks = {f"ranks/{name}": value for name, value in (of_ranks | values).items()}
            file.write(json.dumps({**row, "step": step, "loss": loss, "loss/web": loss, **ranks}) + "\n")
    line = json.loads((run / "overflow_layers.jsonl").read_text().splitlines()[0])
    with (run / "overflow_layers.jsonl").open("w") as file:
        for step in range(100, 100_001, 100):
            for layer in range(20):
                file.write(json.dumps({**line, "step": step, "layer": f"h.{layer}"}) + "\n")
    started = time.process_time()
    with (run / "metrics.jsonl").open() as file:
        for text in file:
            json.loads(text)
    parsed = time.process_time()
    found = read_run(run)
    assert diagnosis_of(found).steps == (100_000, 60)
    assert time.process_time() - parsed < 4 * (parsed - started)
    assert found.last_step == 100_000
    assert len(found.layers.steps) == TABLES_KEPT
    assert found.layers.steps[-1] == 100_000


ODD_LINES = (
    '{"step": [1], "layer": "a", "role": "weight"}',
    '{"step": 1e400}',
    '{"step": true}',
    '{"event": "ended"}',
    '{"event": "begun", "time": "noon", "host": null, "processes": "two", "job": 7}',
    '{"step": 3, "nonfinite": 7}',
    '{"step": 1, "loss": ' + "9" * 400 + ', "skipped_steps": "x", "skipped/tensor": 5}',
    '"a string"',
    '{"step": 2, "layer": 5, "role": null}',
    '{"step": 9, "layer": "a", "role": "weight", "elements": "many"}',
)


@pytest.mark.parametrize("name", ["metrics.jsonl", "overflow_layers.jsonl", "attempts.jsonl"])
def test_lines_of_any_form_are_diagnosed_without_an_exception(records, tmp_path, name):
    path = records.write(tmp_path / "run") / name
    path.write_text("\n".join(ODD_LINES) + "\n")
    verdict = diagnosis_of(read_run(tmp_path / "run"))
    assert json.loads(json.dumps(verdict.to_dict(), allow_nan=False))["state"] in ("healthy", "troubled")


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "overflow_layers.jsonl", "attempts.jsonl", "config.json", "summary.json", ".lock"],
)
def test_a_fifo_or_folder_in_the_place_of_a_file_does_not_block(records, tmp_path, name):
    for kind in (os.mkfifo, os.mkdir):
        run = records.write(tmp_path / kind.__name__)
        (run / name).unlink(missing_ok=True)
        kind(run / name)
        assert read_run(run).folder == run


def test_a_refusal_counts_only_if_it_is_of_the_last_attempt(records, tmp_path):
    run = records.write(tmp_path / "run")
    (run / "slurm").mkdir()
    (run / "slurm" / "refusal-7-0").write_text("corpus is missing\n")
    assert read_run(run).refusals == {"slurm/refusal-7-0": "corpus is missing"}
    os.utime(run / "slurm" / "refusal-7-0", (0.5, 0.5))
    assert read_run(run).refusals == {}


def test_rollbacks_whose_lines_are_gone_are_noted_with_their_reasons(records, tmp_path):
    records.rows[-1]["rollbacks"] = 2
    run = records.write(tmp_path / "run")
    (note,) = diagnosis_of(read_run(run)).notes
    assert note.startswith("the loss guard has rolled back 2 times")
    (run / "summary.json").write_text(json.dumps({"rollbacks": [{"reason": "step 9: loss 8"}, {}, 5]}))
    assert diagnosis_of(read_run(run)).notes[0].endswith("in no record: step 9: loss 8")
