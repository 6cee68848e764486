"""Loss of recipes against bf16, paired by seed: what low precision costs, and how sure that is.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/quality.py --out /tmp/quality --seed 1 --seed 2 --seed 3 --seed 4 \\
        --recipe nvfp4 --recipe nvidia-nvfp4 --recipe '{"base": "mxfp4", "keep_last": 1}'

Without --recipe all named ones run. Every run is a process of its own on one thread, with launch/pretrain.py
as users start it. One that diverges is marked and the sweep goes on. Runs of one seed
have the same initial weights and the same batches, so a gap to bf16 is taken within a seed and its error
is that of the gaps over the seeds. Recipes stand in the order given: nothing is ranked, and what lies within
twice the standard error is marked; of two or three seeds that error is itself a guess, so take more. A sweep
that was interrupted goes on where it was when it is started again with the same --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import positive

import megalowbit as mlb
from megalowbit.data.loader import count_samples
from megalowbit.pretrain.config import PretrainConfig, load_config

ROOT = Path(__file__).resolve().parent.parent
PEER = "bf16"
RECIPES = tuple(name for name in mlb.recipes() if name != PEER)
SEEDS = (1, 2, 3)
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
Losses = list[float | None]  # by step; None where it was not finite


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, done or to be done."""

    label: str
    seed: int
    folder: Path
    config: Path
    overrides: tuple[str, ...]

    def resolved(self) -> PretrainConfig:
        return load_config(self.config, list(self.overrides), world_size=1)

    def is_complete(self) -> bool:
        """Whether its folder holds all its steps, or diverged; exits if it holds another run."""
        saved, summary = self.folder / "config.json", self.folder / "summary.json"
        if not saved.exists():
            return False
        wanted = json.loads(json.dumps(self.resolved().to_dict()))
        if json.loads(saved.read_text()) != wanted:
            sys.exit(f"error: {self.folder} holds a run with other settings: choose another --out")
        steps = wanted["megalowbit"]["run"]["steps"]
        is_finished = summary.exists() and json.loads(summary.read_text())["steps"] == steps
        return is_finished or self.was_stopped()

    def execute(self) -> float:
        """Train it; returns the seconds it took, start included."""
        started = time.perf_counter()
        arguments = ["--ds-config", str(self.config), "--run-dir", str(self.folder), "--resume", "auto"]
        for override in self.overrides:
            arguments += ["--set", override]
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        log = self.folder.with_suffix(".log")
        with log.open("w") as file:
            command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), *arguments]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        if done.returncode and not self.was_stopped():
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise RuntimeError(f"{self.label}, seed {self.seed}, failed: {lines[-1]} (all of it in {log})")
        return time.perf_counter() - started

    def rows(self) -> list[dict[str, Any]]:
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be torn

    def steps_without_update(self) -> int:
        """How many steps at the end of the record were skipped, or had a loss that is not finite."""
        rows = self.rows()
        skips = [0, *(row["skipped_steps"] for row in rows)]
        is_lost = [
            row["loss"] is None or after > before
            for row, (before, after) in zip(rows, itertools.pairwise(skips), strict=True)
        ]
        return len(list(itertools.takewhile(bool, reversed(is_lost))))

    def was_stopped(self) -> bool:
        """Whether the loop gave it up, because too many steps in a row were skipped."""
        return self.steps_without_update() >= self.resolved().settings.run.max_consecutive_skips

    def diverged_at(self) -> int | None:
        """The first of the steps at the end that led nowhere; `None`: training went well to the end."""
        rows, lost = self.rows(), self.steps_without_update()
        return rows[-lost]["step"] if self.was_stopped() or (lost and rows[-1]["loss"] is None) else None

    def losses(self) -> Losses:
        return [row["loss"] for row in self.rows()]


