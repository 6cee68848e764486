import json
import math
import os
from pathlib import Path

import pytest
import torch

from launchers import write_config
from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.runs import Gap, Run, execute, folder_name, make_folder


@pytest.fixture
def make_run(tmp_path):
    """A run whose program is `source` in a file of its own."""

    def make_run(source, label="some", seed=3, **more):
        program = tmp_path / "launch" / f"{label}.py"
        program.parent.mkdir(exist_ok=True)
        program.write_text(source)
        return Run(
            label=label,
            seed=seed,
            folder=tmp_path / "out" / folder_name(label, seed),
            config=write_config(tmp_path),
            overrides=("megalowbit.run.steps=4", f"megalowbit.run.seed={seed}"),
            program=program,
            **more,
        )

    return make_run


def recorded(run, losses, skips=None):
    """Write what a run with these losses would have left."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.json").write_text(json.dumps(run.resolved().to_dict()))
    rows = [
        {"step": step, "loss": loss, "skipped_steps": 0 if skips is None else skips[step - 1]}
        for step, loss in enumerate(losses, start=1)
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_gaps_are_paired_by_seed():
    peers = {1: 2.0, 2: 3.0, 3: 2.5}
    gap = Gap.between({1: 2.3, 2: 3.1, 3: 2.6}, peers)  # gaps of 0.3, 0.1 and 0.1
    assert gap.mean == pytest.approx(0.5 / 3)
    assert gap.half_width == pytest.approx(4.303 * (0.04 / 9) ** 0.5, rel=1e-4)  # t of two degrees of freedom
    assert math.isnan(Gap.between({1: 2.3}, {1: 2.0}).half_width)
    assert math.isnan(Gap.between({1: 2.3, 2: math.nan, 3: 2.6}, peers).mean)


def test_the_program_gets_its_overrides_one_thread_and_no_ranks(make_run, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = (
        "import json, os, sys\nfrom pathlib import Path\n"
        "folder = Path(sys.argv[sys.argv.index('--run-dir') + 1])\n"
        "import megalowbit\n"  # found by the path, whatever the working directory
        "folder.mkdir(exist_ok=True)\n"
        "seen = {'arguments': sys.argv[1:], 'threads': os.environ['OMP_NUM_THREADS'],\n"
        "        'ranks': [name for name in ('RANK', 'WORLD_SIZE') if name in os.environ]}\n"
        "(folder / 'seen.json').write_text(json.dumps(seen))\n"
    )
    run = make_run(source)
    execute([run], jobs=1)
    seen = json.loads((run.folder / "seen.json").read_text())
    assert seen["arguments"] == [
        *("--ds-config", str(run.config), "--run-dir", str(run.folder), "--resume", "auto"),
        *("--set", "megalowbit.run.steps=4", "--set", "megalowbit.run.seed=3"),
    ]
    assert seen["threads"] == "1"
    assert seen["ranks"] == []
    assert capsys.readouterr().out.startswith("  [1/1] some, seed 3: ")


def test_a_run_that_fails_ends_the_sweep_with_its_last_line(make_run):
    bad = make_run("print('x'); raise SystemExit('error: no such corpus')", label="bad, 1 % off")
    marker = bad.program.parent / "marker"
    later = [make_run(f"open({str(marker)!r}, 'a').write('x')", label=f"later {n}") for n in range(8)]
    with pytest.raises(UserError) as caught:
        execute([bad, *later], jobs=1)
    log = bad.folder.parent / "bad-1-off-seed-3.log"
    assert str(caught.value) == f"bad, 1 % off, seed 3, failed: no such corpus (full log: {log})"
    assert log.read_text() == "x\nerror: no such corpus\n"
    assert not marker.exists() or len(marker.read_text()) < len(later)


def test_a_folder_is_complete_with_all_its_steps_and_refused_with_other_settings(make_run):
    run = make_run("")
    assert not run.is_complete()
    recorded(run, [3.0, 2.0])
    assert not run.is_complete()
    recorded(run, [3.0, 2.0, 1.0, 1.5])
    (run.folder / "summary.json").write_text('{"steps": 4}')
    assert run.is_complete()
    assert run.final_loss(2) == 1.25
    other = Run(**{**vars(run), "overrides": (*run.overrides, "megalowbit.recipe=bf16")})
    with pytest.raises(UserError, match="seed-3 contains a run with other settings: choose another --out"):
        other.is_complete()


@pytest.fixture
def finished(make_run):
    """A finished run whose model and text are files in `folder`."""
    run = make_run("")
    run.execute()
    recorded(run, [3.0, 2.0, 1.0, 1.5])
    (run.folder / "summary.json").write_text('{"steps": 4}')
    assert run.is_complete()
    assert run.begun_with().torch == torch.__version__
    return run


def test_a_run_of_another_model_is_refused(finished):
    path = Path(finished.resolved().to_dict()["megalowbit"]["model"]["config"])
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_head": 4}))
    with pytest.raises(
        UserError, match=r"a run with another model\.n_head: it was 2 and is 4 now: restore it, or"
    ):
        finished.is_complete()


def test_a_run_on_another_text_is_refused(finished):
    path = Path(finished.resolved().settings.data.corpus)
    path.write_text(path.read_text() + "More.\n")
    with pytest.raises(UserError, match=r"a run with another text: it was '.*' and is '.*' now: restore it"):
        finished.is_complete()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"made_with": {"torch": "2.4.0"}}, r"was made with torch 2\.4\.0, and .* is installed: install 2"),
        ({"contents": {"recipe": {"keep_last": 1}}}, r"another recipe\.keep_last: it was 1 and is 0 now"),
    ],
)
def test_a_run_of_another_version_or_recipe_is_refused(finished, changes, message):
    path = finished.folder / "begun.json"
    path.write_text(json.dumps(merged(json.loads(path.read_text()), changes)))
    with pytest.raises(UserError, match=message):
        finished.is_complete()


def merged(before, changes):
    if not isinstance(changes, dict):
        return changes
    return {**before, **{key: merged(before.get(key), value) for key, value in changes.items()}}


def test_a_run_of_an_earlier_version_without_that_record_counts(finished):
    (finished.folder / "begun.json").unlink()
    assert finished.is_complete()
    assert finished.begun_with() is None


def test_a_damaged_record_of_the_begin_is_named(finished):
    (finished.folder / "begun.json").write_text('{"made_with": 3}')
    with pytest.raises(
        UserError, match=r"begun\.json is damaged \(it does not say what the run was made with\)"
    ):
        finished.is_complete()


def test_a_run_that_ends_without_learning_has_diverged(make_run):
    run = recorded(make_run(""), [3.0, 2.0, None, None], skips=[0, 0, 1, 2])
    assert run.diverged_at() == 3
    assert math.isnan(run.final_loss(2))
    run = recorded(make_run(""), [3.0, None, 2.0, 1.0], skips=[0, 1, 1, 1])
    assert run.diverged_at() is None
    assert run.final_loss(3) == 1.5
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn
    assert run.losses() == [3.0, None, 2.0, 1.0]


def row(step, **more):
    return json.dumps({"step": step, "loss": 2.0, "skipped_steps": 0, **more}) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", "{", "it is not JSON"),
        ("config.json", "", "it is not JSON"),
        ("config.json", "[" * 100_000, "it is nested too deeply"),
        ("config.json", "[1]", "it is not an object"),
        ("config.json", b"\xff", "it is not UTF-8 text"),
        ("summary.json", '{"steps"', "it is not JSON"),
        ("summary.json", f'{{"steps": {"1" * 5000}}}', "it holds an integer of thousands of digits"),
        ("summary.json", "4", "it is not an object"),
        ("metrics.jsonl", row(1) + "{\n", "line 2 is not an object"),
        ("metrics.jsonl", row(1) + "\n", "line 2 is not an object"),
        ("metrics.jsonl", "3\n", "line 1 is not an object"),
        ("metrics.jsonl", row(1, loss="2"), "line 1 has no loss"),
        ("metrics.jsonl", row(1, loss=math.nan), "line 1 has no loss"),
        ("metrics.jsonl", row(1, loss=10**400), "line 1 has no loss"),
        ("metrics.jsonl", '{"step": 1, "skipped_steps": 0}\n', "line 1 has no loss"),
        ("metrics.jsonl", row(1, skipped_steps=None), "line 1 has no skipped_steps"),
        ("metrics.jsonl", row(1) + row(3), "line 2 is not that of step 2"),
        ("metrics.jsonl", row(1) + row(2), "it does not end with step 4, as summary.json says"),
        ("metrics.jsonl", "", "it does not end with step 4, as summary.json says"),
    ],
)
def test_a_damaged_file_is_named_with_the_folder_to_remove(make_run, name, content, reason):
    run = recorded(make_run(""), [3.0, 2.0, 1.0, 1.5])
    (run.folder / "summary.json").write_text('{"steps": 4}')
    assert run.is_complete()
    (run.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        run.is_complete()
    assert str(caught.value) == (
        f"{run.folder / name} is damaged ({reason}): "
        f"remove that run's folder, {run.folder}, to repeat the run"
    )


def test_a_pipe_in_place_of_the_records_is_refused(make_run):
    run = recorded(make_run(""), [3.0, 2.0])
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged \(it is not a regular file\)"):
        run.rows()


def test_a_record_without_a_loss_is_not_a_result(make_run):
    run = recorded(make_run(""), [])
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged \(it has no loss\)"):
        run.final_loss(2)


def test_a_folder_is_made_or_refused_in_one_line(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("x")
    for out in (Path("/proc/foo"), Path("/proc"), tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"^--out {out} is not a writable folder .*: choose"):
            make_folder(out)
    assert (tmp_path / "file").read_text() == "x"
