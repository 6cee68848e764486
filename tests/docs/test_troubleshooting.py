"""docs/troubleshooting.md: each message is produced by the mistake that its row describes, or is in the code.

A row's message may leave out parts with an ellipsis, and may end before the message does.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from quick_cases import slow_except
from tiny_models import tiny_model

import megalowbit as mlb
from launchers import ROOT
from megalowbit.commands.table import main as command
from megalowbit.errors import UserError
from megalowbit.pretrain.command_line import main as pretrain

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def dry_run(*overrides, config="gpt2_tiny_fp4", more=()):
    sets = [word for each in overrides for word in ("--set", each)]
    return pretrain(["--ds-config", config, "--dry-run", *sets, *more])


def broken_json():
    Path("bad.json").write_text('{"a": 1,}')
    return dry_run(config="bad.json")


def used_folder():
    Path("runs/held").mkdir(parents=True)
    Path("runs/held/metrics.jsonl").write_text("{}\n")
    Path("runs/held/config.json").write_text("{}")
    return pretrain(["--ds-config", "gpt2_tiny_fp4", "--run-dir", "runs/held"])


def second_derivative():
    model = tiny_model("gpt2")
    mlb.convert(model, "nvfp4")
    loss = model(torch.zeros(1, 4, dtype=torch.long)).logits.sum()
    return torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)


SPLIT = 'megalowbit.recipe={"base": "nvfp4", "parameter_split": {"rank": 4}}'
# the beginning of a message → what makes it
MISTAKES = {
    "unknown key": lambda: dry_run("megalowbit.run.step=5"),
    "unknown recipe": lambda: dry_run("megalowbit.recipe=nvfp5"),
    "megalowbit.run.steps = '7'": lambda: dry_run('megalowbit.run.steps="7"'),
    "bad.json": broken_json,
    "there is no file": lambda: dry_run(config="gpt2_tiny"),
    "corpus '": lambda: dry_run("megalowbit.data.corpus=nowhere.txt"),
    "train_batch_size 7": lambda: dry_run("train_batch_size=7"),
    "data.sequence_length": lambda: dry_run("megalowbit.data.sequence_length=4096"),
    "zero_optimization.stage": lambda: dry_run(SPLIT, "zero_optimization.stage=1"),
    "megalowbit.fp32_norms": lambda: dry_run("megalowbit.fp32_norms=true", "zero_optimization.stage=1"),
    "tensor_parallel.": lambda: dry_run(
        "tensor_parallel.autotp_size=2", "pipeline.stages=2", more=("--processes", "4")
    ),
    "torch_autocast.": lambda: dry_run("torch_autocast.enabled=true"),
    "checkpoint …": lambda: dry_run('megalowbit.model={"checkpoint": "nowhere"}'),
    "run folder runs/held": used_folder,
    "--restart": lambda: pretrain(["--ds-config", "gpt2_tiny_fp4", "--restart"]),
    "124M does not fit": lambda: command(["init", "124M", "--machine", "1x1"]),
    "cpus_per_task": lambda: command(["submit", "--ds-config", "gpt2_tiny_fp4"]),
    "GPT2LMHeadModel has no": lambda: mlb.check_training(tiny_model("gpt2")),
    "recipe 'nvfp4-first": lambda: mlb.convert(torch.nn.LayerNorm(4)),
    "unknown quantizer": lambda: mlb.quantizer("nvfp4"),
    "quantizer 'nvfp4e2m1bnosr'": lambda: mlb.quantizer("nvfp4e2m1bnosr").quantize(
        torch.ones(4, dtype=torch.int64)
    ),
    "second derivatives": second_derivative,
}
# needs another version, network or engine: the words of the message are in the code
IN_CODE = ("deepspeed …", "… is not a network", "low-bit layers train")


def test_each_row_is_produced_or_looked_up():
    known = (*MISTAKES, *IN_CODE)
    assert len(ROWS) == len(known)
    for row in ROWS:
        assert len([each for each in known if row.startswith(each)]) == 1, row


@pytest.mark.parametrize(
    "start", slow_except([each for each in MISTAKES if each != "124M does not fit"], MISTAKES)
)
def test_a_mistake_has_the_message_of_the_page(start, tmp_path, monkeypatch, capsys):
    [row] = [each for each in ROWS if each.startswith(start)]
    monkeypatch.chdir(tmp_path)
    try:
        code = MISTAKES[start]()
    except UserError as error:
        message = str(error)
    else:
        assert code == 2, row
        message = capsys.readouterr().err
    assert re.search(".*".join(map(re.escape, row.split("…"))), message), message


@pytest.mark.parametrize("start", IN_CODE)
def test_the_words_of_a_message_are_in_the_code(start):
    [row] = [each for each in ROWS if each.startswith(start)]
    for words in filter(None, map(str.strip, row.split("…"))):
        found = [path for path in (ROOT / "megalowbit").rglob("*.py") if words in path.read_text("utf-8")]
        assert any(words in text for path in found for text in strings_of(path)), words


def strings_of(path):
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_row_names_cause_and_remedy():
    tables = re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE)
    assert all(
        len(row.split(" | ")) == 3 and all(cell.strip() for cell in row.split(" | ")) for row in tables
    )