def main() -> None:
    options = arguments()
    draw = None if options.no_picture else drawing(options.parser)
    recipes = {PEER: PEER, **labelled(options.recipe or RECIPES, options.parser)}
    seeds = list(dict.fromkeys(options.seed or SEEDS))
    options.out.mkdir(parents=True, exist_ok=True)
    runs = planned(recipes, seeds, options)
    try:
        config = runs[0].resolved()
        count_samples(config.settings.data)  # fills the cache once, before several processes would
    except mlb.UserError as error:
        options.parser.error(str(error))
    steps = config.settings.run.steps
    counts = f"{len(recipes)} recipes × {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    print(f"{counts}, {steps} steps of {options.config.name}, {options.out}")
    execute([run for run in runs if not run.is_complete()], jobs=options.jobs)
    results = {label: {run.seed: run for run in runs if run.label == label} for label in recipes}
    text = table(results, last=min(options.last, steps), steps=steps)
    print(text)
    (options.out / "table.txt").write_text(text + "\n")
    if draw is not None:
        curves = {
            label: {seed: padded(run.losses(), steps) for seed, run in by_seed.items()}
            for label, by_seed in results.items()
        }
        draw(options.out / "quality.png", curves, PEER)
        print(f"curves: {options.out / 'quality.png'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--recipe",
        action="append",
        help="a name, or a block as JSON; repeat the flag for several (default: all named ones; "
        f"{PEER} always runs)",
    )
    parser.add_argument(
        "--seed",
        action="append",
        type=positive,
        help="of weights and data; repeat the flag for several, which errors need "
        f"(default: {', '.join(map(str, SEEDS))})",
    )
    parser.add_argument("--steps", type=positive, help="of each run (default: as configured)")
    parser.add_argument(
        "--config",
        type=Path,
        default=ROOT / "configs" / "gpt2_tiny_quality.json",
        help="DeepSpeed configuration of the runs (default: configs/gpt2_tiny_quality.json)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the runs, table.txt and quality.png; required"
    )
    parser.add_argument(
        "--last",
        type=positive,
        default=100,
        help="steps at the end whose mean loss is compared (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs", type=positive, default=2, help="runs at a time, of one thread each (default: %(default)s)"
    )
    parser.add_argument("--no-picture", action="store_true", help="table only, without matplotlib")
    options = parser.parse_args()
    options.parser, options.config, options.out = parser, options.config.resolve(), options.out.resolve()
    return options


def drawing(parser: argparse.ArgumentParser) -> Any:
    """The function that draws; a missing package is found before the first run, not after the last."""
    try:
        from curves import draw
    except ImportError as error:
        parser.error(f"{error}: pip install -c constraints.txt -e '.[bench]', or use --no-picture")
    return draw


def labelled(values: list[str] | tuple[str, ...], parser: argparse.ArgumentParser) -> dict[str, str]:
    """Recipes as `--set` takes them, by name."""
    found: dict[str, str] = {}
    for value in values:
        try:
            name = mlb.recipe(json.loads(value) if value.startswith("{") else value).name
        except ValueError as error:  # a UserError, or no JSON
            parser.error(f"argument --recipe: {error}")
        if found.setdefault(name, value) != value:
            parser.error(f'two recipes are called {name!r}: give their blocks a "name"')
    return found


def planned(recipes: dict[str, str], seeds: list[int], options: argparse.Namespace) -> list[Run]:
    """All runs, seed by seed."""
    overrides = ["megalowbit.checkpoint.export_hf=false", "megalowbit.telemetry.tensorboard=false"]
    if options.steps:
        overrides.append(f"megalowbit.run.steps={options.steps}")
    return [
        Run(
            label=label,
            seed=seed,
            folder=options.out / f"{re.sub(r'[^A-Za-z0-9-]+', '-', label)}-seed-{seed}",
            config=options.config,
            overrides=(*overrides, f"megalowbit.run.seed={seed}", f"megalowbit.recipe={value}"),
        )
        for seed in seeds
        for label, value in recipes.items()
    ]


