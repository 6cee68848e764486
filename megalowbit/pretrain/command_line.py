"""The command line of pretraining: arguments in, exit code out.

A mistake of the user ends as one line and exit code 2 and never as a traceback, a lost rank as one line and
code 75: another try may help. Launchers distort codes, so the line of a mistake also goes to the file that
MEGALOWBIT_REFUSAL names, for whoever would start the job again. Anything else that raises is a defect of ours
and keeps its traceback. The configuration is checked before torch is imported, so a typing mistake
is answered at once and nothing has been allocated, joined or written by then.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalowbit.distributed.process_group import ProcessIdentity, identify
from megalowbit.durable_files import atomic_file
from megalowbit.errors import EXIT_TRANSIENT, EXIT_USER_ERROR, TransientError, UserError, lines_of, printed
from megalowbit.pretrain.stopping.launcher import LauncherWatch, is_launched
from megalowbit.pretrain.stopping.signals import StartSignals, block_stop_signals, release_stop_signals

if TYPE_CHECKING:
    from megalowbit.pretrain.config import PretrainConfig

EXIT_INTERRUPTED = 128 + signal.SIGINT
REFUSAL = "MEGALOWBIT_REFUSAL"  # names a file for the line of a mistake, if there is one
# Launchers stop all ranks when one fails: the main rank must get to print first.
MAIN_RANK_HEAD_START_SECONDS = 5.0
SHUTDOWN_SECONDS = 60.0


def escape_unprintable_output() -> None:
    """Let standard output write an escape for a character that it lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class OneLineParser(argparse.ArgumentParser):
    """A parser of arguments whose complaints are `UserError`s, as of all our command lines."""

    @classmethod
    def for_script(cls, text: str | None) -> OneLineParser:
        """A parser whose help is a program's own text: the first paragraph, and after the flags the rest."""
        description, _, examples = str(text).partition("\n\n")
        return cls(
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"{message}; see --help")


def build_parser() -> argparse.ArgumentParser:
    """The arguments of `launch/pretrain.py`."""
    parser = OneLineParser(
        prog="pretrain.py",
        description="Pretrain a language model in FP4, under deepspeed, torchrun, srun or plain python.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ds-config",
        "--deepspeed_config",
        type=Path,
        required=True,
        metavar="X.json",
        help='DeepSpeed configuration with a "megalowbit" block',
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value, e.g. --set megalowbit.recipe=bf16 --set megalowbit.run.steps=100",
    )
    _add_run_arguments(parser)
    # Launchers add these; ranks are read from the environment instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run writes, how it begins, and what may be done in its place."""
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where the run writes (default: a new folder below runs/)"
    )
    parser.add_argument(
        "--resume",
        choices=("no", "auto"),
        default="no",
        help="auto: continue from the newest complete checkpoint, or start if there never was one "
        "(default: no)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="begin again at step 0: what the run in --run-dir has written moves to before-restart-1 in it",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, the swapped layers, sizes and memory, and exit",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="with --dry-run: size the run for N processes (default: those started, or the fewest that fit)",
    )
    parser.add_argument(
        "--prepare-data",
        action="store_true",
        help="tokenise the corpus into the cache and exit: once, before a large corpus meets many processes",
    )


def program() -> int:
    """The command line as a process of its own, which stop signals are sent to; returns the exit code."""
    block_stop_signals()  # before heavy imports, whose threads inherit it
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # taking down groups whose ranks are gone can hang, or abort with another code
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    identity = ProcessIdentity()
    escape_unprintable_output()
    try:
        identity = identify()
        options = build_parser().parse_args(arguments)
        _run(options, identity)
    except UserError as error:
        _report(error, identity)
        if error.is_on_all_ranks:
            _shut_down_together()
        return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        if identity.is_main:
            _say("interrupted: continue from the last checkpoint with --resume auto")
        return EXIT_INTERRUPTED
    return 0


