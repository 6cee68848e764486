"""Start a pretraining run as a SLURM job that goes on by itself until the run is finished.

    python launch/slurm/submit.py --cluster configs/clusters/two_nodes.json --ds-config configs/gpt2_124m_fp4.json
    python launch/slurm/submit.py --cluster C.json --ds-config X.json --run-dir runs/lr --array sweep.txt

The job script is written to DIR/slurm/pretrain.sbatch, beside its logs, and given to sbatch. In the file of a
sweep each line is KEY=VALUE …, as after --set, and makes a run of its own in DIR/1, DIR/2 and so on.
"""  # noqa: E501 (a command stays on its line)

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from megalowbit.cluster.script import STATE, JobRequest, all_overrides, render, template_names
from megalowbit.cluster.settings import ClusterSettings, load_cluster
from megalowbit.durable_files import atomic_file
from megalowbit.errors import EXIT_USER_ERROR, UserError, printed, shown
from megalowbit.json_text import read_text
from megalowbit.pretrain.command_line import OneLineParser
from megalowbit.pretrain.config import PretrainConfig, load_config, working_folder

HERE = Path(__file__).resolve().parent
PRETRAIN = HERE.parent / "pretrain.py"
OF_SLURM = {"SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_CLUSTERS"}  # variables that say where to submit


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__)
    parser.add_argument("--cluster", type=Path, metavar="C.json", help="what the cluster is like")
    parser.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one value of --cluster, e.g. --slurm nodes=4 --slurm launcher=torchrun",
    )
    parser.add_argument(
        "--ds-config", type=Path, required=True, metavar="X.json", help="configuration of the run"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value of --ds-config, as in launch/pretrain.py",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run or sweep (default: runs/ and the name of X)",
    )
    parser.add_argument(
        "--resume",
        choices=("no", "auto"),
        default="no",
        help="auto: go on with the run in DIR, if there is one (default: no)",
    )
    parser.add_argument("--array", type=Path, metavar="FILE", help="a sweep: one run for each line of FILE")
    parser.add_argument(
        "--array-limit", type=int, metavar="N", help="with --array: run N of them at the same time"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and exit")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = build_parser().parse_args(arguments)
        settings = load_cluster(options.cluster, options.slurm)
        request = build_request(options, settings)
        check_runs(settings, request)
        script = render(settings, request, read_templates(settings))
        check_text(script)
        check_syntax(script)
        if options.dry_run:
            print(script, end="")
            return 0
        if options.resume == "no":
            refuse_started(request.folder)
        print(submit(script, request.folder))
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def build_request(options: argparse.Namespace, settings: ClusterSettings) -> JobRequest:
    """What the arguments ask for, with absolute paths."""
    if options.array_limit is not None and (options.array is None or options.array_limit < 1):
        raise UserError(f"--array-limit {options.array_limit} is for --array, and at least 1")
    folder = options.run_dir or Path("runs") / options.ds_config.stem
    return JobRequest(
        ds_config=_absolute(options.ds_config),
        folder=_absolute(folder),
        script=Path(settings.script) if settings.script else PRETRAIN,
        working_folder=working_folder(),
        # where this Python was installed, torchrun and deepspeed were; not in an image
        python_folder=None if settings.container else _absolute(Path(sys.executable).parent),
        overrides=options.overrides,
        sweep=None if options.array is None else read_sweep(options.array),
        sweep_limit=options.array_limit,
    )


def _absolute(path: Path) -> Path:
    # links stay: where a link of a shared folder leads may be another place on the nodes
    try:
        return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100
    except RuntimeError:
        raise UserError(f"{shown(str(path))} begins with a home that there is not: write it out") from None


def read_sweep(path: Path) -> list[list[str]]:
    """Overrides of each run of a sweep; lines that are empty or begin with # are none.

    Raises:
        UserError: the file cannot be read, has no run, or a word that is no KEY=VALUE.
    """
    try:
        lines = read_text(path).split("\n")
    except (OSError, UserError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--array {path} cannot be read ({reason}): name a text file") from None
    runs = []
    for number, line in enumerate(lines, start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}: close what is quoted") from None
        overrides = [word for word in words if word != "--set"]
        for word in overrides:
            if "=" not in word[1:]:
                raise UserError(
                    f"{path}, line {number}: {shown(word)} is not KEY=VALUE: write it as after --set"
                )
        if overrides:
            runs.append(overrides)
    if not runs:
        raise UserError(f"--array {path} names no run: write KEY=VALUE … on each line")
    return runs


def check_runs(settings: ClusterSettings, request: JobRequest) -> None:
    """Read the configuration of every run as its ranks will, so that no job is queued to be refused.

    Raises:
        UserError: as `load_config`; of a sweep, says which run.
    """
    overrides = all_overrides(settings, request)
    for number, more in enumerate(request.sweep or [[]], start=1):
        for nodes in settings.node_counts:
            try:
                world_size = nodes * settings.ranks_per_node
                config = load_config(
                    request.ds_config,
                    [*overrides, *more],
                    world_size=world_size,
                    has_model=settings.container is None,
                )
                if nodes == settings.node_counts[0]:  # nothing in there depends on their number
                    check_fully(config, is_in_image=settings.container is not None)
            except UserError as error:
                where = f"run {number} of the sweep: " if request.sweep else ""
                size = f"on {nodes} nodes: " if len(settings.node_counts) > 1 else ""
                raise UserError(f"{where}{size}{error}") from None


def check_fully(config: PretrainConfig, *, is_in_image: bool) -> None:
    """Check what takes torch and DeepSpeed to know, if they are installed here and not in an image only.

    Raises:
        UserError: as `check_config`.
    """
    try:
        from megalowbit.pretrain.checks import check_config
    except ModuleNotFoundError as error:
        if not is_in_image:
            raise
        print(f"{error.name} is not installed here: the job itself checks the rest", file=sys.stderr)
        return
    check_config(config, has_model=not is_in_image)


def read_templates(settings: ClusterSettings) -> dict[str, str]:
    """Texts of the templates beside this file."""
    return {name: (HERE / name).read_text(encoding="utf-8") for name in template_names(settings)}


def check_text(script: str) -> None:
    """Keep what is no Unicode, as bytes on the command line may be, out of the script's file.

    Raises:
        UserError: there is such a character, with what is around it.
    """
    try:
        script.encode("utf-8")
    except UnicodeEncodeError as error:
        start = script.rfind("\n", 0, error.start) + 1
        line = script[start:].partition("\n")[0]
        raise UserError(
            f"{shown(line)} is not UTF-8 text: write --cluster, --slurm, --set and paths in UTF-8"
        ) from None


def check_syntax(script: str) -> None:
    """Let the shell read the script, and run nothing: lines of setup are not ours.

    Raises:
        UserError: it cannot be read.
    """
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UserError(f"the script is no valid shell ({done.stderr.strip()}): mend setup of the cluster")


def refuse_started(folder: Path) -> None:
    """Keep a new run from going on with an old one by mistake.

    Raises:
        UserError: there is something in `folder`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"run folder {folder} is not empty: continue it with --resume auto, or choose another --run-dir"
        )


def submit(script: str, folder: Path) -> str:
    """Write the script below the run's folder and give it to sbatch; returns what to tell the user.

    Raises:
        UserError: the folder cannot be written, or sbatch is missing or refuses; nothing is left behind.
    """
    path = folder / STATE / "pretrain.sbatch"
    new_folders = [each for each in (path.parent, *path.parent.parents) if not each.exists()]
    try:
        earlier = path.read_bytes() if path.exists() else None  # of a job that may still run
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(script)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --run-dir") from None
    try:
        job = give_to_sbatch(path)
    except UserError:
        if earlier is None:
            path.unlink()
        else:
            path.write_bytes(earlier)
        for made in new_folders:
            if not any(made.iterdir()):
                made.rmdir()
        raise
    return f"job {job} is queued; its script and logs: {path.parent}"


def give_to_sbatch(path: Path) -> str:
    """Queue a script; returns the job's id.

    Raises:
        UserError: sbatch is missing or refuses, or queues nothing.
    """
    # the new job would take SLURM_* of one that this may run in for its own; SBATCH_* win over #SBATCH lines
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_")) or name in OF_SLURM
    }
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], env=environ, capture_output=True, text=True
        )
    except OSError as error:
        raise UserError(
            f"sbatch cannot be run ({error.strerror}): do this where jobs are submitted, or use --dry-run"
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(
            f"sbatch refuses the job ({reason}): mend --cluster or --slurm; --dry-run shows the script"
        )
    job = done.stdout.strip().split(";")[0]
    if not re.fullmatch(r"\d+", job, re.ASCII):
        raise UserError(
            f"sbatch answers {shown(done.stdout.strip())} and no number of a job: mend 'sbatch' of --cluster"
        )
    return job


if __name__ == "__main__":
    sys.exit(main())
