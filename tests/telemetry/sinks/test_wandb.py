import json
import math
import struct
import sys
import time
import warnings

import pytest

from megalowbit.errors import UserError
from megalowbit.telemetry.media import Histogram, TextSample
from megalowbit.telemetry.overflow.counters import LayerOverflow, OperandCounts
from megalowbit.telemetry.settings import WandbSettings
from megalowbit.telemetry.sinks.wandb import WandbSink

SETTINGS = WandbSettings(enabled=True, project="tiny", group="night", team=None)
BLOCK = 32768  # of the log format: a chunk's seven-byte head never straddles two
HEAD = struct.Struct("<IHB")  # checksum, length, kind


def payloads(data):
    """Messages of a `.wandb` file: chunks of kind whole (1), first (2), middle (3), last (4)."""
    assert b":W&B".startswith(data[:4])
    at, parts = 7, []
    while at + HEAD.size <= len(data):
        room = BLOCK - at % BLOCK
        _, length, kind = HEAD.unpack_from(data, at)
        if room < HEAD.size or kind == 0:
            at += room
            continue
        at += HEAD.size
        if at + length > len(data):
            return  # still being written
        parts.append(data[at : at + length])
        at += length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


class OfflineRun:
    """What an offline run left on disk."""

    def __init__(self, path):
        from wandb.proto import wandb_internal_pb2

        self.history, self.summary, self.config, self.run, self.exit_code = [], {}, {}, None, None
        self.artifacts = []
        for payload in payloads(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.history.append(as_dict(record.history.item))
            elif kind == "summary":
                self.summary |= as_dict(record.summary.update)
            elif kind == "run":
                self.run = record.run
                self.config |= as_dict(record.run.config.update)
            elif kind == "artifact":
                self.artifacts.append(record.artifact)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def as_dict(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline_runs(run_dir):
    """All offline runs below `run_dir`, once W&B's service, which lags behind `finish`, is done with them."""
    deadline = time.monotonic() + 240
    while True:
        runs = [OfflineRun(path) for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))]
        if all(run.exit_code is not None for run in runs) or time.monotonic() > deadline:
            return runs
        time.sleep(0.05)


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    """A machine on which nobody has logged in to W&B or chosen a mode."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))  # of artifacts; else in the home
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_account")
def test_without_an_account_a_whole_run_is_kept_offline(tmp_path, capfd):
    sink = WandbSink(tmp_path, SETTINGS, run_name="gpt2", config={"megalowbit": {"recipe": "nvfp4"}})
    rate = "gradient_overflow/element_overflow_rate"
    for step in (1, 2, 3):
        sink.write(step, {"loss": 6 / step, rate: None if step == 2 else 0.5, "grad_norm": math.inf})
    sink.close(exit_code=0, summary={"final_loss": 2.0, "best_loss": None})
    (run,) = offline_runs(tmp_path)
    assert [(row["_step"], row["train/loss"]) for row in run.history] == [(1, 6), (2, 3), (3, 2)]
    assert [row.get(rate) for row in run.history] == [0.5, None, 0.5]
    assert run.summary["final_loss"] == 2.0
    assert run.config["megalowbit"] == {"recipe": "nvfp4"}
    assert (run.run.project, run.run.run_group, run.run.display_name) == ("tiny", "night", "gpt2")
    assert run.exit_code == 0
    assert capfd.readouterr() == ("", ""), "W&B talks into the console"


@pytest.mark.usefixtures("no_account")
def test_curves_by_layer_stand_beside_the_facts_of_their_step(tmp_path):
    counts = OperandCounts(elements=8, saturated=2)
    sink = WandbSink(tmp_path, SETTINGS)
    for step in (1, 2):
        sink.write(step, {"loss": float(step)})
        if step == 2:
            sink.write_layers(step, [LayerOverflow(layer="h.0.mlp", role="input", counts=counts)])
    sink.close()
    (run,) = offline_runs(tmp_path)
    tag = "overflow/input/h.0.mlp/saturation_rate"
    assert [(row["train/loss"], row.get(tag)) for row in run.history] == [(1, None), (2, 0.25)]
    assert "overflow/input/h.0.mlp/snr_db" not in run.history[1]  # nothing to rate


@pytest.mark.usefixtures("no_account")
def test_media_former_names_and_the_report_are_kept(tmp_path):
    (tmp_path / "report.html").write_text("<p>the report</p>")
    sink = WandbSink(tmp_path, SETTINGS, with_former_names=True)
    sink.write(1, {"loss": 2.0})
    counts = Histogram(name="max/h.0", edges=(0.0, 1.0, 2.0), counts=(3, 4))
    sink.write_media(1, [counts, TextSample(number=1, prompt="Once", text=" upon")])
    sink.write_files([tmp_path / "report.html"])
    assert sink.is_on
    sink.close()
    (run,) = offline_runs(tmp_path)
    (row,) = run.history
    assert row["train/loss"] == row["loss"] == 2.0
    assert [row[f"histograms/max/h.0/{name}"] for name in ("values", "bins")] == [[3, 4], [0, 1, 2]]
    tables = [
        json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    ]
    assert tables == [{"columns": ["number", "prompt", "text"], "data": [[1, "Once", " upon"]]}]
    kept = {each.type: [entry.path for entry in each.manifest.contents] for each in run.artifacts}
    assert kept["report"] == ["report.html"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_account")
def test_a_resumed_run_keeps_its_id_and_a_failed_one_its_exit_code(tmp_path):
    for exit_code, steps in ((1, (1, 2)), (0, (2, 3))):
        sink = WandbSink(tmp_path, SETTINGS)
        for step in steps:
            sink.write(step, {"loss": 1.0})
        sink.close(exit_code=exit_code)
        time.sleep(1.1)  # W&B names its folder by the second
    first, second = offline_runs(tmp_path)
    assert first.run.run_id == second.run.run_id == (tmp_path / "wandb" / "run_id").read_text().strip()
    assert (first.exit_code, second.exit_code) == (1, 0)


def write_and_close(sink):
    sink.write(5, {"loss": 1.0})
    sink.close()


def test_a_failing_start_warns_once_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    with pytest.warns(RuntimeWarning, match="W&B failed and is off for the rest of this run"):
        sink = WandbSink(tmp_path, SETTINGS)
    assert not sink.is_on
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_and_close(sink)


@pytest.mark.usefixtures("no_account")
def test_a_failure_in_mid_run_warns_once_and_training_goes_on(tmp_path):
    sink = WandbSink(tmp_path, SETTINGS)
    sink.write(1, {"loss": 1.0})
    sink._run.finish()  # its service is gone
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl has everything"):
        sink.write(2, {"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_and_close(sink)


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'megalowbit\[wandb\]', or set wandb.enabled=false"):
        WandbSink(tmp_path, SETTINGS)


@pytest.mark.usefixtures("no_account")
def test_a_choice_of_mode_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = WandbSink(tmp_path, SETTINGS)
    sink.write(1, {"loss": 1.0})
    sink.close()
    assert offline_runs(tmp_path) == []
