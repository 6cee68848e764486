"""`megalowbit calibrate`: its mistakes and its help; tests/pretrain/sweep has what it computes."""

import pytest
from programs import call_main

from launchers import check_refusal

TOOL = "tools/calibrate_speculation.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threshold", "5"], "the following arguments are required: --ds-config; see --help"),
        (["--ds-config", "tiny.json"], "the following arguments are required: --threshold"),
        (["--ds-config", "tiny.json", "--threshold", "low"], "invalid float value: 'low'"),
        (["--ds-config", "none.json", "--threshold", "5"], "none.json"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    done = call_main(TOOL, *arguments, capsys=capsys)
    check_refusal(done, message)


def test_help_has_defaults_and_an_example(capsys):
    printed = " ".join(call_main(TOOL, "--help", capsys=capsys).stdout.split())
    for default in ("1, 2, 3", "as configured", "a fifth of the steps", "0.3", "2"):
        assert f"(default: {default})" in printed
    assert "megalowbit calibrate --ds-config configs/gpt2_tiny_speculative.json" in printed
