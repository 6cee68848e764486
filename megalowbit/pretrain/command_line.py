"""The command line of pretraining: parses arguments, runs, and returns the exit code.

A user error prints one line and exits with code 2, without a traceback; the line is also written to the file
named by MEGALOWBIT_REFUSAL, because launchers change exit codes. A lost rank prints one line and exits with
75: another attempt may succeed. Any other exception is a bug of this project and keeps its traceback. The
configuration is checked before torch is imported, so a typo is reported before anything is written.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.collector import collector_paused
from megalowbit.distributed.process_group import ProcessIdentity, identify, local_size
from megalowbit.durable_files import atomic_file
from megalowbit.errors import (
    EXIT_TRANSIENT,
    EXIT_USER_ERROR,
    TransientError,
    UserError,
    lines_of,
    printed,
    shown,
)
from megalowbit.one_line_parser import OneLineParser
from megalowbit.pretrain.stopping.launcher import LauncherWatch, is_launched
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS, StartSignals, block_stop_signals
from megalowbit.shipped_files import find_config, to_stderr
from megalowbit.standard_streams import run_until_unread
from megalowbit.telemetry.settings import BAR, HELP_OF_UI, UIS

if TYPE_CHECKING:
    from megalowbit.pretrain.config import PretrainConfig

EXIT_INTERRUPTED = 128 + signal.SIGINT
TALKATIVE = ("torchao", "torch.utils._pytree")  # loggers that warn of kernels and enums that nothing needs
REFUSAL = "MEGALOWBIT_REFUSAL"  # names the file that gets the line of a user error
# Launchers stop all ranks when one fails, so other ranks give the main rank time to print first.
MAIN_RANK_HEAD_START_SECONDS = 5.0
SHUTDOWN_SECONDS = 60.0
BENCHMARK_STEPS = 20
PROFILE = "megalowbit.profile"
# the table in docs/spectral.md, without "--": keys of the configuration, and others
METIS_FLAGS = """
    enable-lowbit q-forward-input q-forward-weight q-backward-input q-backward-weight q-backward-outputgrad
    q-scalar enable-backward-svd backward-lowrank-svd backward-lowrank-niter backward-longtail-schedule
    backward-broadcast-dim enable-activation-svd activation-lowrank-svd activation-lowrank-niter
    activation-longtail-schedule activation-broadcast-dim gradacc-broadcast gradacc-broadcast-steps
    use-power-iter activation-metis-mode gout-metis-mode enable-forward-svd forward-svd-rank
    forward-svd-warmup-steps forward-svd-merge-steps merged-lr enable-forward-svd-intime
    forward-lowrank-svd-intime enable-nv-recipe reg-lambda reg-alpha1 reg-alpha2 grad-clipping lr
    lr-warmup-steps weight-decay adam-beta1 adam-beta2 grad-acc batch-size train-steps save-steps seed
    win-size model layers embed-dim heads vocab-size dropout-prob n-kv-heads norm-eps rope-theta multiple-of
    ffn-dim-multiplier dataset-path tokenizer-path chkpt-dir log-dir tag new-tag load-from load-args-from
"""
WITHOUT_COUNTERPART = "tp-simulate enable-te max-epochs shuffle dataset-workers device reg-beta"
HELP = """Pretrain a language model in FP4. Start it with deepspeed, torchrun, srun or by itself.

    megalowbit pretrain --ds-config gpt2_tiny_fp4 --run-dir runs/first
    megalowbit pretrain --ds-config X.json --dry-run --processes 8
    megalowbit pretrain --ds-config X.json --run-dir runs/first --resume auto
    deepspeed --module megalowbit pretrain --ds-config X.json
    torchrun --nproc-per-node 8 -m megalowbit pretrain --ds-config X.json
