"""What single steps of the first GPU hour write, with planted times and programs."""

import warnings

import torch

from benchmarks.first_hour import host_reads, layer
from benchmarks.first_hour import run as run_step
from benchmarks.first_hour.session import Session
from benchmarks.timing import Times


def test_the_note_of_a_layers_speed_has_the_medians_of_which_the_ratio_is_made(tmp_path, monkeypatch):
    times = Times([layer.PEER, *layer.RECIPES])
    for name in times:
        times[name] = [0.001, 0.008, 0.036] if name == layer.PEER else [0.003, 0.016, 0.099]
    monkeypatch.setattr(Session, "time", lambda *_: times)
    found = next(layer.speed(Session(tmp_path, "cpu", "cpu"), layer.CPU_SHAPES[0]))
    assert found.value == 2.75  # 0.099 / 0.036, the median of 3, 2 and 2.75
    assert found.note == "16.000 ms, bf16 8.000 ms (medians)"


def test_the_log_of_a_step_names_those_of_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_step, "ROOT", tmp_path)
    monkeypatch.setattr(run_step.sys, "executable", "/bin/true")
    run_step.pretrain(tmp_path / "nvfp4", 1)
    assert capsys.readouterr().out == f"nvfp4: its progress is in {tmp_path / 'nvfp4.log'}\n"


def test_only_synchronising_calls_count_as_waits(monkeypatch, capsys):
    for name in ("synchronize", "get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)

    def step():
        notice = "is a prototype feature and does not yet detect all synchronizing operations"  # torch's own
        warnings.warn(f"Synchronization debug mode {notice}", stacklevel=2)
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    assert host_reads.waits(step) == 2
    assert capsys.readouterr().out.count("called a synchronizing CUDA operation") == 2
