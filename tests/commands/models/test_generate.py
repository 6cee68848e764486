"""`megalowbit generate`: mistakes; tests/pretrain/estimate has what it writes."""

import subprocess

import pytest

from launchers import check_refusal
from megalowbit.commands.models.generate import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder: name a run"),
        (["."], '. has no tokenizer: name "byte" or a folder with --tokenizer'),
        ([".", "--max-tokens", "0"], "--max-tokens 0 is less than 1"),
        ([".", "--temperature", "0"], "--temperature 0 is not above 0: raise it, or give --greedy"),
        ([".", "--temperature", "1", "--greedy"], "not allowed with argument"),
        ([".", "--seed", "-1"], "--seed -1 is not between"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(arguments)
    printed = capsys.readouterr()
    check_refusal(subprocess.CompletedProcess(arguments, code, printed.out, printed.err), message)
