"""Examine machine and configuration before a run: what fails, what is risky, how long it takes.

    megalowbit doctor
    megalowbit doctor --ds-config llama3_8b_fp4 --processes 64 --target h100 --assume-mfu 0.35
    megalowbit doctor --ds-config X.json --run-dir /shared/runs/first --json doctor.json
    torchrun --nproc-per-node 8 -m megalowbit doctor --ds-config X.json
    srun megalowbit doctor --ds-config X.json

On several ranks, each looks at its host, and rank 0 prints one report. The exit code is 0 without problems, 1
with problems, and 2 for a mistake in the arguments or the configuration. See docs/doctor.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.durable_files import atomic_file, refuse_special_file
from megalowbit.errors import UserError, shown
from megalowbit.one_line_parser import OneLineParser
from megalowbit.pretrain.command_line import SHUTDOWN_SECONDS, prepare_environment, run_command
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS, StartSignals
from megalowbit.shipped_files import find_config, to_stderr

if TYPE_CHECKING:
    from megalowbit.doctor.examine import Examination
    from megalowbit.pretrain.config import PretrainConfig

EXIT_PROBLEMS = 1
LEAST_MFU = 1e-4
UNFINISHED = "the end of the examination"
NEEDED = ("torch", "deepspeed", "transformers")
COLLECTIVE_SECONDS = 600.0  # a rank that is later than this is lost; rank 0 reads a model meanwhile


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit doctor")
    parser.add_argument(
        "--ds-config",
        "--deepspeed_config",
        type=Path,
        metavar="X.json",
        help="the run's configuration, or the name of one that comes with megalowbit (default: examine the "
        "machine only)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value of the configuration, as for pretrain",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes of the run (default: the number started, or the smallest that fits)",
    )
    parser.add_argument(
        "--target",
        metavar="KIND",
        help="judge the run for this kind of GPU: a100, a100-40gb, h100, h200, b200, b300, gb200, gb300, "
        "mi300x, mi325x, mi350x or mi355x (default: this machine)",
    )
    _add_more(parser)
    return parser


def _add_more(parser: argparse.ArgumentParser) -> None:
    """Add what to assume, what to measure, and where to write."""
    parser.add_argument(
        "--assume-mfu",
        type=float,
        metavar="F",
        help="model FLOPs utilisation, such as 0.35, in the place of the roofline's",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run, whose disk is measured (default: runs)",
    )
    parser.add_argument(
        "--no-measurements", action="store_true", help="measure neither the disk nor the network"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report as JSON; -: print only that"
    )
    # launchers add these; ranks are read from the environment instead
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    verdicts: list[bool] = []

    def work(identity: ProcessIdentity) -> None:
        verdicts.append(_examine(build_parser().parse_args(arguments), identity))

    code = run_command(work, lambda: f"interrupted before {UNFINISHED}")
    return code or (EXIT_PROBLEMS if verdicts and verdicts[0] else 0)


def _examine(options: argparse.Namespace, identity: ProcessIdentity) -> bool:
    """Examine and report; whether there are problems, on every rank."""
    _check(options)
    config = None if options.ds_config is None else _config(options, identity)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} cannot be found, so no run can start: pip install megalowbit"
        )
    prepare_environment()
    if identity.is_main:
        to_stderr("start     importing torch and DeepSpeed")
    with StartSignals(is_main=identity.is_main, before=UNFINISHED, ending=STOP_SIGNALS):
        return _together(options, identity, config)


def _check(options: argparse.Namespace) -> None:
    mfu, processes = options.assume_mfu, options.processes
    if mfu is not None and not LEAST_MFU <= mfu <= 1:
        hint = f"; {mfu:g} % is {mfu / 100:g}" if 1 < mfu <= 100 else ""
        raise UserError(f"--assume-mfu {mfu:g} must be at least {LEAST_MFU:g} and at most 1{hint}")
    if processes is not None and processes < 1:
        raise UserError(f"--processes {processes} must be at least 1")
    needing = {
        "--set": options.overrides,
        "--processes": processes,
        "--target": options.target,
        "--assume-mfu": mfu,
    }
    for name, value in needing.items():
        if value and options.ds_config is None:
            raise UserError(f"{name} is about a run: name its configuration with --ds-config")
    if options.target is not None:
        from megalowbit.doctor.target import named_target

        named_target(options.target)
    if options.run_dir is not None:
        try:
            options.run_dir = options.run_dir.expanduser()
            options.run_dir.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # a long name; no such home; a null byte
            raise UserError(
                f"--run-dir {shown(str(options.run_dir))} is not a valid path ({error}): name another"
            ) from None
    if options.json is not None and str(options.json) != "-":
        refuse_special_file(options.json, "--json")
        if not options.json.absolute().parent.is_dir():
            raise UserError(
                f"--json {shown(str(options.json))} is in no folder that exists: name another file"
            )


def _config(options: argparse.Namespace, identity: ProcessIdentity) -> PretrainConfig:
    from megalowbit.pretrain.config import load_config

    path = find_config(options.ds_config, to_stderr if identity.is_main else lambda _: None)
    count = options.processes or (identity.world_size if identity.world_size > 1 else None)
    return load_config(path, options.overrides, world_size=count)


def _together(options: argparse.Namespace, identity: ProcessIdentity, config: PretrainConfig | None) -> bool:
    from megalowbit.distributed.agreement import agree
    from megalowbit.doctor.examine import Request, examine, look_around
    from megalowbit.doctor.target import named_target
    from megalowbit.engine.process_start import import_deepspeed, start_process_group, stop_process_group
    from megalowbit.pretrain.run import report_lost_ranks

    is_job = identity.world_size > 1
    is_cpu_chosen = os.environ.get("DS_ACCELERATOR") == "cpu"  # the import below may set it
    import_deepspeed(is_checked=False)  # before any other import of deepspeed, because this one sets it up
    request = Request(
        config=config,
        target=None if options.target is None else named_target(options.target),
        assumed_mfu=options.assume_mfu,
        folder=options.run_dir,
        measures=not options.no_measurements,
        is_cpu_chosen=is_cpu_chosen,
    )
    if identity.is_main and sys.stderr.isatty():
        to_stderr("start     looking at software, kernels and disk" + ", and measuring the network" * is_job)
    if not is_job:
        around = look_around(request)
        if config is not None and sys.stderr.isatty():
            to_stderr("start     building the model without weights, and estimating its memory and time")
        return _report(options, examine(request, around))
    with report_lost_ranks(identity):
        start_process_group(identity, timeout=timedelta(seconds=COLLECTIVE_SECONDS), checks_versions=False)
        around = look_around(request)
        has_problems: bool = agree(lambda: _report(options, examine(request, around)))
    stop_process_group(timedelta(seconds=SHUTDOWN_SECONDS))
    return has_problems


def _report(options: argparse.Namespace, found: Examination) -> bool:
    """Print and write the report; whether there are problems."""
    from megalowbit.doctor.report import to_json, to_text

    text = "" if options.json is None else json.dumps(to_json(found), indent=1, ensure_ascii=False)
    if str(options.json) == "-":
        print(text)
    else:
        print(to_text(found))
    if options.json is not None and str(options.json) != "-":
        try:
            with atomic_file(options.json) as file:
                file.write(text + "\n")
        except OSError as error:
            raise UserError(
                f"--json {options.json} cannot be written ({error.strerror}): name another file"
            ) from error
    sys.stdout.flush()
    return bool(found.problems)
