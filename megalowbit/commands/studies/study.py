r"""Compare recipes in a study: sizes × texts × lengths × seeds × recipes as a resumable grid of runs.

    megalowbit study configs/studies/gap.json --out runs/gap --jobs 2
    megalowbit study configs/studies/gap.json --out runs/gap --size 0.8M --seed 3 --list
    megalowbit study configs/studies/default.json --out runs/default --from docs/results/default.json
    megalowbit study --reproduce docs/results/default.json 0.8M,python,1500,nvfp4,3

Each cell of the grid is a run in its own folder, OUT/cells/NAME. Finished cells are not
run again, unfinished ones continue: to continue a study, run the same command again. To continue one of
another machine, give its study.json with --from. OUT/study.html, OUT/study.md and OUT/study.json have the
results of all finished cells; if the study has stresses, OUT/instability.md and OUT/instability.json tell
which recipe broke, and what warned of it. docs/studies.md describes the files.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.errors import UserError, unknown_name
from megalowbit.json_text import read_json_object
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.pretrain.stopping.signals import block_stop_signals
from megalowbit.pretrain.sweep.study.study_file import StudySettings, read_study
from megalowbit.shipped_files import job_templates, pretrain_script, shipped_folder, study_script

if TYPE_CHECKING:
    from megalowbit.pretrain.sweep.study.cells import Cell
    from megalowbit.pretrain.sweep.study.execution import Outcome
    from megalowbit.pretrain.sweep.study.texts import TextFacts

AXES = ("size", "text", "steps", "seed", "recipe")
EXIT_OTHER_RESULT = 1  # of --reproduce
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser.for_script(__doc__, "megalowbit study")
    parser.add_argument("study", type=Path, nargs="?", metavar="STUDY.json", help="description of the study")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the study (default: runs/NAME-study)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="J",
        help="cells at a time, with one thread each unless OMP_NUM_THREADS is set (default: %(default)s)",
    )
    for axis in AXES:
        parser.add_argument(
            f"--{axis}",
            action="append",
            default=[],
            metavar=axis.upper(),
            help=f"run only cells of this {axis}; repeat the flag for several (default: all)",
        )
    parser.add_argument(
        "--from",
        dest="kept",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="RESULTS.json",
        help="study.json files of earlier runs: their cells count as finished if nothing has changed",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the cells and which are finished; run nothing"
    )
    parser.add_argument(
        "--report", action="store_true", help="write the report of what is finished; run nothing"
    )
    parser.add_argument(
        "--slurm",
        type=Path,
        metavar="CLUSTER.json",
        help="write a job script of the unfinished cells, an array of J tasks at a time; run nothing",
    )
    parser.add_argument("--cell", metavar="NAME", help="run one cell in this process, without a report")
    parser.add_argument(
        "--reproduce",
        nargs=2,
        metavar=("RESULTS.json", "CELL"),
        help="run a cell of a study.json again, from that file alone, and compare",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=0.0,
        metavar="NATS",
        help="with --reproduce: the largest difference that is not an error (default: 0, every bit)",
    )
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = build_parser().parse_args(arguments)
        if not 0 <= options.within < math.inf:
            raise UserError(f"--within {options.within} is no difference in nats: use a number ≥ 0")
        if options.jobs < 1:
            raise UserError(f"--jobs {options.jobs} must be at least 1")
        if (options.study is None) == (options.reproduce is None):
            raise UserError("name either a STUDY.json or --reproduce RESULTS.json CELL; see --help")
        if options.kept and (options.reproduce is not None or options.cell is not None):
            raise UserError("--from goes with STUDY.json, not with --reproduce or --cell: leave it out")
        if options.reproduce is not None:
            return _reproduce(options)
        study = read_study(options.study)
        out = (options.out or Path("runs") / f"{options.study.stem}-study").resolve()
        if options.cell is not None:
            return _run_one(study, out, options.cell)
        return _run_grid(study, out, options)
    except KeyboardInterrupt:
        print("stopped: run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run_one(study: StudySettings, out: Path, name: str) -> int:
    block_stop_signals()  # before heavy imports
    from megalowbit.engine.process_start import import_deepspeed

    import_deepspeed(is_checked=False)  # before any other import of deepspeed, because this one sets it up
    from megalowbit.pretrain.sweep.study.cell_run import run_cell
    from megalowbit.pretrain.sweep.study.cells import cell_named
    from megalowbit.pretrain.sweep.study.execution import EXIT_STOPPED

    cell = cell_named(study, out, pretrain_script(), name)
    return 0 if run_cell(cell, _write_texts(study, [cell])[cell.text]) else EXIT_STOPPED


def _run_grid(study: StudySettings, out: Path, options: argparse.Namespace) -> int:
    from megalowbit.pretrain.sweep.instability.report import write_instability
    from megalowbit.pretrain.sweep.runs import make_folder
    from megalowbit.pretrain.sweep.study.cell_checks import check_pairs
    from megalowbit.pretrain.sweep.study.cells import cells_of, check_folder
    from megalowbit.pretrain.sweep.study.execution import Outcome, raise_failures
    from megalowbit.pretrain.sweep.study.report.written import write_report

    every = cells_of(study, out, pretrain_script())
    chosen = _chosen(every, options)
    if options.report:
        _check_selection(every, chosen, out)
    if options.kept:
        check_folder(every)
        make_folder(out)
        _take_over(study, chosen, options.kept)
    if not options.report:  # what is finished is reported
        check_pairs(chosen, every)
    if options.list:
        for cell in {cell.label: cell for cell in reversed(chosen)}.values():
            _ = cell.config  # a mistake in a recipe is an error here, too
        for cell in chosen:
            print(f"{'-' if cell.result() is None else 'finished':<10}{cell.name}")
        return 0
    check_folder(every)
    make_folder(out)
    if options.slurm is not None:
        return _write_job(study, chosen, options)
    outcome = Outcome() if options.report else _execute(study, chosen, options.study.resolve(), options.jobs)
    tables = write_report(study, read_json_object(options.study), every, out)
    if any(size.stress_of for size in study.sizes):
        tables += "\n\n" + write_instability(study, every, out, _diagnosis)
    print(f"\n{tables}\n\nresults: {out / 'study.html'} and study.json")
    raise_failures(outcome)
    return 0


def _diagnosis(run: Path) -> dict[str, Any]:
    """What `megalowbit diagnose` says about a run; one whose records were removed has none."""
    from megalowbit.findings.run_files import read_run
    from megalowbit.findings.verdict import diagnosis_of
    from megalowbit.pretrain.sweep.instability.tables import NO_RECORDS
    from megalowbit.records.files import METRICS

    if not (run / METRICS).exists():
        return {"state": NO_RECORDS, "first": None, "step": None}
    verdict = diagnosis_of(read_run(run))
    first = verdict.first
    return {
        "state": verdict.state,
        "first": None if first is None else first.name,
        "step": None if first is None else first.step,
    }


def _take_over(study: StudySettings, chosen: Sequence[Cell], files: Sequence[Path]) -> None:
    """Copy the chosen cells that earlier studies have finished; print a line for each file."""
    from megalowbit.pretrain.sweep.study.kept_results import read_kept, take_over
    from megalowbit.pretrain.sweep.study.results import Origin, made_with

    every = [read_kept(path) for path in files]
    facts = _write_texts(study, [cell for cell in chosen if any(cell.name in kept.results for kept in every)])
    present = Origin.model_validate(made_with(shipped_folder()))
    for kept in every:
        count = take_over(kept, chosen, facts, present)
        known = sum(cell.name in kept.results for cell in chosen)
        print(
            f"{kept.path}: {len(kept.results)} cells, {known} of them chosen here, {count} taken over",
            flush=True,
        )


def _execute(study: StudySettings, chosen: Sequence[Cell], study_file: Path, jobs: int) -> Outcome:
    """Run the cells that are not finished."""
    from megalowbit.pretrain.sweep.study.execution import execute, starter

    return execute(_prepared(study, chosen), jobs=jobs, start=starter(study_script(), study_file))


def _prepared(study: StudySettings, chosen: Sequence[Cell]) -> list[Cell]:
    """Check all cells and write their texts; returns those that are not finished."""
    from megalowbit.data.loader import count_samples
    from megalowbit.pretrain.sweep.study.cell_checks import check_heldout, check_layers

    facts = _write_texts(study, chosen)
    for cell in chosen:
        cell.check_settings(cell.settings(facts[cell.text]))
    for cell in {repr(each.config.settings.data): each for each in chosen}.values():
        count_samples(cell.config.settings.data)  # fills the cache before several processes do it at once
        check_heldout(cell)
    check_layers(chosen)
    left = [cell for cell in chosen if cell.result() is None]
    print(f"{len(chosen)} cells, {len(chosen) - len(left)} finished, {chosen[0].folder}", flush=True)
    return left


def _write_job(study: StudySettings, chosen: Sequence[Cell], options: argparse.Namespace) -> int:
    from megalowbit.cluster.script import STATE, STUDY_TEMPLATE, JobRequest, render_study
    from megalowbit.cluster.settings import load_cluster
    from megalowbit.durable_files import atomic_file

    settings, folder = load_cluster(options.slurm, []), chosen[0].folder
    request = JobRequest(
        ds_config=options.study.resolve(),
        folder=folder,
        script=study_script(),
        working_folder=Path.cwd(),
        python_folder=None if settings.container else Path(sys.executable).parent,
        sweep_limit=options.jobs,
    )
    names = [cell.name for cell in _prepared(study, chosen)]
    if not names:
        raise UserError("all chosen cells are finished: nothing to submit")
    template = (job_templates() / STUDY_TEMPLATE).read_text(encoding="utf-8")
    script, cells_file, listed = render_study(settings, request, names, template)
    job = folder / STATE / STUDY_TEMPLATE
    job.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((cells_file, listed), (job, script)):
        with atomic_file(path) as file:
            file.write(text)
    print(f"sbatch {job}\nafterwards: megalowbit study {options.study} --out {folder} --report")
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from megalowbit.pretrain.sweep.study.cells import cell_named
    from megalowbit.pretrain.sweep.study.execution import raise_failures
    from megalowbit.pretrain.sweep.study.kept_results import check_text
    from megalowbit.pretrain.sweep.study.reproduction import (
        check_settings,
        deviations,
        difference,
        has_equal_losses,
        other_processor,
        unpack,
        use_recorded_gemm,
    )

    results, name = Path(options.reproduce[0]), options.reproduce[1]
    out = (options.out or Path("runs") / f"{results.stem}-again").resolve()
    study_file, kept = unpack(results, name, out)
    recorded = kept.results[name]
    study = read_study(study_file)
    cell = cell_named(study, out, pretrain_script(), name)
    if cell.result() is not None:
        raise UserError(f"{cell.path} is finished already: use another --out, so that the cell runs again")
    if cell.text not in kept.content.texts:
        raise UserError(f"{results} does not say what the text {cell.text!r} is: restore the file")
    facts = _write_texts(study, [cell])[cell.text]
    check_text(kept.content.texts[cell.text], facts)
    check_settings(kept, cell, facts)
    use_recorded_gemm(recorded)
    raise_failures(_execute(study, [cell], study_file, 1))
    largest = 0.0
    print(f"  {'':<20}recorded  now")
    for what, before, now in deviations(recorded, cell):
        distance = difference(before, now)
        largest = max(largest, distance)
        print(f"  {what:<20}{before:.6f}  {now:.6f}{f'  {now - before:+.2e}' if distance else ''}")
    is_exact = not largest and has_equal_losses(recorded, cell)
    if largest > options.within or not (is_exact or options.within):
        commit = recorded.made_with.commit
        print(f"{name} differs by up to {largest:.2e} nats from that of commit {commit}")
        print(other_processor(recorded, cell), end="")
        return EXIT_OTHER_RESULT
    print(f"{name} is reproduced {'exactly' if is_exact else f'to {largest:.2e} nats'}")
    return 0


def _write_texts(study: StudySettings, cells: Sequence[Cell]) -> dict[str, TextFacts]:
    """Write the texts of these cells, unless they are there; what identifies them, by name."""
    from megalowbit.pretrain.sweep.study.texts import write_text

    folders = {cell.text: cell.text_folder for cell in cells}
    return {
        text.name: write_text(text, folders[text.name], heldout_bytes=study.heldout_bytes)
        for text in study.texts
        if text.name in folders
    }


def _check_selection(every: Sequence[Cell], chosen: Sequence[Cell], out: Path) -> None:
    """Refuse a selection for a report alone: a report has all finished cells of its folder."""
    selected = {cell.name for cell in chosen}
    others = [cell.name for cell in every if cell.name not in selected and cell.result() is not None]
    if others:
        raise UserError(
            f"--report has all finished cells of {out}, also {others[0]}, which the options do not select: "
            "leave them out, or report on a part with another --out and, once there is a study.json, "
            f"--from {out / 'study.json'}"
        )


def _chosen(cells: Sequence[Cell], options: argparse.Namespace) -> list[Cell]:
    """The cells that the options select."""
    for axis in AXES:
        known = dict.fromkeys(cell.axis(axis) for cell in cells)
        for each in getattr(options, axis):
            if each not in known:
                raise unknown_name(f"--{axis}", each, known)
    found = [
        cell
        for cell in cells
        if all(not getattr(options, axis) or cell.axis(axis) in getattr(options, axis) for axis in AXES)
    ]
    if not found:
        raise UserError("the options select no cell: leave one of them out")
    return found