"""


class PretrainParser(OneLineParser):
    """Says of a flag of Metis where its setting is here, before it asks for `--ds-config`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, but for a flag of Metis."""
        for flag in (word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)):
            name = flag[2:].replace("_", "-") if flag.startswith("--") else ""
            if name in METIS_FLAGS.split():
                what = "is a key of the configuration here: docs/spectral.md names it"
            elif name in WITHOUT_COUNTERPART.split():
                what = "has no key in the configuration here: docs/spectral.md says what replaces it"
            else:
                continue
            raise UserError(f"{flag} {what}, in the table of Metis's command line")
        return super().parse_known_args(args, namespace)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of `megalowbit pretrain` and `launch/pretrain.py`."""
    parser = PretrainParser.for_script(HELP, "megalowbit pretrain")
    parser.add_argument(
        "--ds-config",
        "--deepspeed_config",
        type=Path,
        required=True,
        metavar="X.json",
        help='DeepSpeed configuration with a "megalowbit" block, or the name of one that comes with '
        "megalowbit, such as gpt2_tiny_fp4",
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
    _add_measuring_arguments(parser)
    parser.add_argument("--ui", choices=UIS, default=BAR, help=HELP_OF_UI)
    parser.add_argument(
        "--verbose", action="store_true", help="also print other libraries' remarks at import"
    )
    # Launchers add these; ranks are read from the environment instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the run folder, resuming, restarting, `--dry-run` and `--prepare-data`."""
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the run (default: a new one below runs/)"
    )
    parser.add_argument(
        "--resume",
        choices=("no", "auto"),
        default="no",
        help="auto: continue from the newest complete checkpoint, or start a new run if none was ever saved "
        "(default: no)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start over at step 0; the files of the run in --run-dir move to before-restart-1 in it",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, the converted layers, model size and estimated memory; "
        "then exit",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="with --dry-run: describe a run of N processes (default: the number started, or the smallest "
        "that fits the configuration)",
    )
    parser.add_argument(
        "--prepare-data",
        action="store_true",
        help="tokenise the corpus and the text for validation into the cache and exit; do this once before "
        "many processes train on a large corpus",
    )


