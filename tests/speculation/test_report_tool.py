import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest
from forks import run_script
from quick_cases import slow_except
from run_files import made_up_rows, write_run

from launchers import check_refusal
from megalowbit.speculation.reports.history import read_history, table

ROOT = Path(__file__).parents[2]


DOCUMENTED = re.findall(
    r"^python (tools/\S+) (.+)$", (ROOT / "docs" / "speculation.md").read_text(), re.MULTILINE
)


def report(*arguments, path=ROOT):
    env = {**os.environ, "PYTHONPATH": str(path)}
    return run_script(ROOT / "tools" / "speculation_report.py", *arguments, env=env)


def test_it_prints_the_table_and_draws_the_picture(tmp_path):
    run = write_run(tmp_path / "run", list(made_up_rows(["h.0.fc", "h.1.fc"], checks=12)))
    done = report(run, "--picture", tmp_path / "some.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{table(read_history(run))}\npicture: {tmp_path / 'some.png'}\n"
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert report(run).stdout == table(read_history(run)) + "\n"


MISTAKES = [
    (["nowhere"], "nowhere is not a run folder (no config.json)"),
    ([], "the following arguments are required: RUN_DIR; see --help"),
    (["nowhere", "--picture", "some.jpg"], "some.jpg is not a PNG: give a name that ends in .png"),
    (
        ["nowhere", "--picture", "/no/such/x.png"],
        "--picture /no/such/x.png: folder /no/such does not exist: create it, or choose another file",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), slow_except(MISTAKES[:1], MISTAKES))
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    done = report(*arguments)
    check_refusal(done, message)


@pytest.mark.slow
def test_a_picture_makes_no_folders(tmp_path):
    run = write_run(tmp_path / "run", list(made_up_rows(["h.0.fc"], checks=3)))
    check_refusal(
        report(run, "--picture", tmp_path / "a" / "b.png"), f"folder {tmp_path / 'a'} does not exist"
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_without_matplotlib_the_table_and_the_remedy_are_printed(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such thing')")
    run = write_run(tmp_path / "run", list(made_up_rows(["h.0.fc"], checks=3)))
    done = report(run, "--picture", tmp_path / "some.png", path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert done.stdout.strip() == table(read_history(run))
    assert "pip install 'megalowbit[plots]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("program", "arguments"), DOCUMENTED)
def test_documented_commands_parse(program, arguments):
    spec = importlib.util.spec_from_file_location(Path(program).stem, ROOT / program)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    options = tool.build_parser().parse_args(shlex.split(arguments))
    assert getattr(options, "ds_config", None) is None or (ROOT / options.ds_config).exists()


def test_both_tools_are_documented():
    assert {program for program, _ in DOCUMENTED} == {
        "tools/calibrate_speculation.py",
        "tools/speculation_report.py",
    }
