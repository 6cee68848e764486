"""`megalowbit init`: mistakes, and that it never overwrites; tests/pretrain/estimate has what it chooses."""

import shlex
import subprocess

import pytest

from launchers import check_refusal
from megalowbit.commands.runs import init
from megalowbit.commands.runs.init import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: SIZE; see --help"),
        (["7B"], "unknown size '7B': did you mean"),
        (["124M", "--machine", "8"], "--machine '8' is neither GPUSxGIB nor cpu: write for example 8x80"),
        (["124M", "--machine", "0x80"], "--machine '0x80' is neither GPUSxGIB nor cpu"),
        (["124M", "--machine", "8xH1000"], "unknown target 'H1000': did you mean"),
        (["124M", "--machine", "0xH100"], "--machine '0xH100' is neither GPUSxGIB nor cpu"),
        (["124M", "--machine", "8x80GB"], "--machine '8x80GB' is neither GPUSxGIB nor cpu"),
        (
            ["124M", "--out", "taken"],
            "taken exists already and is never overwritten",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    code = main(arguments)
    printed = capsys.readouterr()
    check_refusal(subprocess.CompletedProcess(arguments, code, printed.out, printed.err), message)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_machine_may_be_named_by_the_kind_of_its_gpus():
    assert [init._numbers_of(each) for each in ("8xH100", "4xgb200", "8x80", "8xA100-40GB")] == [
        (8, 79.1, False),
        (4, 184.0, False),
        (8, 80.0, False),
        (8, 39.3, False),
    ]


def test_it_writes_a_folder_and_says_what_it_chose(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["0.8M", "--machine", "cpu"]) == 0
    folder = tmp_path / "megalowbit-0.8M"
    assert {path.name for path in folder.iterdir()} == {"run.json", "model.json", "README.md"}
    line = capsys.readouterr().out
    assert line.startswith("megalowbit-0.8M/run.json: 0.8M on CPUs with ")
    assert "ZeRO stage 0, micro-batch 4" in line


def test_the_commands_of_the_page_work_where_the_user_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["0.8M", "--machine", "cpu", "--out", "my runs/first"]) == 0
    page = (tmp_path / "my runs" / "first" / "README.md").read_text()
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("megalowbit pretrain")]
    assert len(commands) == 2
    for words in commands:
        assert words[words.index("--ds-config") + 1] == "my runs/first/run.json"
        assert (tmp_path / words[words.index("--ds-config") + 1]).is_file()
