"""Repeating a cell from a `study.json` alone: what is compared before and after the run."""

import json
import math
import os

import pytest
from programs import call_main
from studies import NAMES, RESULT, finish, report

from megalowbit.pretrain.sweep.study.reproduction import difference, other_processor, use_recorded_gemm
from megalowbit.pretrain.sweep.study.results import Result

TOOL = "tools/study.py"
FREE_PARTS = [  # of the file, which only a repetition reads
    lambda data: data["study"].update(sizes=5),
    lambda data: data["study"].update(recipes=[None]),
    lambda data: data["study"].update(set=[]),
    lambda data: data["base"].update(megalowbit=None),
    lambda data: data["base"].update(megalowbit={"model": 3}),
]


def test_a_repetition_checks_that_the_file_has_the_study_of_the_cell(study, tmp_path, capsys):
    finish(study, tmp_path / "a", *NAMES[:2])
    report(study, tmp_path / "a", capsys)
    text, damaged = (tmp_path / "a" / "study.json").read_text(), tmp_path / "damaged.json"
    changed_base = (
        "recorded: config.optimizer.params.lr = 0.5 (was 0.003): restore",
        lambda data: data["base"]["optimizer"]["params"].update(lr=0.5),
    )
    for number, (expected, damage) in enumerate(
        [*(("'study' or 'base'", each) for each in FREE_PARTS), changed_base]
    ):
        data = json.loads(text)
        damage(data)
        damaged.write_text(json.dumps(data))
        out = tmp_path / f"out{number}"
        done = call_main(TOOL, "--reproduce", damaged, NAMES[0], "--out", out, capsys=capsys)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"error: {damaged}")
        assert expected in done.stderr
        assert not list(out.glob("logs/*"))  # nothing has run


def test_a_repeated_run_that_diverges_is_not_reproduced():
    assert difference(2.0, 2.5) == 0.5
    assert difference(2.0, math.nan) == difference(math.nan, 2.0) == math.inf
    assert difference(math.nan, math.nan) == 0


@pytest.mark.parametrize(
    ("recorded", "named", "expected"), [("fp32", "", "fp32"), ("fp32", "bf16", "bf16"), (None, "", "")]
)
def test_a_repetition_multiplies_in_the_recorded_dtype_unless_one_is_named(
    recorded, named, expected, monkeypatch
):
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", named)
    result = Result.model_validate({**RESULT, "made_with": {**RESULT["made_with"], "gemm": recorded}})
    use_recorded_gemm(result)
    assert os.environ["MEGALOWBIT_CPU_GEMM"] == expected


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({}, ""),
        (
            {"units": "avx512f"},
            "It was made on one (avx2), and this is one (avx512f). They differ in the last",
        ),
        ({"units": None}, "this is one. They may differ, as no instructions were recorded, in the last"),
        ({"gemm": "fp32"}, "this is one (avx2), GEMMs in fp32. They differ in the last"),
        ({"gemm": "bf16"}, ""),  # the recorded one, too: a cell in high precision
    ],
)
def test_a_repetition_says_why_losses_differ(study, tmp_path, now, expected):
    before = {**RESULT["made_with"], "units": "avx2"}
    (cell,) = finish(study, tmp_path / "a", NAMES[0], **{**before, **now})
    line = other_processor(Result.model_validate({**RESULT, "made_with": before}), cell)
    assert expected in line
    assert bool(line) == bool(expected)
