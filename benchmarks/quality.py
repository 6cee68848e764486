"""Loss of recipes against bf16, paired by seed: the cost of low precision, and its error.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/quality.py --out /tmp/quality --seed 1 --seed 2 --seed 3 --seed 4 \\
        --recipe nvfp4 --recipe nvidia-nvfp4 --recipe '{"base": "mxfp4", "keep_last": 1}'

Without --recipe, all named recipes run. Every run is a separate process of launch/pretrain.py with one
thread. A run that diverges is marked, and the sweep continues.

Runs of one seed have the same initial weights and the same batches. A gap to bf16 is therefore taken within a
seed, and its error is that of the gaps over the seeds. The table keeps the order of the recipes and ranks
nothing. A gap smaller than twice its standard error is marked. With two or three seeds that error is itself
only a guess, so use more. To continue an interrupted sweep, start it again with the same --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from timing import positive

import megalowbit as mlb
from megalowbit.data.loader import count_samples
from megalowbit.pretrain.sweep.runs import LEAN, Gap, Losses, Run, execute, folder_name, make_folder

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "launch" / "pretrain.py"
PEER = "bf16"
WITHOUT_KERNELS = ("quartet-2",)  # many times as slow as the others: runs if it is named
RECIPES = tuple(name for name in mlb.recipes() if name not in (PEER, *WITHOUT_KERNELS))
SEEDS = (1, 2, 3)


def main() -> None:
    options = arguments()
    draw = None if options.no_picture else drawing(options.parser)
    recipes = {PEER: PEER, **labelled(options.recipe or RECIPES, options.parser)}
    seeds = list(dict.fromkeys(options.seed or SEEDS))
    runs = planned(recipes, seeds, options)
    try:
        make_folder(options.out)
        config = runs[0].resolved()
        count_samples(config.settings.data)  # fills the cache once, before several processes do
    except mlb.UserError as error:
        options.parser.error(str(error))
    steps = config.settings.run.steps
    counts = f"{len(recipes)} recipes × {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    print(f"{counts}, {steps} steps of {options.config.name}, {options.out}")
    results = {label: {run.seed: run for run in runs if run.label == label} for label in recipes}
    try:
        execute([run for run in runs if not run.is_complete()], jobs=options.jobs)
        text = table(results, last=min(options.last, steps), steps=steps)
    except mlb.UserError as error:
        sys.exit(f"error: {error}")
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
        help="a name, or a block as JSON; repeat the flag for several (default: all named ones "
        f"but {', '.join(WITHOUT_KERNELS)}; {PEER} always runs)",
    )
    parser.add_argument(
        "--seed",
        action="append",
        type=positive,
        help="seed of weights and data; repeat the flag for several, which standard errors need "
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
        help="number of last steps whose mean loss is compared (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs", type=positive, default=2, help="runs at a time, each with one thread (default: %(default)s)"
    )
    parser.add_argument("--no-picture", action="store_true", help="table only, without matplotlib")
    options = parser.parse_args()
    options.parser, options.config, options.out = parser, options.config.resolve(), options.out.resolve()
    return options


def drawing(parser: argparse.ArgumentParser) -> Any:
    """The plotting function; a missing package is reported before the first run, not after the last."""
    try:
        from curves import draw
    except ImportError as error:
        parser.error(f"{error}: pip install -c constraints.txt -e '.[bench]', or use --no-picture")
    return draw


def labelled(values: list[str] | tuple[str, ...], parser: argparse.ArgumentParser) -> dict[str, str]:
    """Recipes by name, in the form that `--set` takes."""
    found: dict[str, str] = {}
    for value in values:
        try:
            name = mlb.recipe(json.loads(value) if value.startswith("{") else value).name
        except ValueError as error:  # a UserError, or invalid JSON
            parser.error(f"argument --recipe: {error}")
        if found.setdefault(name, value) != value:
            parser.error(f'two recipes are called {name!r}: set "name" in one of the blocks')
    return found


def planned(recipes: dict[str, str], seeds: list[int], options: argparse.Namespace) -> list[Run]:
    """All runs, seed by seed."""
    overrides = [*LEAN]
    if options.steps:
        overrides.append(f"megalowbit.run.steps={options.steps}")
    return [
        Run(
            label=label,
            seed=seed,
            folder=options.out / folder_name(label, seed),
            config=options.config,
            overrides=(*overrides, f"megalowbit.run.seed={seed}", f"megalowbit.recipe={value}"),
            program=PROGRAM,
        )
        for seed in seeds
        for label, value in recipes.items()
    ]


def table(results: dict[str, dict[int, Run]], *, last: int, steps: int) -> str:
    """Mean losses by recipe and seed, their gaps to bf16, and the pairs that cannot be distinguished."""
    finals = {
        label: {seed: run.final_loss(last) for seed, run in by_seed.items()}
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
    lines.append("  ≈ smaller than twice its standard error   ? one seed, so the error is unknown")
    for run in itertools.chain.from_iterable(by_seed.values() for by_seed in results.values()):
        if (step := run.diverged_at()) is not None:
            lines.append(f"  {run.label}, seed {run.seed}, diverged at step {step}")
    others = [label for label in finals if label != PEER and not math.isnan(sum(finals[label].values()))]
    for one, two in itertools.combinations(others, 2):
        gap = Gap.between(finals[one], finals[two])
        if gap.mark:
            lines.append(f"  {one} and {two} cannot be distinguished: {gap} {gap.mark.strip()}")
    return "\n".join(lines)


def padded(losses: Losses, steps: int) -> Losses:
    """One loss for every step: `None` for the missing steps of a run that ended early."""
    return losses + [None] * (steps - len(losses))


if __name__ == "__main__":
    main()
