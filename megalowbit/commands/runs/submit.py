"""Submit a pretraining run as a SLURM job that requeues itself until the run is finished.

    megalowbit submit --cluster configs/clusters/two_nodes.json --ds-config configs/gpt2_124m_fp4.json
    megalowbit submit --cluster C.json --ds-config X.json --run-dir runs/lr --array sweep.txt
    megalowbit submit --cluster C.json --ds-config X.json --container /images/megalowbit.sif

The job script is written to DIR/slurm/pretrain.sbatch, next to its logs, and passed to sbatch. In a sweep
file each line is KEY=VALUE …, as for --set, and defines one run; the runs are in DIR/1, DIR/2 and so on.
"""

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
from megalowbit.collector import collector_paused
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_text
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.pretrain.config import PretrainConfig, load_config, working_folder
from megalowbit.shipped_files import find_config, job_templates, pretrain_script

KEPT_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_CLUSTERS"}  # they define where to submit


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit submit")
    parser.add_argument("--cluster", type=Path, metavar="C.json", help="settings of the cluster")
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
        help="override one value of --ds-config, as for pretrain",
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
        help="auto: continue the run in DIR, if there is one (default: no)",
    )
    parser.add_argument("--array", type=Path, metavar="FILE", help="a sweep: one run for each line of FILE")
    parser.add_argument(
        "--array-limit", type=int, metavar="N", help="with --array: run N of them at the same time"
    )
    parser.add_argument(
        "--container",
        metavar="IMAGE",
        help="run in this image, made with launch/containers/: a file .sif with apptainer, others with "
        "pyxis; this folder, the run's and the configuration's are mounted",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and exit")
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    with collector_paused():
        return _submit(options)


def _submit(options: argparse.Namespace) -> int:
    options.ds_config = find_config(options.ds_config)
    settings = load_cluster(options.cluster, options.slurm)
    if options.container is not None:
        settings = settings.in_image(options.container, folders_of(options))
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
    return 0


def build_request(options: argparse.Namespace, settings: ClusterSettings) -> JobRequest:
    """The run or sweep that the arguments describe, with absolute paths."""
    if options.array_limit is not None and (options.array is None or options.array_limit < 1):
        raise UserError(f"--array-limit {options.array_limit} needs --array and a value of at least 1")
    return JobRequest(
        ds_config=_absolute(options.ds_config),
        folder=run_folder(options),
        script=Path(settings.script) if settings.script else pretrain_script(),
        working_folder=working_folder(),
        # torchrun and deepspeed are installed next to this Python, unless the run uses a container image
        python_folder=None if settings.container else _absolute(Path(sys.executable).parent),
        overrides=options.overrides,
        sweep=None if options.array is None else read_sweep(options.array),
        sweep_limit=options.array_limit,
    )


def run_folder(options: argparse.Namespace) -> Path:
    """The absolute path of the run's folder, or the sweep's."""
    return _absolute(options.run_dir or Path("runs") / options.ds_config.stem)


def folders_of(options: argparse.Namespace) -> list[Path]:
    """The folders that the ranks of a run need from outside of a container, beside those of its data."""
    return [working_folder(), run_folder(options), _absolute(options.ds_config).parent]


def _absolute(path: Path) -> Path:
    # links are not resolved: on the nodes, a link in a shared folder may lead to another place
    try:
        return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100
    except RuntimeError:
        raise UserError(
            f"{shown(str(path))}: this home directory does not exist: write the path out"
        ) from None


def read_sweep(path: Path) -> list[list[str]]:
    """The overrides of each run of a sweep; empty lines and comments (#) are skipped.

    Raises:
        UserError: the file cannot be read, has no run, or contains a word that is not KEY=VALUE.
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
            raise UserError(f"{path}, line {number}: {error}: close the quotation") from None
        overrides = [word for word in words if word != "--set"]
        for word in overrides:
            if "=" not in word[1:]:
                raise UserError(
                    f"{path}, line {number}: {shown(word)} is not KEY=VALUE: write it as for --set"
                )
        if overrides:
            runs.append(overrides)
    if not runs:
        raise UserError(f"--array {path} contains no run: write KEY=VALUE … on each line")
    return runs


def check_runs(settings: ClusterSettings, request: JobRequest) -> None:
    """Check the configuration of every run as its ranks will, so that no queued job fails because of it.

    Raises:
        UserError: as `load_config`; for a sweep, the message names the run.
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
                if nodes == settings.node_counts[0]:  # these checks do not depend on the number of nodes
                    check_fully(config, is_in_image=settings.container is not None)
            except UserError as error:
                where = f"run {number} of the sweep: " if request.sweep else ""
                size = f"on {nodes} nodes: " if len(settings.node_counts) > 1 else ""
                raise UserError(f"{where}{size}{error}") from None


def check_fully(config: PretrainConfig, *, is_in_image: bool) -> None:
    """Make the checks that need torch and DeepSpeed, unless only the container image has them.

    Raises:
        UserError: as `check_config`.
    """
    try:
        from megalowbit.pretrain.checks import check_config
    except ModuleNotFoundError as error:
        if not is_in_image:
            raise
        print(f"{error.name} is not installed here: the job makes the remaining checks", file=sys.stderr)
        return
    check_config(config, has_model=not is_in_image)


def read_templates(settings: ClusterSettings) -> dict[str, str]:
    """The texts of the templates."""
    return {name: (job_templates() / name).read_text(encoding="utf-8") for name in template_names(settings)}


def check_text(script: str) -> None:
    """Check that the script is valid Unicode; command-line arguments may contain other bytes.

    Raises:
        UserError: it is not; the message shows the line.
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
    """Check the shell syntax of the script without running it, because `setup` is written by the user.

    Raises:
        UserError: it has a syntax error.
    """
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UserError(f"the script has a syntax error ({done.stderr.strip()}): fix 'setup' of the cluster")


def refuse_started(folder: Path) -> None:
    """Check that a new run does not continue an old one by mistake.

    Raises:
        UserError: `folder` is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"run folder {folder} is not empty: continue it with --resume auto, or choose another --run-dir"
        )


def submit(script: str, folder: Path) -> str:
    """Write the script below the run folder and pass it to sbatch; returns a line for the user.

    Raises:
        UserError: the folder cannot be written, or sbatch is missing or rejects the job; nothing is left
            behind.
    """
    path = folder / STATE / "pretrain.sbatch"
    new_folders = [each for each in (path.parent, *path.parent.parents) if not each.exists()]
    try:
        earlier = path.read_bytes() if path.exists() else None  # the script of a job that may still run
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
        UserError: sbatch is missing, rejects the job or queues nothing.
    """
    # the new job would inherit SLURM_* if this runs within a job, and SBATCH_* override #SBATCH lines
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_")) or name in KEPT_VARIABLES
    }
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], env=environ, capture_output=True, text=True
        )
    except OSError as error:
        raise UserError(
            f"sbatch cannot be run ({error.strerror}): use a machine where jobs are submitted, or --dry-run"
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(
            f"sbatch rejects the job ({reason}): fix --cluster or --slurm; --dry-run shows the script"
        )
    job = done.stdout.strip().split(";")[0]
    if not re.fullmatch(r"\d+", job, re.ASCII):
        raise UserError(
            f"sbatch prints {shown(done.stdout.strip())} instead of a job id: fix 'sbatch' of --cluster"
        )
    return job