def _add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--profile` and `--benchmark`."""
    parser.add_argument(
        "--profile",
        nargs="?",
        const=True,
        metavar="FIRST[:STEPS]",
        help="write a trace of some steps to profile/ in the run folder, e.g. --profile 20:3 (default: 3 "
        "steps after the first 5); sets megalowbit.profile",
    )
    parser.add_argument(
        "--benchmark",
        nargs="?",
        const=BENCHMARK_STEPS,
        type=int,
        metavar="STEPS",
        help="time this many steps on random tokens, print a summary and exit; reads no data and writes no "
        f"checkpoints (default: {BENCHMARK_STEPS} steps)",
    )


def with_profile(overrides: list[str], text: str | bool | None, path: Path) -> list[str]:
    """The overrides of `--set` and of `--profile 20:3`, which keeps other keys of the section.

    Args:
        overrides: of `--set`.
        text: of `--profile`; True: it has no value; None: there is none.
        path: the configuration, which may have the section too.

    Raises:
        UserError: `text` is not of this form, or the file is not valid JSON.
    """
    from megalowbit.config.deepspeed_json import load_json

    if text is None:
        return overrides
    given = []
    if isinstance(text, str):
        found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if found is None:
            raise UserError(
                f"--profile {shown(text)} is not FIRST or FIRST:STEPS: write for example --profile 20:3"
            )
        values = zip(("first_step", "steps"), found.groups(), strict=True)
        given = [f"{PROFILE}.{name}={int(value)}" for name, value in values if value is not None]
    block = load_json(path).get("megalowbit")
    has_section = isinstance(block, dict) and block.get("profile") is not None
    turned_on = [] if has_section else [f"{PROFILE}.first_step=null"]
    return [*turned_on, *overrides, *given]


def program(command: Callable[[], int] | None = None) -> int:
    """Run a command line in a process that may get stop signals; returns 0 and exits with other codes.

    `command` returns the exit code; None: `main`.
    """
    block_stop_signals()  # before heavy imports: their threads inherit the signal mask
    try:
        code = run_until_unread(command or main)
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # destroying process groups with lost ranks can hang, or abort with another code
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = argparse.Namespace()

    def work(identity: ProcessIdentity) -> None:
        _run(build_parser().parse_args(arguments, options), identity)

    return run_command(work, lambda: _interrupted(options))


def run_command(work: Callable[[ProcessIdentity], None], interrupted: Callable[[], str]) -> int:
    """Call `work` with this process's identity and report its errors; returns the exit code.

    `interrupted` says what Ctrl-C has ended.
    """
    identity = ProcessIdentity()
    try:
        identity = identify()
        work(identity)
    except UserError as error:
        _report(error, identity)
        if error.is_on_all_ranks:
            _shut_down_together()
        return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        if identity.is_main:
            _print_error(interrupted())
        return EXIT_INTERRUPTED
    return 0


def _interrupted(options: argparse.Namespace) -> str:
    """What Ctrl-C has ended; `options` is empty if they have not been read."""
    if not vars(options):
        return "interrupted before the command line was read"
    if unfinished := _unfinished(options):
        return f"interrupted before {unfinished}"
    return (
        "interrupted: --resume auto continues from the last checkpoint, or starts at step 0 if none was saved"
    )


def _unfinished(options: argparse.Namespace) -> str:
    """What has not happened when a command that saves nothing is ended; empty for a run."""
    if options.benchmark is not None:
        return "the end of the benchmark; no figures are written"
    if options.dry_run:
        return "the end of the dry run"
    return "the data were ready" if options.prepare_data else ""


def _run(options: argparse.Namespace, identity: ProcessIdentity) -> None:
    from megalowbit.pretrain.config import load_config

    if options.restart and options.resume == "auto":
        raise UserError("--restart and --resume auto cannot be combined: leave one of them out")
    if options.benchmark is not None:
        _check_benchmark(options)
    trains_nothing = options.dry_run or options.prepare_data
    announce = to_stderr if trains_nothing else functools.partial(print, flush=True)
    path = find_config(options.ds_config, announce if identity.is_main else lambda _: None)
    overrides = with_profile(options.overrides, options.profile, path)
    config = load_config(path, overrides, world_size=_world_size(options, identity))
    prepare_environment(is_verbose=options.verbose)
    if identity.is_main:
        _announce_imports(is_progress=trains_nothing)
    if trains_nothing:
        with StartSignals(is_main=identity.is_main, before=_unfinished(options), ending=STOP_SIGNALS):
            _look_only(options, config, identity)
        return
    if options.benchmark is not None:
        _benchmark(options, config, identity)
        return
    settings = config.parts.settings.watchdog
    is_watched = is_launched() if settings.stop_with_launcher is None else settings.stop_with_launcher
    with ExitStack() as stack:
        launcher = stack.enter_context(LauncherWatch()) if is_watched else None
        has_ended = None if launcher is None else lambda: launcher.has_ended
        start = StartSignals(is_main=identity.is_main, has_launcher_ended=has_ended)
        stack.enter_context(start)
        _pretrain(options, config, identity, start, launcher)


def _announce_imports(*, is_progress: bool) -> None:
    """Say why nothing happens for seconds; as mere progress on stderr, so that stdout has only the result."""
    line = "start     importing torch and DeepSpeed"
    if is_progress:
        _print_error(line)
    else:
        print(line, flush=True)


def _check_benchmark(options: argparse.Namespace) -> None:
    """Reject a number of steps below 1, and options that a benchmark has no use for."""
    if options.benchmark < 1:
        raise UserError(f"--benchmark {options.benchmark} must be at least 1 step")
    others = {
        "--dry-run": options.dry_run,
        "--prepare-data": options.prepare_data,
        "--restart": options.restart,
        "--resume auto": options.resume == "auto",
    }
    for name, is_given in others.items():
        if is_given:
            raise UserError(f"--benchmark and {name} cannot be combined: leave one of them out")
    if options.profile is not None and options.run_dir is None:
        raise UserError("--benchmark with --profile needs a folder for the trace: name it with --run-dir")


def _benchmark(options: argparse.Namespace, config: PretrainConfig, identity: ProcessIdentity) -> None:
    """Run `--benchmark`; a stop signal ends it at once, because it saves nothing."""
    from megalowbit.engine.process_start import import_deepspeed, stop_process_group

    folder: Path | None = options.run_dir
    is_new = folder is not None and not folder.exists()

    def remove_empty_folder() -> None:
        if folder is not None and is_new:
            with suppress(OSError):  # it was not created, or has a profile
                folder.rmdir()

    with StartSignals(
        is_main=identity.is_main,
        before=_unfinished(options),
        ending=STOP_SIGNALS,
        at_end=remove_empty_folder,
    ):
        try:
            import_deepspeed(is_checked=False)
            from megalowbit.pretrain.estimate.benchmark import benchmark

            benchmark(config, identity, steps=options.benchmark, folder=folder)
        finally:
            remove_empty_folder()
    stop_process_group(timedelta(seconds=SHUTDOWN_SECONDS))


def _look_only(options: argparse.Namespace, config: PretrainConfig, identity: ProcessIdentity) -> None:
    """Run `--dry-run` or `--prepare-data`, which need the main process only."""
    if not identity.is_main:
        return
    if options.dry_run:
        with collector_paused():
            from megalowbit.pretrain.estimate.dry_run import describe

            print(describe(config))
        return
    from megalowbit.data.cache.build_lines import reported_builds
    from megalowbit.data.loader import count_samples
    from megalowbit.data.sources import places_of_samples
    from megalowbit.pretrain.checks import check_config, check_tokenizer

    check_config(config)
    check_tokenizer(config)
    data = config.settings.data
    with reported_builds(functools.partial(print, flush=True)):
        count = count_samples(data)
    places = " and ".join(places_of_samples(data))
    print(f"{count:,} sequences of {data.sequence_length} tokens are ready in {places}")


def _pretrain(
    options: argparse.Namespace,
    config: PretrainConfig,
    identity: ProcessIdentity,
    start: StartSignals,
    launcher: LauncherWatch | None,
) -> None:
    with ExitStack() as starting:
        starting.enter_context(collector_paused())
        starting.callback(start.stop)
        from megalowbit.engine.process_start import import_deepspeed, stop_process_group

        import_deepspeed(is_checked=False)  # before any other import of deepspeed: this one sets it up
        from megalowbit.pretrain.run import pretrain

        pretrain(
            config,
            identity,
            run_dir=options.run_dir,
            is_resume=options.resume == "auto",
            is_restart=options.restart,
            report=lambda error: _report(error, identity),
            at_first_step=starting.close,
            has_launcher_ended=None if launcher is None else lambda: launcher.has_ended,
            ui=options.ui,
        )
    stop_process_group(timedelta(seconds=SHUTDOWN_SECONDS))  # all work is done: other ranks arrive soon


def _world_size(options: argparse.Namespace, identity: ProcessIdentity) -> int | None:
    """Number of processes; None if nothing is trained and any number that fits the configuration will do."""
    if options.processes is not None:
        if not options.dry_run or options.processes < 1:
            raise UserError(
                f"--processes {options.processes} needs --dry-run and a value of at least 1; the launcher "
                "decides the number of processes of a run"
            )
        return int(options.processes)
    is_only_prepared = options.prepare_data or (options.dry_run and identity.world_size == 1)
    return None if is_only_prepared else identity.world_size


def prepare_environment(*, is_verbose: bool = False) -> None:
    """Set variables that torch reads when it is imported; hide other libraries' remarks at import."""
    _limit_threads()
    if not is_verbose:
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
    # without it every rank prints a stack if the main process is lost
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _limit_threads() -> None:
    """Divide the cores among the processes of this node, unless OMP_NUM_THREADS is set.

    The DeepSpeed launcher does not set it, and two processes with one thread per core each run several times
    slower than with half as many threads.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    threads = max(1, cores // max(1, local_size()))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read by torch when it is first imported


def _report(error: UserError, identity: ProcessIdentity) -> None:
    """Print the error once for the whole job, and write it to the file that the job script reads."""
    line, is_transient = printed(error), isinstance(error, TransientError)
    if identity.is_main and REFUSAL in os.environ and not is_transient:
        _write_refusal(Path(os.environ[REFUSAL]), "; ".join(lines_of(error)))
    if error.is_reported or (error.is_on_all_ranks and not identity.is_main):
        return
    if identity.is_main or is_transient:
        _print_error(f"error: {line}")
        if error.run_folder is not None:
            _print_error(f"what went wrong first: megalowbit diagnose {shlex.quote(str(error.run_folder))}")
    else:
        if threading.current_thread() is threading.main_thread():  # the watchdog's thread must not wait
            time.sleep(MAIN_RANK_HEAD_START_SECONDS)
        _print_error(f"error on rank {identity.rank}: {line}")


def _print_error(line: str) -> None:
    with suppress(OSError):  # the reader of stderr may have ended; the exit code still counts
        print(line, file=sys.stderr, flush=True)


def _write_refusal(path: Path, line: str) -> None:
    try:
        with atomic_file(path) as file:
            file.write(line + "\n")
    except OSError as error:
        print(f"{REFUSAL}={path} could not be written ({error.strerror})", file=sys.stderr, flush=True)


def _shut_down_together() -> None:
    """End the process group on all ranks at once: a rank that ends alone could abort the others."""
    from megalowbit.engine.process_start import stop_process_group

    stop_process_group(timedelta(seconds=MAIN_RANK_HEAD_START_SECONDS))
