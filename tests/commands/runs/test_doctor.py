"""The command line of `megalowbit doctor`."""

import json
import os
import subprocess
import sys

import pytest

from launchers import BIN, ROOT, check_refusal, environment, write_config
from megalowbit.commands.runs.doctor import build_parser, main


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--assume-mfu", "35", "--ds-config", "X"],
            "must be at least 0.0001 and at most 1; 35 % is 0.35",
        ),
        (["--assume-mfu", "nan", "--ds-config", "X"], "--assume-mfu nan must be"),
        (["--assume-mfu", "0", "--ds-config", "X"], "--assume-mfu 0 must be"),
        (["--assume-mfu", "1e-300", "--ds-config", "X"], "--assume-mfu 1e-300 must be at least 0.0001"),
        (["--processes", "0", "--ds-config", "X"], "--processes 0 must be at least 1"),
        (["--target", "h100"], "--target is about a run: name its configuration with --ds-config"),
        (["--set", "a=1"], "--set is about a run"),
        (["--target", "h101", "--ds-config", "X"], "unknown target 'h101': did you mean 'h100'"),
        (["--json", "/nowhere/out.json"], "--json '/nowhere/out.json' is in no folder that exists"),
        (["--json", "/"], "--json / is a folder: name a file"),
        (["--json", "PIPE"], "is not a regular file: name another"),
        (["--ds-config", "gpt2_tiny_fp5"], "did you mean 'gpt2_tiny_fp4'"),
        (["--ds-config", "nowhere.json"], "nowhere.json"),
        (["--assume-mfu", "x"], "invalid float value: 'x'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys, monkeypatch, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(
        "megalowbit.commands.runs.doctor._together", lambda *_: pytest.fail("refused too late")
    )
    code = main([str(pipe) if word == "PIPE" else word for word in words])
    assert pipe.is_fifo()
    printed = capsys.readouterr()
    check_refusal(subprocess.CompletedProcess(words, code, printed.out, printed.err), message)


def test_a_mistake_in_the_configuration_is_exit_code_2(tmp_path, capsys):
    path = write_config(tmp_path)
    assert main(["--ds-config", str(path), "--set", "megalowbit.run.stepz=3"]) == 2
    assert "unknown key 'megalowbit.run.stepz'" in capsys.readouterr().err
    assert main(["--ds-config", str(path), "--processes", "1000000000", "--no-measurements"]) == 2
    assert "1,000,000,000 processes are not supported: at most 1,048,576" in capsys.readouterr().err
    assert main(["--ds-config", str(path), "--no-measurements", "--set", "megalowbit.recipe=nvfp5"]) == 2
    assert "unknown recipe 'nvfp5'" in capsys.readouterr().err


def test_a_fine_run_and_one_that_does_not_fit(tmp_path, capsys):
    path = write_config(tmp_path)
    words = ["--ds-config", str(path), "--target", "h100", "--processes", "2", "--no-measurements"]
    assert main([*words, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["run"]["processes"], report["target"]["name"]) == ("fine", 2, "h100")
    file = tmp_path / "doctor.json"
    refused = 'megalowbit.recipe={"base": "nvfp4", "layout": "per_gemm", "gemm": "fp4"}'
    assert main([*words, "--set", refused, "--json", str(file)]) == 1
    assert "doctor: 1 problem (gemm-units)" in capsys.readouterr().out
    assert [each["code"] for each in json.loads(file.read_text())["findings"]][:1] == ["gemm-units"]
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_slow_parts_are_announced_on_a_terminal_only(tmp_path, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    words = ["--ds-config", str(write_config(tmp_path)), "--target", "h100", "--no-measurements"]
    assert main([*words, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "fine"
    for line in ("start     looking at software", "start     building the model without weights"):
        assert (line in printed.err) == is_terminal


def test_every_target_is_named_in_the_help():
    from megalowbit.doctor.target import TARGETS

    text = build_parser().format_help()
    assert all(name in text for name in TARGETS)


def under_torchrun(folder, *words):
    """Two ranks of the command."""
    command = [str(BIN / "torchrun"), "--nproc-per-node=2", "--standalone", "-m", "megalowbit", "doctor"]
    env = {**environment(folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *words], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("more", "code"), [([], 0), (["--set", "megalowbit.watchdog.timeout=null"], 0)])
def test_under_torchrun_rank_0_prints_one_report(tmp_path, more, code):
    words = ["--ds-config", str(write_config(tmp_path)), "--json", str(tmp_path / "out.json"), *more]
    done = under_torchrun(tmp_path, *words)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("== hosts") == 1
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["network"]["ranks"] == report["run"]["processes"] == report["hosts"][0]["ranks"] == 2
    codes = [each["code"] for each in report["findings"]]
    assert ("watchdog-off" in codes) == bool(more)


@pytest.mark.slow
def test_under_torchrun_problems_end_with_exit_code_1(tmp_path):
    words = ["--ds-config", str(write_config(tmp_path)), "--target", "a100", "--no-measurements"]
    refused = 'megalowbit.recipe={"base": "nvfp4", "layout": "per_gemm", "gemm": "fp4"}'
    done = under_torchrun(tmp_path, *words, "--set", refused)
    assert done.returncode == 1
    assert "doctor: 1 problem (gemm-units)" in done.stdout
