"""The examples, run as their users run them; also the loop that README.md shows."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import run_script
from quick_cases import slow_except
from transformers import GPT2Config, GPT2LMHeadModel

import megalowbit as mlb

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEPS = 20


def run(name, processes, folder):
    """Output of rank 0, and what each rank saved."""
    arguments = ("--steps", str(STEPS), "--out", str(folder))
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if processes == 1:
        done = run_script(EXAMPLES / name, *arguments, env=environment)
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *torchrun, str(EXAMPLES / name), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]


RUNS = [("plain_loop.py", 1), ("plain_loop.py", 2), ("local_ddp.py", 1), ("local_ddp.py", 2)]


@pytest.mark.parametrize(("name", "processes"), slow_except([("local_ddp.py", 1)], RUNS))
def test_the_loss_falls_overflows_are_skipped_and_all_ranks_end_equal(name, processes, tmp_path):
    printed, saved = run(name, processes, tmp_path)
    lines = [line for line in printed.splitlines() if line.startswith("step")]
    assert len(lines) == STEPS
    assert "skipped at loss scale 2^19: overflow in transformer.h." in lines[0]
    # DistributedDataParallel has averaged by then, and an inf is everybody's
    is_averaged = name == "plain_loop.py" and processes > 1
    assert any(" on rank " in line for line in lines) != is_averaged
    assert "applied" in lines[-1]
    for rank in saved:
        assert len(rank["losses"]) == STEPS
        assert rank["losses"][:2].mean() > 5.3  # ln 256 = 5.5
        assert rank["losses"][-4:].mean() < 4.2
    for other in saved[1:]:
        assert not torch.equal(other["losses"], saved[0]["losses"])  # each reads its own data
        for weight, same in zip(other["weights"], saved[0]["weights"], strict=True):
            assert torch.equal(weight, same)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "nowhere/at/all"], "nowhere/at/all is not a writable folder: create it first"),
        (["--out", __file__], "is not a writable folder"),
        (["--steps", "-1"], "-1 is not at least 1"),
        (["--steps", "0"], "0 is not at least 1"),
        (["--steps", "x"], "invalid positive value: 'x'"),
    ],
)
@pytest.mark.parametrize("name", ["plain_loop.py", "local_ddp.py"])
def test_wrong_arguments_are_refused_before_training(name, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_loop_shown_in_the_readme_trains():
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(encoding="utf-8"), re.DOTALL
    )
    [shown] = [block for block in blocks if "get_megatron_optimizer" in block]
    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model, tokens = GPT2LMHeadModel(settings), torch.randint(0, 64, (4, 16))
    names = {
        "model": model,
        "loader": [{"input_ids": tokens, "labels": tokens}] * 30,
        "mlb": mlb,
        "torch": torch,
    }
    exec(shown, names)
    assert names["report"].is_applied
    assert names["scheduler"].get_last_lr()[0] > 1e-4  # the warm-up has moved
    assert names["loss"].item() < 4.0  # ln 64 = 4.2