def _run(options: argparse.Namespace, identity: ProcessIdentity) -> None:
    from megalowbit.pretrain.config import load_config

    if options.restart and options.resume == "auto":
        raise UserError("--restart and --resume auto exclude each other: leave one of them out")
    config = load_config(options.ds_config, options.overrides, world_size=_world_size(options, identity))
    _limit_threads()
    # or torch prints its stack on every rank when a main process is lost; read when it is first imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.dry_run or options.prepare_data:
        release_stop_signals()
        with StartSignals(is_main=identity.is_main):
            _describe_or_prepare(options, config, identity)
        return
    settings = config.parts.settings.watchdog
    is_watched = is_launched() if settings.stop_with_launcher is None else settings.stop_with_launcher
    with ExitStack() as stack:
        launcher = stack.enter_context(LauncherWatch()) if is_watched else None
        has_ended = None if launcher is None else lambda: launcher.has_ended
        start = StartSignals(is_main=identity.is_main, has_launcher_ended=has_ended)
        stack.enter_context(start)
        _pretrain(options, config, identity, start, launcher)


def _describe_or_prepare(
    options: argparse.Namespace, config: PretrainConfig, identity: ProcessIdentity
) -> None:
    """What needs one process only."""
    if not identity.is_main:
        return
    if options.dry_run:
        from megalowbit.pretrain.estimate.dry_run import describe

        print(describe(config))
        return
    from megalowbit.data.loader import count_samples
    from megalowbit.pretrain.checks import check_config

    check_config(config)
    data = config.settings.data
    count = count_samples(data)
    print(f"{count:,} sequences of {data.sequence_length} tokens are ready in {data.cache_dir}")


def _pretrain(
    options: argparse.Namespace,
    config: PretrainConfig,
    identity: ProcessIdentity,
    start: StartSignals,
    launcher: LauncherWatch | None,
) -> None:
    from megalowbit.engine.process_start import import_deepspeed, stop_process_group

    import_deepspeed(is_checked=False)  # first of all imports that lead to it, for it is set up on the way
    from megalowbit.pretrain.run import pretrain

    pretrain(
        config,
        identity,
        run_dir=options.run_dir,
        is_resume=options.resume == "auto",
        is_restart=options.restart,
        report=lambda error: _report(error, identity),
        at_first_step=start.stop,
        has_launcher_ended=None if launcher is None else lambda: launcher.has_ended,
    )
    stop_process_group(timedelta(seconds=SHUTDOWN_SECONDS))  # all work is done: none is missed for long


def _world_size(options: argparse.Namespace, identity: ProcessIdentity) -> int | None:
    """Processes of the run; None where it is yet to be started, and any number that fits will do."""
    if options.processes is not None:
        if not options.dry_run or options.processes < 1:
            raise UserError(
                f"--processes {options.processes} sizes a run for --dry-run: add that, and give at least 1; "
                "a run takes their number from its launcher"
            )
        return int(options.processes)
    is_only_prepared = options.prepare_data or (options.dry_run and identity.world_size == 1)
    return None if is_only_prepared else identity.world_size


def _limit_threads() -> None:
    """Give each process of this node its part of the cores, where nobody has said otherwise.

    The DeepSpeed launcher leaves OMP_NUM_THREADS alone, and two processes with a thread per core each run
    several times slower than with half of them.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    local_world_size = next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdecimal()), 1)
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    threads = max(1, cores // max(1, local_world_size))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read by torch when it is first imported


def _report(error: UserError, identity: ProcessIdentity) -> None:
    """Print the line once for the whole job, and leave it where the job's script looks."""
    line, is_transient = printed(error), isinstance(error, TransientError)
    if identity.is_main and REFUSAL in os.environ and not is_transient:
        _write_refusal(Path(os.environ[REFUSAL]), "; ".join(lines_of(error)))
    if error.is_reported or (error.is_on_all_ranks and not identity.is_main):
        return
    if identity.is_main or is_transient:
        _say(f"error: {line}")
    else:
        if threading.current_thread() is threading.main_thread():  # a watchdog's is here to end us now
            time.sleep(MAIN_RANK_HEAD_START_SECONDS)
        _say(f"error on rank {identity.rank}: {line}")


def _say(line: str) -> None:
    with suppress(OSError):  # whoever read it may have ended; the exit code counts
        print(line, file=sys.stderr, flush=True)


def _write_refusal(path: Path, line: str) -> None:
    try:
        with atomic_file(path) as file:
            file.write(line + "\n")
    except OSError as error:
        print(f"{REFUSAL}={path} could not be written ({error.strerror})", file=sys.stderr, flush=True)


def _shut_down_together() -> None:
    """End the process group on all ranks, so that none is aborted by the end of another; within seconds."""
    from megalowbit.engine.process_start import stop_process_group

    stop_process_group(timedelta(seconds=MAIN_RANK_HEAD_START_SECONDS))
