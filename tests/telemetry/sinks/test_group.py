import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalowbit.telemetry.overflow.counters import LayerOverflow, OperandCounts
from megalowbit.telemetry.settings import TensorBoardBlock, WandbSettings
from megalowbit.telemetry.sinks.group import SinkGroup, open_sinks

TABLE = [LayerOverflow(layer="h.0", role="input", counts=OperandCounts(elements=8, saturated=2))]


class Recorder:
    """A sink in memory."""

    def __init__(self, error=None):
        self.written, self.tables, self.closed, self.error = [], [], [], error

    def write(self, step, facts):
        self.written.append((step, dict(facts)))

    def write_layers(self, step, layers):
        self.tables.append((step, layers))

    def close(self, exit_code=0, summary=None):
        self.closed.append((exit_code, summary))
        if self.error:
            raise self.error


def test_a_group_passes_everything_to_each_sink():
    sinks = [Recorder(), Recorder()]
    group = SinkGroup(sinks)
    group.write(1, {"loss": 2.0})
    group.write_layers(1, TABLE)
    group.close(3, {"final_loss": 1.0})
    for sink in sinks:
        assert sink.tables == [(1, TABLE)]
        assert sink.written == [(1, {"loss": 2.0})]
        assert sink.closed == [(3, {"final_loss": 1.0})]


def test_every_sink_is_closed_once_even_if_one_fails():
    failing, after = Recorder(OSError("disk full")), Recorder()
    group = SinkGroup([failing, after])
    with pytest.raises(OSError, match="disk full"):
        group.close()
    group.close()
    assert len(failing.closed) == len(after.closed) == 1


def test_leaving_by_an_exception_closes_with_exit_code_1():
    sink = Recorder()
    with pytest.raises(KeyboardInterrupt), SinkGroup([sink]):
        raise KeyboardInterrupt
    assert sink.closed == [(1, None)]


def test_a_tensor_among_the_facts_is_refused():
    with pytest.raises(TypeError, match="fact 'loss'"):
        SinkGroup([Recorder()]).write(1, {"loss": torch.tensor(1.0)})


def test_the_main_process_writes_all_files_and_others_none(tmp_path):
    for is_main in (False, True):
        with open_sinks(tmp_path, is_main=is_main) as sinks:
            sinks.write(1, {"loss": 1.0})
        assert any(tmp_path.iterdir()) == is_main
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.0}
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_table_by_layer_goes_to_its_own_file_and_its_curves_to_tensorboard(tmp_path):
    with open_sinks(tmp_path, is_main=True) as sinks:
        sinks.write(1, {"loss": 1.0})
        sinks.write_layers(1, TABLE)
    assert [*json.loads((tmp_path / "metrics.jsonl").read_text())] == ["step", "loss"]
    row = json.loads((tmp_path / "overflow_layers.jsonl").read_text())
    assert (row["step"], row["layer"], row["saturated"]) == (1, "h.0", 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("overflow/input/h.0/saturation_rate")] == [0.25]


def test_a_run_that_counts_nothing_has_no_table_by_layer(tmp_path):
    open_sinks(tmp_path, is_main=True, is_overflow=False).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_deepspeeds_blocks_choose_the_sinks(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    block = TensorBoardBlock(enabled=True, output_path=str(tmp_path / "boards"), job_name="night")
    sinks = open_sinks(
        tmp_path / "run",
        is_main=True,
        is_tensorboard=False,
        tensorboard=block,
        wandb=WandbSettings(enabled=True, project="p"),
    )
    sinks.write(1, {"loss": 1.0})
    sinks.close()
    assert list((tmp_path / "boards" / "night").glob("events.*"))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_resumed_run_continues_its_files(tmp_path):
    with open_sinks(tmp_path, is_main=True) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"loss": 1.0})
    with open_sinks(tmp_path, is_main=True, resume_step=2) as sinks:
        sinks.write(3, {"loss": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 1.0), (3, 2.0)]
