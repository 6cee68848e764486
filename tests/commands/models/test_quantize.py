"""The command line of the package: what does not fit is refused in one line."""

import pytest

from megalowbit.commands.table import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "is not a folder"),
        (["--recipe", "bf16"], "it quantises no weight in the forward"),
        (["--recipe", "nvfp5"], "nvfp5"),
        (["--recipe", '{"base": "nvfp4"'], "--recipe is not JSON: line 1, column"),
        (["--recipe", '{"base": "nvfp4", "kept": []}'], "kept"),
        (["--recipe", '{"base": "nvfp4", "keep": ["*.gate_proj"]}'], "is not a folder"),
        (["--inputs", "static"], "is not a folder"),
        (["--tokens", "5"], "--tokens is for a text: add --text"),
        (["--text", "x.txt", "--tokens", "1"], "--tokens 1 is less than 2"),
        (["--layout", "gguf"], "invalid choice: 'gguf'"),
    ],
)
def test_arguments_of_quantize_that_do_not_fit_are_refused_in_one_line(tmp_path, capsys, arguments, message):
    words = ["quantize", tmp_path / "none", tmp_path / "out", *arguments]
    assert main([str(each) for each in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_several_processes_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["quantize", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "quantize runs in one process, and 2 were started: start one" in capsys.readouterr().err
