"""`megalowbit plan-layers` from the script's file; tests/pretrain/sweep has what it computes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_script
from tiny_models import tiny_config

from launchers import ROOT, write_config
from megalowbit.commands.studies.plan_layers import main
from megalowbit.hf.model import random_model
from megalowbit.layers.recipe import Recipe

TOOL = ROOT / "tools" / "plan_layers.py"


def test_the_command_prints_a_recipe_and_writes_what_it_measured(tmp_path):
    config = write_config(tmp_path)
    random_model(tiny_config("gpt2", vocab_size=256, positions=64), seed=0).save_pretrained(tmp_path / "hf")
    (tmp_path / "heldout.txt").write_text("the baker counts letters at dawn. " * 40)
    arguments = ("--ds-config", config, "--weights", tmp_path / "hf", "--text", tmp_path / "heldout.txt")
    arguments += ("--set", "megalowbit.recipe=nvfp4-keep-positions")
    cache = f"megalowbit.data.cache_dir={tmp_path / 'cache'}"
    out = tmp_path / "plan.json"
    block = '{"split_weight": {"rank": 4}}'
    options = ("--candidate", "fp8", "--candidate", block, "--candidate", "bf16", "--cost", "time")
    done = run_script(TOOL, *arguments, "--set", cache, "--out", out, "--budget", "0.5", *options)
    assert done.returncode == 0, done.stderr
    progress = [line.split(maxsplit=1) for line in done.stderr.splitlines()]
    assert progress[-1] == ["29", "of 29 measurements"]  # seven layers with four recipes, and all together
    assert [int(number) for number, _ in progress] == [math.ceil(2.9 * tenth) for tenth in range(1, 11)]
    printed, written = json.loads(done.stdout.splitlines()[-1])["recipe"], json.loads(out.read_text())
    assert printed == written["recipe"]
    assert Recipe.from_dict(printed).to_dict() == printed
    assert len(written["layers"]) == 7  # one is kept by the recipe
    for each in written["layers"].values():
        names = ["nvfp4-keep-positions", "fp8", "own split_weight (rank 4)", "bf16"]
        assert list(each["options"]) == names
        own, eight, split, high = each["options"].values()
        assert own["cost"] == 0
        assert 0 < eight["cost"] < high["cost"]
        assert split["cost"] > 0
        assert high["damage"] == 0 != own["damage"]
    assert written["cost"] <= 0.5
    assert "more time of products (budget 50.0%)" in done.stdout or "change nothing" in done.stdout
    twice = '{"split_input": {"rank": 4}, "split_input": {"rank": 8}}'
    wrong = run_script(TOOL, *arguments, "--set", cache, "--candidate", twice)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "'split_input' occurs twice" in wrong.stderr
    wrong = run_script(TOOL, *arguments, "--set", cache, "--candidate", "fp9")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "unknown recipe 'fp9'" in wrong.stderr
    nowhere = tmp_path / "none" / "plan.json"
    done = run_script(TOOL, *arguments, "--set", cache, "--out", nowhere)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"--out {nowhere}: the folder does not exist or is read-only" in done.stderr
    long = "megalowbit.data.sequence_length=128"
    done = run_script(TOOL, *arguments, "--set", cache, "--set", long)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "data.sequence_length 128 is longer than the model's n_positions 64" in done.stderr
    again = run_script(TOOL, *arguments, "--set", cache, "--out", out)
    assert (again.returncode, again.stderr) == (2, f"error: --out {out} exists: choose another name\n")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{'rank': 4}", """--candidate "{'rank': 4}" is not JSON"""),
        ("{}", "--candidate '{}' changes nothing: name fields that differ from the recipe's"),
        ('{"name": "a", "if_present": true}', """"if_present": true}' changes nothing"""),
    ],
)
def test_a_candidate_that_is_no_block_or_changes_nothing_is_refused_at_once(capsys, block, message):
    files = ("--ds-config", "none.json", "--weights", "none", "--text", "none")
    assert main([*files, "--candidate", block]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_progress_that_nobody_reads_ends_nothing():
    module = "megalowbit.commands.studies.plan_layers"
    program = f"from {module} import _print_tenths as show; [show(done, 3) for done in (1, 2, 3)]"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stderr=full, cwd=ROOT)
    assert done.returncode == 0
