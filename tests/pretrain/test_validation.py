"""What one way to a run refuses, all refuse, in the same words."""

import pytest
from bad_values import overrides

from launchers import ROOT, write_config
from megalowbit.errors import UserError, lines_of
from megalowbit.pretrain.command_line import main
from megalowbit.pretrain.sweep import Run
from megalowbit.pretrain.validation import load_checked_config

SUBMIT = ROOT / "launch" / "slurm"


@pytest.fixture
def submit(monkeypatch):
    monkeypatch.syspath_prepend(str(SUBMIT))
    import submit

    return submit


def printed_by(program, arguments, capsys):
    """The mistakes that a command line prints, and its exit code."""
    capsys.readouterr()
    code = program(arguments)
    lines = capsys.readouterr().err.strip().split("\n  - ")
    return code, [line.removeprefix("error: ") for line in (lines[1:] or lines)]


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


@pytest.mark.parametrize(("override", "word"), list(overrides()))
def test_every_way_to_a_run_refuses_a_value_in_the_same_words(
    override, word, config, tmp_path, submit, capsys
):
    run_dir = tmp_path / "run"
    arguments = ["--ds-config", str(config), "--run-dir", str(run_dir), "--set", override]
    with pytest.raises(UserError) as caught:
        load_checked_config(config, [override], world_size=1)
    expected = lines_of(caught.value)
    assert any(word in line for line in expected), expected
    assert all(len(line) < 1500 for line in expected)
    for way in ([], ["--dry-run"], ["--prepare-data"]):
        assert printed_by(main, [*arguments, *way], capsys) == (2, expected), way
    of_cluster = ["--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=1", "--dry-run"]
    assert printed_by(submit.main, [*arguments, *of_cluster], capsys) == (2, expected)
    run = Run(label="x", seed=0, folder=run_dir, config=config, overrides=(override,), program=ROOT)
    with pytest.raises(UserError) as caught:
        run.resolved()
    assert lines_of(caught.value) == expected
    assert not run_dir.exists(), "nothing is written before a configuration is known to be right"
