"""Traces of real runs: which steps, which ranges, how they nest; and results that do not change."""

import gzip
import inspect
import json
from collections import Counter

import pytest
import torch

from launchers import SPEEDS
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.components.profiler import MAX_MEMORY_EVENTS, Profiler, ProfileSettings
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.run import pretrain

STEPS, MICRO_BATCHES = 2, 2
PROFILE = f'megalowbit.profile={{"first_step": 2, "steps": {STEPS}}}'


def metrics_of(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in SPEEDS} for row in rows]


def ranges_of(trace):
    """Ranges that were named by hand, as (name, start, end)."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    return [
        (each["name"], each["ts"], each["ts"] + each["dur"])
        for each in events
        if each.get("cat") == "user_annotation"
    ]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture
def trace(resolve, profiled):
    """The trace of steps 2 and 3 of a run of 4; recorded once."""
    if not (profiled / "run").exists():
        config = resolve("megalowbit.run.steps=4", PROFILE)
        pretrain(config, ProcessIdentity(), run_dir=profiled / "run", is_resume=False)
    return profiled / "run" / "profile" / "steps-2-3-rank-0.trace.json.gz"


def test_a_trace_has_ranges_of_each_phase_and_layer_of_the_chosen_steps(trace):
    counts = Counter(name for name, *_ in ranges_of(trace))
    each_micro_batch = (
        "data", "forward", "backward", "optimizer step", "transformer.wte forward",
        "transformer.h.0 forward", "transformer.h.1 backward", "transformer.h.1.mlp.c_fc forward",
        "transformer.h.1.attn.c_attn backward",
    )  # fmt: skip
    expected = dict.fromkeys(each_micro_batch, STEPS * MICRO_BATCHES)
    assert {name: counts[name] for name in expected} == expected
    assert counts["facts"] == STEPS
    assert "aten::" in trace.with_name("steps-2-3-rank-0.txt").read_text()


def test_ranges_nest(trace):
    found = ranges_of(trace)
    for name, start, end in found:
        parent = name.split(" ")[-1] if name.startswith("transformer.h") else None
        if parent is None:
            continue
        assert any(other == parent and a <= start and end <= b for other, a, b in found), name
        if name.count(".") > 2:  # of a layer: inside its block
            block = ".".join(name.split(".")[:3]) + f" {parent}"
            assert any(other == block and a <= start and end <= b for other, a, b in found), name


def test_the_summary_says_what_its_speeds_count(resolve, tmp_path, capsys):
    config = resolve("megalowbit.run.steps=3", 'megalowbit.profile={"first_step": 2, "steps": 2}')
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    assert "tokens/s and MFU count 2 profiled steps and the writing" in capsys.readouterr().out


@pytest.mark.slow
def test_a_profiled_run_has_the_same_results(trace, resolve, tmp_path):
    pretrain(resolve("megalowbit.run.steps=4"), ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    assert metrics_of(trace.parents[1]) == metrics_of(tmp_path / "run")


def test_a_trace_that_cannot_be_written_is_one_line_and_the_run_goes_on(build_job, tmp_path):
    job = build_job("megalowbit.run.steps=3", 'megalowbit.profile={"first_step": 1, "steps": 1}')
    folder = tmp_path / "run" / "profile"
    folder.write_text("in the way")
    lines = []
    for _ in range(2):
        lines += [each.before_step(job.step) for each in job.components]
        facts = train_step(job).facts
        lines += [line for each in job.components for line in each.after_step(job.step, facts)]
    (found,) = [line for line in lines if line is not None and "profile" in line]
    assert found == f"WARNING: profile of steps 1 to 1 is incomplete: {folder}: File exists"


@pytest.mark.slow
def test_by_default_steps_after_the_warm_up_are_profiled_and_a_short_run_ends_with_them(build_job, tmp_path):
    job = build_job("megalowbit.run.steps=5", 'megalowbit.profile={"steps": 2}')
    for _ in range(5):
        lines = [each.before_step(job.step) for each in job.components]
        facts = train_step(job).facts
        lines += [line for each in job.components for line in each.after_step(job.step, facts)]
        names = sorted(path.name for path in (tmp_path / "run").glob("profile/*"))
    assert names == ["steps-4-5-rank-0.trace.json.gz", "steps-4-5-rank-0.txt"]
    assert any("profile of steps 4 to 5: " in str(line) for line in lines)


@pytest.fixture
def memory_calls(monkeypatch):
    """Calls of torch's private functions that record the allocator, in order; each must fit the real one."""
    memory, calls = torch.cuda.memory, []

    def record(name):
        signature = inspect.signature(getattr(memory, name))
        assert "args" not in signature.parameters  # or anything would fit

        def replacement(*arguments, **named):
            calls.append((name, signature.bind(*arguments, **named).arguments))

        monkeypatch.setattr(memory, name, replacement)

    record("_record_memory_history")
    record("_dump_snapshot")
    return calls


def profile_of_step_2(folder, monkeypatch, **settings):
    """Profile step 2 as on a GPU: the device is there once the profiler, which would need it, has started."""
    profiler = Profiler(
        ProfileSettings(first_step=2, steps=1, **settings), torch.nn.Linear(2, 2), (), folder=folder, rank=3,
        total_steps=4,
    )  # fmt: skip
    profiler.before_step(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert list(profiler.after_step(1, {})) == []
        profiler.before_step(1)
        (line,) = profiler.after_step(2, {})
    return line


def test_the_allocator_is_recorded_in_profiled_steps_only_and_its_history_written(
    memory_calls, tmp_path, monkeypatch
):
    line = profile_of_step_2(tmp_path, monkeypatch)
    stem = f"{tmp_path}/profile/steps-2-2-rank-3"
    assert line.startswith(f"profile of steps 2 to 2: {stem}.trace.json.gz")
    assert memory_calls == [
        ("_record_memory_history", {"max_entries": MAX_MEMORY_EVENTS}),
        ("_dump_snapshot", {"filename": f"{stem}.memory.pickle"}),
        ("_record_memory_history", {"enabled": None}),
    ]


def test_the_allocator_is_no_longer_recorded_after_files_could_not_be_written(
    memory_calls, tmp_path, monkeypatch
):
    (tmp_path / "profile").write_text("in the way")
    assert "is incomplete" in profile_of_step_2(tmp_path, monkeypatch)
    assert memory_calls[1:] == [("_record_memory_history", {"enabled": None})]


def test_the_allocator_is_not_recorded_without_memory(memory_calls, tmp_path, monkeypatch):
    assert "is incomplete" not in profile_of_step_2(tmp_path, monkeypatch, memory=False)
    assert memory_calls == []


def test_steps_that_an_earlier_part_of_the_run_has_trained_are_reported(build_job):
    job = build_job(PROFILE)
    profiler = next(each for each in job.components if each.key == "profile")
    assert "step 2 was trained before" in profiler.before_step(2)
    assert profiler.before_step(3) is None
    assert profiler.after_step(4, {}) == ()


def test_steps_after_the_end_are_rejected(resolve):
    with pytest.raises(UserError, match=r"profile ends with step 8, but megalowbit\.run\.steps is 6"):
        resolve('megalowbit.profile={"first_step": 6}')


@pytest.mark.slow
def test_a_profile_may_be_added_and_removed_when_a_run_is_resumed(resolve, finished):
    for more in ((PROFILE, "megalowbit.run.steps=5"), ("megalowbit.run.steps=6",)):
        pretrain(resolve(*more), ProcessIdentity(), run_dir=finished, is_resume=True)
