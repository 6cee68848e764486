"""The benchmarks run, on sizes that take no time, and print the ratios they promise."""

import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_script

import megalowbit as mlb
from launchers import write_config

ROOT = Path(__file__).parent.parent


def run(script, *arguments):
    done = run_script(ROOT / "benchmarks" / script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_linear_compares_every_recipe_with_a_bf16_layer():
    block = '{"base": "nvfp4", "layout": "per_gemm", "hadamard": true}'
    printed = run("linear.py", "--rounds", "2", "--shape", "64x32x48", "--recipe", "mxfp4", "--recipe", block)
    for name in ("BitLinear mxfp4", "BitLinear nvfp4 with own layout, hadamard"):
        time, memory = (line for line in printed.splitlines() if line.strip().startswith(name))
        assert "× nn.Linear bf16" in time
        assert float(memory.split()[-2]) < 0.3


def test_linear_has_a_peer_for_recipes_that_split_the_output_gradient():
    block = '{"base": "nvfp4", "name": "split", "split_grad_output": {"rank": 4}}'
    printed = run("linear.py", "--rounds", "2", "--shape", "64x32x48", "--recipe", block)
    for name in ("BitLinear split", "split in eager PyTorch, fp32"):
        assert any(line.strip().startswith(name) and "×" in line for line in printed.splitlines()), name


def test_quantize_compares_with_a_copy_and_with_plain_torch():
    printed = run("quantize.py", "--rounds", "2", "--size", "64")
    for name in ("clone", "nvfp4e2m1b", "mxfp4e2m1bnosr", "int8 to bf16", "plain torch, int8", "int8b"):
        assert any(line.strip().startswith(name) and "GB/s" in line for line in printed.splitlines()), name


def test_speculation_compares_looks_with_a_layer_of_no_controller():
    printed = run("speculation.py", "--rounds", "2", "--shape", "64x32x48", "--verify-size", "8")
    for name in ("no controller", "between checks", "check", "verified check"):
        lines = [line for line in printed.splitlines() if line.strip().startswith(f"{name}  ")]
        assert len(lines) == 1, name
        assert "× no controller" in lines[0]
    assert "a check every 10 steps, one of 3 verified" in printed
    chain = run("speculation.py", "--rounds", "1", "--shape", "64x32x48", "--layers", "3", "--cpu-time")
    assert "64 tokens × 32→48, bf16, 3 layers\n" in chain


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to take a revision from")
def test_grad_buffer_compares_with_another_revision():
    printed = run("grad_buffer.py", "--rounds", "2", "--width", "8", "--against", "HEAD")
    for kind in ("list", "model", "hooks"):
        table = printed.split(f"\n{kind}\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in table] == ["HEAD", "here", "ratio"]


def test_causality_prints_what_logits_depend_on(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=16, n_embd=32, n_layer=1, n_head=2, vocab_size=256)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    block = '{"base": "nvfp4", "name": "mean", "split_input": {"method": "mean"}}'
    printed = run("causality.py", "--checkpoint", tmp_path, "--recipe", "mxfp4", "--recipe", block)
    found = {
        line.split()[0]: [float(number) for number in line.split()[1:]] for line in printed.splitlines()[2:]
    }
    assert found["bf16"][:2] == found["mxfp4"][:2] == [0, 0]
    assert found["mxfp4"][4] > 0.1
    assert found["mean"][1] > 0.1


def test_low_rank_compares_every_method_with_torchs():
    printed = run("low_rank.py", "--rounds", "2", "--shape", "96x64", "--rank", "4")
    for name in ("qb, warm", "full split, qb", "power, warm, one step", "random", "sampled, 2 %"):
        lines = [line for line in printed.splitlines() if line.strip().startswith(f"{name}  ")]
        assert lines, name
        assert all("× torch.svd_lowrank fp32" in line for line in lines), name


@pytest.mark.slow  # DeepSpeed compiles its optimizer
def test_optimizer_compares_steps_with_torchs_deepspeeds_and_loops(tmp_path):
    sizes = ("--layers", "1", "--hidden", "32", "--vocabulary", "96", "--threads", "1", "--rounds", "2")
    printed = run("optimizer.py", *sizes, "--json", str(tmp_path / "times.json"))
    times = json.loads((tmp_path / "times.json").read_text())["seconds"]
    assert set(times) == {"fp16 and fp32", "bf16"}
    for name in (name for table in times.values() for name in table):
        lines = [line for line in printed.splitlines() if line.strip().startswith(f"{name}  ")]
        assert lines, name
        assert "× AdamW fused, fp32, alone" in lines[0], name
    assert printed.count("faster than loops over tensors") == 2
    assert all(len(values) == 2 for table in times.values() for values in table.values())


def test_optimizer_passes_stand_beside_torchs():
    sizes = ("--layers", "1", "--hidden", "32", "--vocabulary", "96", "--threads", "1", "--rounds", "2")
    printed = run("optimizer.py", "--passes", *sizes)
    for name in (
        "accumulate",
        "torch dot, fp32",
        "sums_of_squares, float64",
        "one pass",
        "one pass, gradients kept",
    ):
        assert any(
            line.strip().startswith(f"{name}  ") and "× torch" in line for line in printed.splitlines()
        ), name


def test_loss_scales_counts_overflows_and_octaves_of_every_strategy():
    results = json.loads(run("loss_scales.py", "--steps", "500", "--json"))
    constant, megatron = results["constant 2^16"], results["megatron"]
    assert constant["steady"] == [0, 6.0]  # 2^16 where 2^22 would do
    draw = random.Random(0)
    spikes = [2**-6 * 2 ** draw.gauss(0, 0.5) * (100 if draw.random() < 0.01 else 1) for _ in range(500)]
    assert constant["spikes"][0] == sum(spike * 2**16 >= 65520 for spike in spikes) > 3
    assert megatron["spikes"][0] <= constant["spikes"][0]
    for strategy in ("max_value", "controller"):
        assert results[strategy]["decay"][1] < megatron["decay"][1]


COUNTED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, "benchmarks")
from collective_counter import CollectiveCounter, summed
counter = CollectiveCounter()
counter.install()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.zeros(8, dtype=torch.float64))
dist.all_gather_object([None], "x" * 100)
rows = {key[1:]: value for key, value in summed(counter.seen).items()}
assert rows[("allreduce", "float64")] == [1, 64]
calls, size = rows[("allgather", "uint8")]  # an object is two: its size, and what it is pickled to
assert calls == 1 and 100 < size < 200
assert rows[("allgather", "int64")] == [1, 8]
assert {each.phase for each in counter.seen} == {"start"}
dist.destroy_process_group()
"""


def test_collectives_are_counted_with_their_bytes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(tmp_path / "store")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_collectives_compares_ours_with_plain_deepspeeds():
    printed = run("collectives.py", "--case", "ZeRO 1", "--rows").splitlines()
    ours, plain = (
        next(line for line in printed if f"ZeRO 1  {' ' * 12}{mode}" in line) for mode in ("ours", "plain")
    )
    assert float(ours.split()[-4]) == 3
    assert float(plain.split()[-4]) == 2
    assert sum("telemetry/step_facts.py" in line and line.endswith("1.00 × 64 B") for line in printed) == 1


@pytest.mark.slow
def test_restart_clocks_a_start_and_a_resume():
    printed = run("restart.py", "--rounds", "1")
    for name in ("imports", "engine", "verification", "load", "save"):
        assert any(line.startswith(f"{name} ") for line in printed.splitlines()), name


@pytest.mark.slow
def test_watchdog_prints_what_a_mark_a_beat_and_a_failure_cost():
    printed = run("watchdog.py", "--rounds", "1", "--ranks", "300")
    for name in ("mark", "heartbeat", "all heartbeats"):
        assert any(line.startswith(f"  {name} ") and "×" in line for line in printed.splitlines()), name
    assert "300 ranks" in printed
    assert re.search(r"^a heartbeat: 1\d\d bytes$", printed, flags=re.MULTILINE)


def test_a_wrong_argument_is_one_line_of_usage_not_a_traceback():
    for arguments in (["--shape", "512,256"], ["--rounds", "0"], ["--device", "tpu"], ["--recipe", "nvfp5"]):
        done = run_script(ROOT / "benchmarks" / "linear.py", *arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert arguments[1] in done.stderr


def quality(*arguments, out, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGALOWBIT_CACHE": str(out / "cache"), **environment}
    return run_script(ROOT / "benchmarks" / "quality.py", "--out", out, *arguments, env=env)


def test_quality_pairs_recipes_with_bf16_by_seed_and_goes_on_where_it_was(tmp_path):
    config, out = write_config(tmp_path), tmp_path / "out"
    few = ("--config", str(config), "--steps", "4", "--last", "2", "--seed", "5", "--no-picture")
    done = quality(*few, "--recipe", "nvfp4", out=out)
    assert done.returncode == 0, done.stderr
    assert "[2/2]" in done.stdout
    losses = {}
    for label in ("bf16", "nvfp4"):
        rows = (out / f"{label}-seed-5" / "metrics.jsonl").read_text().splitlines()
        losses[label] = [json.loads(row)["loss"] for row in rows]
        assert len(rows) == 4
    # the same weights and batches: the first losses differ by rounding alone
    assert losses["bf16"][0] != losses["nvfp4"][0] == pytest.approx(losses["bf16"][0], rel=0.02)
    assert "mean loss of the last 2 steps\n" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("nvfp4 ")]
    loss, gap = map(float, line.split()[1:3])
    assert loss == pytest.approx(statistics.mean(losses["nvfp4"][-2:]), abs=1e-4)
    assert gap == pytest.approx(loss - statistics.mean(losses["bf16"][-2:]), abs=2e-4)
    assert line.endswith("?")
    again = quality(*few, "--recipe", "nvfp4", out=out)
    assert "[1/" not in again.stdout
    assert again.stdout.partition("mean loss")[2] == done.stdout.partition("mean loss")[2] != ""
    whole = quality(*few, "--last", "9", "--recipe", "nvfp4", out=out)
    assert "mean loss of the last 4 steps: all, the start included\n" in whole.stdout
    (line,) = [line for line in whole.stdout.splitlines() if line.startswith("nvfp4 ")]
    assert float(line.split()[1]) == pytest.approx(statistics.mean(losses["nvfp4"]), abs=1e-4)
    other = quality(*few, "--steps", "5", "--recipe", "nvfp4", out=out)
    assert other.returncode == 1
    assert other.stderr.strip().endswith("bf16-seed-5 holds a run with other settings: choose another --out")


@pytest.mark.slow
def test_a_recipe_that_diverges_is_marked_and_does_not_end_the_sweep(tmp_path):
    (tmp_path / "too_much.py").write_text("def gain(values):\n    return values * 0 + 3e38, 3e38\n")
    config = write_config(tmp_path, block={"run": {"steps": 5, "max_consecutive_skips": 3}})
    out = tmp_path / "out"
    block = {"base": "nvfp4", "split_grad_output": {"rank": 2, "gains": "too_much:gain"}, "name": "wild"}
    few = ("--config", str(config), "--last", "2", "--seed", "5", "--no-picture")
    recipes = ("--recipe", json.dumps(block), "--recipe", "nvfp4")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = quality(*few, *recipes, out=out, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "wild, seed 5: " in done.stdout
    assert "s, diverged at step 1\n" in done.stdout
    lines = done.stdout.partition("mean loss")[2].splitlines()
    (line,) = [line for line in lines if line.startswith("wild ")]
    assert line.split()[1] == "diverged"
    assert len(line.split()) == 3  # and its speed, no gap
    assert "  wild, seed 5, diverged at step 1" in lines
    assert len((out / "wild-seed-5" / "metrics.jsonl").read_text().splitlines()) == 3
    (line,) = [line for line in lines if line.startswith("nvfp4 ")]
    assert float(line.split()[1]) < 6
    again = quality(*few, *recipes, out=out, PYTHONPATH=path)
    assert "[1/" not in again.stdout
    assert again.stdout.partition("mean loss")[2] == done.stdout.partition("mean loss")[2]


def test_quality_runs_every_named_recipe_unless_told_otherwise(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from quality import PEER, RECIPES

    assert sorted([PEER, *RECIPES]) == sorted(mlb.recipes())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no such thing: pip install -c constraints.txt -e '.[bench]', or use --no-picture"),
        (["--no-picture", "--recipe", "nvfp5"], "did you mean 'nvfp4'"),
        (["--no-picture", "--config", "no.json"], "no.json"),
    ],
)
def test_quality_finds_mistakes_before_the_first_run(tmp_path, arguments, message):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such thing')")
    done = quality(*arguments, out=tmp_path / "out", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*-seed-*"))


def test_quality_names_a_folder_that_is_none_and_a_run_that_is_damaged(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "file").write_text("x")
    few = ("--config", str(config), "--recipe", "nvfp4", "--no-picture")
    cache = {"MEGALOWBIT_CACHE": str(tmp_path / "cache")}
    done = quality(*few, out=tmp_path / "file", **cache)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"--out {tmp_path / 'file'} cannot be written to as a folder" in done.stderr
    damaged = tmp_path / "out" / "bf16-seed-1"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text("{")
    done = quality(*few, out=tmp_path / "out", **cache)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{damaged / 'config.json'} is damaged (it is not JSON): remove that run's folder" in done.stderr


def test_quality_help_has_defaults_and_says_which_flags_repeat():
    printed = " ".join(run("quality.py", "--help").split())
    for default in ("all named ones; bf16 always runs", "1, 2, 3", "as configured", "100", "2"):
        assert f"(default: {default})" in printed
    assert "(default: configs/gpt2_tiny_quality.json)" in printed
    assert printed.count("repeat the flag for several") == 2


def test_curves_are_drawn_from_smoothed_losses(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from curves import draw, smoothed

    values = smoothed([4.0, 2.0, 6.0, 1.0], 2)
    assert values[1:].tolist() == [3.0, 4.0, 3.5]
    losses = [5.0 - 0.1 * step for step in range(40)]
    curves = {
        "bf16": {1: losses, 2: losses},
        "nvfp4": {1: [x + 0.1 for x in losses], 2: [None, *losses[1:]]},
    }
    draw(tmp_path / "quality.png", curves, "bf16")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def drawn(monkeypatch, tmp_path, losses):
    """Both panels of the picture, as they are when it is closed."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import curves

    figures = []
    monkeypatch.setattr(curves.plt, "close", figures.append)
    curves.draw(
        tmp_path / "quality.png", {"bf16": {1: losses}, "nvfp4": {1: [x + 0.1 for x in losses]}}, "bf16"
    )
    return figures[0].axes


def test_a_cut_axis_is_said_and_short_runs_are_not_called_means(monkeypatch, tmp_path):
    left, right = drawn(monkeypatch, tmp_path, [10.0, 9.0, 4.0, *[3.0] * 17])
    assert left.get_title() == "Loss\ny axis cut: fits from step 3 on"
    assert left.get_ylim()[1] < 9
    assert right.get_title() == "Gap to bf16 (black), paired by seed"
    assert left.get_xlabel() == right.get_xlabel() == "optimizer step (each step)"


def test_an_axis_that_holds_all_values_is_not_called_cut(monkeypatch, tmp_path):
    left, _ = drawn(monkeypatch, tmp_path, [3.0, 4.0] * 20)
    assert left.get_title() == "Loss"
    assert left.get_xlabel() == "optimizer step (each value: mean over the last 2)"
