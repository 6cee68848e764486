"""`megalowbit evaluate`: mistakes; tests/pretrain/estimate has the losses that it finds."""

import subprocess

import pytest

from launchers import check_refusal
from megalowbit.commands.models.evaluate import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: PATH; see --help"),
        (["nowhere"], "nowhere does not exist: name a run, a checkpoint or a Hugging Face folder"),
        ([".", "--inputs", "some"], "invalid choice: 'some'"),
        ([".", "--forward", "bf16"], "invalid choice: 'bf16'"),
        ([".", "--ds-config", "gpt2_tny"], "no file gpt2_tny, and unknown shipped configuration 'gpt2_tny'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(arguments)
    printed = capsys.readouterr()
    check_refusal(subprocess.CompletedProcess(arguments, code, printed.out, printed.err), message)
