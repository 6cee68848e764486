"""`telemetry.count_every`: which steps are counted, and what the others show."""

import json
import shutil

import pytest

from launchers import SPEEDS
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.pretrain.components.overflow_counts import OverflowCounts, is_counted
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.run import pretrain
from megalowbit.quantize import backends

STEPS = 7
LENGTH = f"megalowbit.run.steps={STEPS}"
EVERY = "megalowbit.telemetry.count_every=3"


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)


def counted(fields):
    return {name for name in fields if name.startswith(("gradient_overflow/", "quantization/"))}


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6]), (10, [1]), (7, [1, 7])]
)
def test_the_first_step_and_each_multiple_are_counted(every, steps):
    assert [step for step in range(1, STEPS + 1) if is_counted(step, every)] == steps


def test_figures_are_those_of_counted_steps_and_left_out_elsewhere(resolve, tmp_path, capsys):
    run(resolve(LENGTH, "megalowbit.telemetry.count_every=1"), tmp_path / "all")
    capsys.readouterr()
    run(resolve(LENGTH, EVERY), tmp_path / "some")
    every, some = rows(tmp_path / "all"), rows(tmp_path / "some")
    assert [row["loss"] for row in some] == [row["loss"] for row in every]
    assert [row["step"] for row in some if counted(row)] == [1, 3, 6]
    known = [row for row in some if counted(row)]
    totals = {"gradient_overflow/total_overflow_elements", "gradient_overflow/total_elements"}
    totals |= {"gradient_overflow/counted_steps"}
    for row in known:
        expected = every[row["step"] - 1]
        assert counted(row) == counted(expected)
        assert {name: row[name] for name in counted(row) - totals} == {
            name: expected[name] for name in counted(row) - totals
        }
    assert [row["gradient_overflow/counted_steps"] for row in known] == [1, 2, 3]
    elements = every[0]["gradient_overflow/total_elements"]
    assert [row["gradient_overflow/total_elements"] for row in known] == [elements * n for n in (1, 2, 3)]

    summary = json.loads((tmp_path / "some" / "summary.json").read_text())
    rates = [row["gradient_overflow/element_overflow_rate"] for row in known]
    assert summary["gradient_overflow/element_overflow_rate"] == pytest.approx(sum(rates) / 3)
    assert summary["gradient_overflow/counted_steps"] == 3
    output = capsys.readouterr().out
    assert "quantised output gradients, over 3 counted steps" in output
    lines = [line.split() for line in output.splitlines() if f"/{STEPS} " in line and "nan" not in line]
    lines = {int(words[0].split("/")[0]): words for words in lines if words[0][0].isdigit()}
    assert [step for step in sorted(lines) if "%" in lines[step][6]] == [1, 3, 6]
    assert {lines[step][6] for step in (2, 4, 5, 7)} == {"-"}
    table = rows(tmp_path / "some", "overflow_layers.jsonl")
    assert {row["elements"] for row in table if row["role"] == "weight"} == {
        3 * row["elements"] // 7
        for row in rows(tmp_path / "all", "overflow_layers.jsonl")
        if row["role"] == "weight"
    }


@pytest.mark.slow
def test_a_run_resumed_within_an_interval_counts_the_same_steps(resolve, tmp_path):
    config = resolve(LENGTH, EVERY, "megalowbit.checkpoint.every=2", "megalowbit.checkpoint.keep=null")
    run(config, tmp_path / "whole")
    for saved in (2, 4):
        folder = tmp_path / f"from-{saved}"
        shutil.copytree(tmp_path / "whole", folder)
        for path in (folder / "checkpoints").glob("step-*"):
            if int(path.name[-8:]) > saved:
                shutil.rmtree(path)
        for name in ("DONE", "summary.json"):
            (folder / name).unlink()
        run(config, folder, is_resume=True)
        timed = {*SPEEDS, "seconds"}
        for name in ("metrics.jsonl", "overflow_layers.jsonl"):
            found, expected = rows(folder, name), rows(tmp_path / "whole", name)
            assert [{k: v for k, v in row.items() if k not in timed} for row in found] == [
                {k: v for k, v in row.items() if k not in timed} for row in expected
            ]
        summaries = [json.loads((each / "summary.json").read_text()) for each in (folder, tmp_path / "whole")]
        assert len({row["gradient_overflow/total_overflow_elements"] for row in summaries}) == 1
        assert {row["gradient_overflow/counted_steps"] for row in summaries} == {3}


def test_kernels_count_in_counted_steps_only(build_job, monkeypatch):
    job = build_job(EVERY)
    counts, asked, encode = job.find(OverflowCounts), [], backends.encode

    def noting(request):
        asked.append(request.with_counts)
        return encode(request)

    monkeypatch.setattr(backends, "encode", noting)
    found = []
    for step in range(4):
        counts.before_step(step)
        asked.clear()
        train_step(job)
        found.append(sum(asked))
        layers = bit_layers(job.engine.module).values()
        assert {layer.observer for layer in layers} == {job.tracker if counts.is_counting else None}
    # 7 layers: input and output gradient in two micro-batches each, and the weight, which is cached, once
    assert found == [7 * 5, 0, 7 * 5, 0]


def test_a_checkpoint_of_an_earlier_version_had_counted_every_step(build_job, tmp_path):
    job = build_job()
    for _ in range(3):
        train_step(job)
    state = job.tracker.state_dict()
    assert state.pop("counted_steps") == 3
    counts = job.find(OverflowCounts)
    counts.load_state_dict(state, step=3, source=tmp_path)
    assert job.tracker.counted_steps == 3
    train_step(job)
    assert job.tracker.state_dict()["counted_steps"] == 4
