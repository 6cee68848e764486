"""Lines whose values were damaged: there is a verdict whatever is in them."""

import json
import random

import pytest

from megalowbit.commands.runs.diagnose import main

VALUES = (
    "8", "", None, True, [], [3], {}, {"a": None}, -1, 0, 1e300, -1e300, 10**400, -(10**400), 2**53, 2**63,
    float("nan"), float("inf"), 1e-300, "\ud800", "x" * 3000,
)  # fmt: skip
FILES = ("metrics.jsonl", "overflow_layers.jsonl", "attempts.jsonl", "summary.json", "config.json", "DONE")


@pytest.fixture
def folder(records, tmp_path):
    """A run with records of every kind, and with skipped steps of one rank at its end."""
    for row in records.rows:
        skipped = max(0, row["step"] - 50)
        row |= {
            "skipped_steps": skipped, "rollbacks": 0, "validation/loss": 3.0, "loss/a": row["loss"],
            "ranks/slowest": 3, "ranks/slowest_milliseconds": 9.0, "ranks/other_milliseconds": 4.0,
            "ranks/highest_loss_rank": 1, "ranks/highest_loss": 3.1, "ranks/other_loss": 3.0,
            "loss_scale": 65536.0 / 2**skipped,
        }  # fmt: skip
        if skipped:
            row |= {"grad_norm": None, "skipped/tensor": "h.1", "skipped/rank": 2, "skipped/ranks": 1}
            row |= {"skipped/tensors": 7, "nonfinite": {"grad_norm": "inf"}}
    records.attempts[0] |= {"processes": 8, "job": "4711", "is_resumed": False}
    records.attempts[1] |= {"how": "error", "line": "CUDA out of memory", "error": "OutOfMemoryError"}
    run = records.write(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"steps": 60, "rollbacks": [{"reason": "step 9"}]}))
    (run / "DONE").write_text('{"step": 60}')
    return run


def damaged(line, draw):
    """The line with one to three values replaced, in objects within it as well."""
    record = json.loads(line)
    for _ in range(draw.randint(1, 3)):
        inner = record
        name = draw.choice(list(inner))
        while isinstance(inner[name], dict) and inner[name] and draw.random() < 0.7:
            inner = inner[name]
            name = draw.choice(list(inner))
        inner[name] = draw.choice(VALUES)
    return json.dumps(record)


@pytest.mark.slow
def test_three_hundred_damages_of_real_lines_give_a_verdict_each(folder, capsys):
    draw = random.Random(11)
    originals = {name: (folder / name).read_text() for name in FILES}
    for number in range(300):
        name = FILES[number % len(FILES)]
        lines = originals[name].splitlines()
        for place in draw.sample(range(len(lines)), min(len(lines), draw.choice((1, 1, 5, 60)))):
            lines[place] = damaged(lines[place], draw)
        (folder / name).write_text("\n".join(lines) + "\n")
        arguments = [str(folder), *(["--json"] if number % 2 else [])]
        code = main(arguments)
        shown = capsys.readouterr()
        assert code in (0, 1, 2), lines
        assert (code == 2) == bool(shown.err)
        if number % 2 and code != 2:
            assert (json.loads(shown.out)["state"] == "troubled") == (code == 1)
        (folder / name).write_text(originals[name])
