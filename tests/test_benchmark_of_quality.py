"""The benchmark of quality: runs of recipes paired with bf16, its table and its picture."""

import json
import os
import statistics
from pathlib import Path

import pytest
from forks import run_script
from quick_cases import slow_except

import megalowbit as mlb
from launchers import write_config

ROOT = Path(__file__).parent.parent


def quality(*arguments, out, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGALOWBIT_CACHE": str(out / "cache"), **environment}
    return run_script(ROOT / "benchmarks" / "quality.py", "--out", out, *arguments, env=env)


@pytest.mark.slow
def test_quality_pairs_recipes_with_bf16_by_seed_and_can_be_resumed(tmp_path):
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
    assert other.stderr.strip().endswith(
        "bf16-seed-5 contains a run with other settings: choose another --out"
    )


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


def test_quality_runs_every_named_recipe_by_default(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from quality import PEER, RECIPES, WITHOUT_KERNELS

    assert sorted([PEER, *RECIPES, *WITHOUT_KERNELS]) == sorted(mlb.recipes())


MISTAKES = [
    (("--no-picture", "--recipe", "nvfp5"), "did you mean 'nvfp4'"),
    ((), "no such thing: pip install -c constraints.txt -e '.[bench]', or use --no-picture"),
    (("--no-picture", "--config", "no.json"), "no.json"),
]


@pytest.mark.parametrize(("arguments", "message"), slow_except(MISTAKES[:1], MISTAKES))
def test_quality_finds_mistakes_before_the_first_run(tmp_path, arguments, message):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such thing')")
    done = quality(*arguments, out=tmp_path / "out", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*-seed-*"))


@pytest.mark.slow
def test_quality_names_a_path_that_is_no_folder_and_a_damaged_run(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "file").write_text("x")
    few = ("--config", str(config), "--recipe", "nvfp4", "--no-picture")
    cache = {"MEGALOWBIT_CACHE": str(tmp_path / "cache")}
    done = quality(*few, out=tmp_path / "file", **cache)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"--out {tmp_path / 'file'} is not a writable folder (" in done.stderr
    damaged = tmp_path / "out" / "bf16-seed-1"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text("{")
    done = quality(*few, out=tmp_path / "out", **cache)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{damaged / 'config.json'} is damaged (it is not JSON): remove that run's folder" in done.stderr


@pytest.mark.slow
def test_quality_help_has_defaults_and_says_which_flags_repeat():
    done = run_script(ROOT / "benchmarks" / "quality.py", "--help")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    for default in ("all named ones but quartet-2; bf16 always runs", "1, 2, 3", "as configured", "100", "2"):
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


def test_a_truncated_axis_is_labelled_and_short_runs_are_not_called_means(monkeypatch, tmp_path):
    left, right = drawn(monkeypatch, tmp_path, [10.0, 9.0, 4.0, *[3.0] * 17])
    assert left.get_title() == "Loss\ny axis cut: fits from step 3 on"
    assert left.get_ylim()[1] < 9
    assert right.get_title() == "Gap to bf16 (black), paired by seed"
    assert left.get_xlabel() == right.get_xlabel() == "optimizer step (each step)"


def test_a_complete_axis_is_not_labelled_as_truncated(monkeypatch, tmp_path):
    left, _ = drawn(monkeypatch, tmp_path, [3.0, 4.0] * 20)
    assert left.get_title() == "Loss"
    assert left.get_xlabel() == "optimizer step (each value: mean over the last 2)"