def execute(runs: list[Run], *, jobs: int) -> None:
    """Do the runs, some at a time; the first that fails ends the sweep, one that diverges does not."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run.execute): run for run in runs}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                run, seconds = futures[future], future.result()
                lost = run.diverged_at()
                end = f"{seconds:.0f} s" + (f", diverged at step {lost}" if lost else "")
                print(f"  [{number}/{len(runs)}] {run.label}, seed {run.seed}: {end}", flush=True)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def table(results: dict[str, dict[int, Run]], *, last: int, steps: int) -> str:
    """Mean losses by recipe and seed, their gaps to bf16, and what is too close to tell apart."""
    finals = {
        label: {seed: final_loss(run, last) for seed, run in by_seed.items()}
        for label, by_seed in results.items()
    }
    width = max(map(len, results)) + 2
    seeds = list(finals[PEER])
    heading = "".join(f"seed {seed}".rjust(11) for seed in seeds)
    gap_title = f"gap to {PEER} ± deviation (error)".rjust(36)
    lines = [
        f"\nmean loss of the last {last} steps" + ("" if last < steps else ": all, the start included"),
        "recipe".ljust(width) + heading + gap_title + "of the loss".rjust(13) + "tokens/s".rjust(10),
    ]
    peer = statistics.mean(finals[PEER].values())
    for label, losses in finals.items():
        speed = statistics.median(
            row["tokens_per_second"] for run in results[label].values() for row in run.rows()
        )
        line = label.ljust(width) + "".join(
            "diverged".rjust(11) if math.isnan(losses[seed]) else f"{losses[seed]:11.4f}" for seed in seeds
        )
        gap, shown, mark = Gap.between(losses, finals[PEER]), ("", ""), ""
        if label != PEER and not math.isnan(gap.mean):
            shown, mark = (str(gap), f"{100 * gap.mean / peer:+.2f} %"), gap.mark
        lines.append(f"{line}{shown[0]:>36}{shown[1]:>13}{speed:10,.0f}{mark}")
    lines.append("  ≈ smaller than twice its standard error   ? one seed, so its error is not known")
    for run in itertools.chain.from_iterable(by_seed.values() for by_seed in results.values()):
        if (step := run.diverged_at()) is not None:
            lines.append(f"  {run.label}, seed {run.seed}, diverged at step {step}")
    others = [label for label in finals if label != PEER and not math.isnan(sum(finals[label].values()))]
    for one, two in itertools.combinations(others, 2):
        gap = Gap.between(finals[one], finals[two])
        if gap.mark:
            lines.append(f"  {one} and {two} are not told apart: {gap} {gap.mark.strip()}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Gap:
    """Differences of two recipes, paired by seed: mean, standard deviation, standard error of the mean."""

    mean: float
    deviation: float
    error: float

    @classmethod
    def between(cls, losses: dict[int, float], peers: dict[int, float]) -> Gap:
        gaps = [losses[seed] - peers[seed] for seed in losses]
        deviation = statistics.stdev(gaps) if len(gaps) > 1 else math.nan
        return cls(statistics.mean(gaps), deviation, deviation / math.sqrt(len(gaps)))

    @property
    def mark(self) -> str:
        if math.isnan(self.error):
            return "  ?"
        return "" if abs(self.mean) >= 2 * self.error else "  ≈"

    def __str__(self) -> str:
        if math.isnan(self.error):
            return f"{self.mean:+.4f}"
        return f"{self.mean:+.4f} ± {self.deviation:.4f} ({self.error:.4f})"


def padded(losses: Losses, steps: int) -> Losses:
    """Losses of a run that may have ended early, one for every step."""
    return losses + [None] * (steps - len(losses))


def final_loss(run: Run, last: int) -> float:
    """Mean of the finite ones among the last losses; NaN if the run diverged."""
    finite = [loss for loss in run.losses()[-last:] if loss is not None]
    return math.nan if run.diverged_at() is not None else statistics.mean(finite)


if __name__ == "__main__":
    main()
