r"""Compare recipes in a study: sizes × texts × lengths × seeds × recipes as a resumable grid of runs.

    python tools/study.py configs/studies/gap.json --out runs/gap --jobs 2
    python tools/study.py configs/studies/gap.json --out runs/gap --size 0.8M --seed 1 --list

Each cell of the grid is a run of launch/pretrain.py in its own folder, `OUT/cells/NAME`. Finished cells are
not run again, unfinished ones continue. To continue a study, run the same command again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.errors import (
    EXIT_TRANSIENT,
    EXIT_USER_ERROR,
    TransientError,
    UserError,
    printed,
    unknown_name,
)
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.command_line import OneLineParser, escape_unprintable_output
from megalowbit.pretrain.stopping.signals import block_stop_signals
from megalowbit.pretrain.sweep.study.study_file import StudySettings, read_study

if TYPE_CHECKING:
    from megalowbit.pretrain.sweep.study.cells import Cell

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "launch" / "pretrain.py"
AXES = ("size", "text", "steps", "seed", "recipe")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser.for_script(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY.json", help="description of the study")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the study (default: runs/NAME-study)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="J", help="cells at a time (default: %(default)s)"
    )
    for axis in AXES:
        parser.add_argument(
            f"--{axis}",
            action="append",
            default=[],
            help=f"run cells of this {axis} only; repeat the flag for several",
        )
    parser.add_argument(
        "--list", action="store_true", help="print the chosen cells and whether they are finished"
    )
    parser.add_argument("--cell", metavar="NAME", help="run this cell, in this process")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    escape_unprintable_output()
    try:
        options = build_parser().parse_args(arguments)
        study = read_study(options.study)
        out = (options.out or Path("runs") / f"{options.study.stem}-study").resolve()
        if options.cell is not None:
            return _run_one(study, out, options.cell)
        return _run_grid(study, out, options)
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("stopped: run the same command again to continue", file=sys.stderr)
        return 130


def _run_one(study: StudySettings, out: Path, name: str) -> int:
    block_stop_signals()  # before heavy imports
    from megalowbit.engine.process_start import import_deepspeed

    import_deepspeed(is_checked=False)
    from megalowbit.pretrain.sweep.study.cell_run import run_cell
    from megalowbit.pretrain.sweep.study.cells import cells_of
    from megalowbit.pretrain.sweep.study.execution import EXIT_STOPPED
    from megalowbit.pretrain.sweep.study.texts import write_text

    known = {cell.name: cell for cell in cells_of(study, out, PROGRAM)}
    if name not in known:
        raise unknown_name("cell", name, known)
    cell = known[name]
    text = next(each for each in study.texts if each.name == cell.text)
    facts = write_text(text, cell.text_folder, heldout_bytes=study.heldout_bytes)
    return 0 if run_cell(cell, facts) else EXIT_STOPPED


def _run_grid(study: StudySettings, out: Path, options: argparse.Namespace) -> int:
    from megalowbit.data.loader import count_samples
    from megalowbit.pretrain.sweep.runs import make_folder
    from megalowbit.pretrain.sweep.study.cells import TEXTS, cells_of
    from megalowbit.pretrain.sweep.study.execution import execute, raise_failures, starter
    from megalowbit.pretrain.sweep.study.report import write_report
    from megalowbit.pretrain.sweep.study.texts import write_text

    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} must be at least 1")
    every = cells_of(study, out, PROGRAM)
    chosen = _chosen(every, options)
    if options.list:
        for cell in chosen:
            print(f"{'finished' if cell.result() else '-':<10}{cell.name}")
        return 0
    make_folder(out)
    facts = {
        text.name: write_text(text, out / TEXTS / text.name, heldout_bytes=study.heldout_bytes)
        for text in study.texts
        if any(cell.text == text.name for cell in chosen)
    }
    for cell in chosen:
        cell.check_settings(cell.settings(facts[cell.text]))
    for data in {cell.text: cell.config.settings.data for cell in chosen}.values():
        count_samples(data)  # fills the cache before several processes would do it at once
    left = [cell for cell in chosen if cell.result() is None]
    print(f"{len(chosen)} cells, {len(chosen) - len(left)} finished, {out}", flush=True)
    outcome = execute(
        left, jobs=options.jobs, start=starter(Path(__file__).resolve(), options.study.resolve())
    )
    print(
        f"\n{write_report(study, read_json_object(options.study), every, out)}\n\nresults: {out / 'study.json'}"
    )
    raise_failures(outcome)
    return 0


def _chosen(cells: list[Cell], options: argparse.Namespace) -> list[Cell]:
    """The cells that the options select."""
    values: dict[str, Any] = {
        "size": lambda cell: cell.size.name,
        "text": lambda cell: cell.text,
        "steps": lambda cell: str(cell.steps),
        "seed": lambda cell: str(cell.seed),
        "recipe": lambda cell: cell.label,
    }
    for axis, value in values.items():
        wanted, known = getattr(options, axis), dict.fromkeys(map(value, cells))
        for each in wanted:
            if each not in known:
                raise unknown_name(f"--{axis}", each, known)
    return [
        cell
        for cell in cells
        if all(
            not getattr(options, axis) or value(cell) in getattr(options, axis)
            for axis, value in values.items()
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
