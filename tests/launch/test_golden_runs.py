"""Golden runs detect a change and nothing else; the names of a run's outputs are unchanged."""

import json

import pytest
from forks import run_script

from launchers import ROOT

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests" / "launch" / "golden_runs.py"
NAMES = PROGRAM.with_name("golden_names.json")
ONE = ("--only", "fp32")


def golden(*arguments):
    return run_script(PROGRAM, *arguments)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden") / "recorded"
    done = golden("record", folder, *ONE)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_same_version_shows_no_difference(recorded):
    done = golden("compare", recorded)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["fp32: no differences", "no differences in 1 runs"]


@pytest.mark.slow
def test_another_seed_differs_in_losses_and_tensors(recorded):
    done = golden("compare", recorded, "--set", "megalowbit.run.seed=7")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "run: config.json/megalowbit/run/seed: 1234 → 7" in lines
    for name in (
        "metrics.jsonl/loss",
        "step-00000002/mp_rank_00_model_states.pt/module/transformer.wte.weight",
    ):
        assert any(line.startswith(f"run: {name}: ") for line in lines), name
    # a checkpoint of another seed is refused
    assert "afterwards: again-0/exit code: 0 → 2" in lines


def check_names(found, *only):
    done = golden("names", found, *only)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(NAMES.read_text()), json.loads(found.read_text())


def test_names_of_metrics_files_and_checkpoint_entries_are_unchanged(tmp_path):
    """What users and programs read by name; an intended change is recorded with `golden_runs.py names`."""
    expected, found = check_names(tmp_path / "names.json", "--only", "tables")
    assert sorted(found["every run"]) == sorted(expected["every run"] + expected["tables"])


@pytest.mark.slow
def test_names_are_unchanged_in_all_runs(tmp_path):
    expected, found = check_names(tmp_path / "names.json")
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name
