"""`megalowbit report`: where the page is, refusals in one line, spectra."""

import re
import shlex

import pytest
from made_runs import write_run

from launchers import ROOT
from megalowbit.commands.runs.report import build_parser, main


def test_the_page_of_a_run_is_in_its_folder_and_its_path_is_printed(tmp_path, capsys):
    run = write_run(tmp_path / "run", 20)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_need_a_file(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, 20)) for name in "ab"]
    assert main(runs) == 2
    assert capsys.readouterr().err.startswith("error: the page of several runs belongs to none")
    assert main([*runs, "--out", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{run}", "--spectra", "--out", "x.html"], "--spectra shows the weights of one run"),
        (["{run}", "--spectra"], "run/hf does not exist, so there are no final weights"),
        (["{run}/nothing"], "nothing does not exist: name a run folder"),
        ([], "the following arguments are required: RUN; see --help"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, message):
    run = write_run(tmp_path / "run", 20)
    assert main([each.format(run=run) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_documented_commands_have_known_options():
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    commands = re.findall(r"^megalowbit report (.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for each in commands:
        assert build_parser().parse_args(shlex.split(each)).runs
    flags = [flag for action in build_parser()._actions for flag in action.option_strings]
    assert all(f"`{flag}" in page for flag in flags if flag not in ("-h", "--help"))
