import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.telemetry.overflow.counters import LayerOverflow, OperandCounts
from megalowbit.telemetry.sinks.jsonl import JsonlSink, LayerTableSink, json_ready, missing_steps


def strict(line):
    """Parse as a parser does that knows no NaN."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def records(path):
    return [strict(line) for line in path.read_text().splitlines()]


def write_steps(path, steps, **arguments):
    sink = JsonlSink(path, **arguments)
    for step in steps:
        sink.write(step, {"loss": step / 7, "overflow": None, "name": "größe"})
    sink.close()


def test_each_step_is_one_whole_object(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write_steps(path, [1, 2, 3])
    assert records(path) == [{"step": s, "loss": s / 7, "overflow": None, "name": "größe"} for s in (1, 2, 3)]


def test_lines_are_on_disk_as_soon_as_written(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        sink.write(step, {"loss": 1.0})
        assert [record["step"] for record in records(tmp_path / "metrics.jsonl")][-1] == step
    sink.close()


def test_nan_and_infinity_stay_valid_json_and_are_not_lost(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": math.nan, "grad_norm": -math.inf, "lr": 0.5})
    sink.close()
    assert records(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "loss": None,
            "grad_norm": None,
            "lr": 0.5,
            "nonfinite": {"loss": "nan", "grad_norm": "-inf"},
        }
    ]


@given(
    st.dictionaries(
        st.text(max_size=9), st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
    )
)
def test_any_facts_come_back_from_strict_json(facts):
    ready = strict(json.dumps(json_ready(facts), allow_nan=False))
    strange = ready.pop("nonfinite", {}) if "nonfinite" not in facts else {}
    for name, value in facts.items():
        if isinstance(value, float) and not math.isfinite(value) and name != "nonfinite":
            assert ready[name] is None
            if strange:
                assert strange[name] == str(value)
        elif name != "nonfinite":
            assert ready[name] == value


def test_a_resumed_run_drops_later_steps_and_continues(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 9))
    write_steps(path, range(6, 11), resume_step=5)
    assert [record["step"] for record in records(path)] == list(range(1, 11))


def test_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-9])
    write_steps(path, [3, 4], resume_step=2)
    assert [record["step"] for record in records(path)] == [1, 2, 3, 4]


def test_a_last_line_torn_inside_a_character_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1])
    path.write_bytes(path.read_bytes() + '{"step": 2, "name": "ö'.encode()[:-1])
    write_steps(path, [2], resume_step=1)
    assert [record["step"] for record in records(path)] == [1, 2]


def test_a_run_resumed_from_its_start_begins_with_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    write_steps(path, [1], resume_step=0)
    assert [record["step"] for record in records(path)] == [1]


def test_a_killed_run_resumes_with_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys, pathlib; from megalowbit.telemetry.sinks.jsonl import JsonlSink\n"
        "sink = JsonlSink(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1, 8): sink.write(step, {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[3])
    assert done.returncode == -signal.SIGKILL
    write_steps(path, range(5, 9), resume_step=4)
    assert [record["step"] for record in records(path)] == list(range(1, 9))


def test_a_new_run_never_writes_into_an_old_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1])
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl already holds a run: choose another --run-dir"):
        JsonlSink(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damaged", ["{not json}", "[1]", '{"loss": 1}', '{"step": "first"}', '{"step": null}']
)
def test_a_damaged_line_in_the_middle_is_named_and_the_file_left_alone(tmp_path, damaged):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is damaged"):
        JsonlSink(path, resume_step=3)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_step_cannot_come_twice(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(4, {})
    with pytest.raises(ValueError, match="step 4 comes after step 4: steps ascend"):
        sink.write(4, {})


def test_the_table_by_layer_has_one_object_per_layer_and_role(tmp_path):
    path = tmp_path / "overflow_layers.jsonl"
    counts = OperandCounts(elements=10, saturated=1, blocks=1, squared_error=0.0, squared_norm=2.0)
    rows = [LayerOverflow(layer=layer, role="input", counts=counts) for layer in "ab"]
    table = LayerTableSink(path)
    table.write(5, {"loss": 1.0})  # of no concern to it
    table.write_layers(5, rows)
    table.write_layers(10, rows)
    with pytest.raises(ValueError, match="step 10"):
        table.write_layers(10, rows)
    table.close()
    resumed = LayerTableSink(path, resume_step=7)
    resumed.write_layers(10, rows)
    resumed.close()
    written = records(path)
    assert [(r["step"], r["layer"]) for r in written] == [(5, "a"), (5, "b"), (10, "a"), (10, "b")]
    assert written[0]["saturation_rate"] == 0.1
    assert written[0]["saturated"] == 1
    assert written[0]["nonfinite"] == {"snr_db": "inf"}


def test_lost_lines_are_logged_when_a_run_resumes(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 6, 9)))
    JsonlSink(path, resume_step=8).close()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path} lacks lines of steps already trained: 3-5, 7-8; they were lost or removed"
    )
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 6]


def test_complete_records_give_no_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    for resume_step in (2, 0):
        JsonlSink(path, resume_step=resume_step).close()
    JsonlSink(tmp_path / "new.jsonl").close()
    assert not caplog.records


def test_only_the_first_of_many_gaps_are_logged():
    assert missing_steps(set(range(2, 40, 2)), 20) == "1, 3, 5, 7, 9, …"
    assert missing_steps({1, 2, 3}, 3) == ""
    assert missing_steps(set(), 10**5) == "1-100000"
