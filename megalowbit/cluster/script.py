"""Renders the job script of a run from the cluster's settings; a pure function.

The templates in `launch/slurm/` define what the script does. This module formats and quotes the values that
are inserted. Text from the user is quoted as a shell word or as an argument of an `#SBATCH` line, so it
cannot end there and start something else. Only `setup` and `sbatch` are inserted without quoting, on purpose.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megalowbit.cluster.settings import ClusterSettings, ContainerSettings
from megalowbit.cluster.template import Value, fill
from megalowbit.distributed.process_group import FIRST_SLURM_PORT, SLURM_PORTS
from megalowbit.errors import UserError, shown

TEMPLATE = "pretrain.sbatch"
STUDY_TEMPLATE = "study.sbatch"
STATE = "slurm"  # folder below the folder of a run or sweep: script, logs and the script's state
TERMINATION = "megalowbit.watchdog.termination_seconds"
RECORDED_COLLECTIVES = 2000  # of each rank, by torch's flight recorder: a few steps
PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A run, or a sweep of runs, to submit. All paths are absolute and valid on the nodes.

    Attributes:
        ds_config: the DeepSpeed configuration.
        folder: folder of the run, or of the sweep, whose runs have the folders `1`, `2` and so on below it.
        script: path of `launch/pretrain.py`.
        working_folder: working directory of the job; relative paths in overrides are relative to it.
        python_folder: folder of `python`, `torchrun` and `deepspeed`, prepended to PATH; None: PATH is kept.
        overrides: `"key=value"`, for every run.
        sweep: additional overrides of each run of a sweep; None for a single run.
        sweep_limit: the number of runs at the same time; None: no limit.
    """

    ds_config: Path
    folder: Path
    script: Path
    working_folder: Path
    python_folder: Path | None = None
    overrides: Sequence[str] = ()
    sweep: Sequence[Sequence[str]] | None = None
    sweep_limit: int | None = None


def template_names(settings: ClusterSettings) -> tuple[str, str]:
    """The names of the two template files: the script, and the part that starts the ranks."""
    return TEMPLATE, f"start_{settings.launcher}.sh"


def render(settings: ClusterSettings, request: JobRequest, templates: Mapping[str, str]) -> str:
    """Render the job script.

    Args:
        settings: of the cluster.
        request: the run or sweep.
        templates: text by name, for the files that `template_names` returns.

    Raises:
        UserError: a template has an unknown placeholder, or a path cannot be used in an `#SBATCH` line.
    """
    main, start = template_names(settings)
    values = {**_sbatch_values(settings, request), **_shell_values(settings, request)}
    start_ranks = fill(templates[start], values).rstrip("\n")
    return fill(templates[main], {**values, "start_ranks": start_ranks})


def render_study(
    settings: ClusterSettings, request: JobRequest, cells: Sequence[str], template: str
) -> tuple[str, Path, str]:
    """Render the job script of a study, an array with a task for each cell.

    Args:
        settings: of the cluster; for one process.
        request: `ds_config` is the study's file, `script` is tools/study.py, and `sweep_limit` is used.
        cells: names of the cells.
        template: text of the template.

    Returns:
        The script, and the path and text of the file that lists the cells for it.

    Raises:
        UserError: the settings are for several processes, or as `render`.
    """
    if list(settings.node_counts) != [1] or settings.ranks_per_node != 1:
        raise UserError(
            f"a cell of a study is one process, but the cluster's settings have nodes {settings.nodes} with "
            f"{settings.ranks_per_node} processes each: set nodes and gpus_per_node or tasks_per_node to 1"
        )
    listed = "".join(f"{name}\n" for name in cells)
    # another list is another file: a queued array reads its list when a task starts
    digest = hashlib.sha256(listed.encode()).hexdigest()[:12]
    path = request.folder / STATE / f"cells-{digest}.txt"
    array = replace(request, sweep=[()] * len(cells))
    names = {"cells": shlex.quote(str(path)), "folder": shlex.quote(str(request.folder))}
    values = {**_sbatch_values(settings, array), **_shell_values(settings, array), **names}
    return fill(template, values), path, listed


def all_overrides(settings: ClusterSettings, request: JobRequest) -> list[str]:
    """`"key=value"` for every run: first those that the cluster requires, then the user's, which win."""
    seconds = settings.termination_seconds
    return [*([] if seconds is None else [f"{TERMINATION}={seconds}"]), *request.overrides]


def sbatch_word(value: str) -> str:
    """Quote `value` as one argument of an `#SBATCH` line; its quoting rules differ from the shell's.

    Raises:
        UserError: it contains control characters, such as a line break.
    """
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise UserError(f"{shown(value)} cannot be used in an #SBATCH line: remove the control characters")
    if PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def _sbatch_values(settings: ClusterSettings, request: JobRequest) -> dict[str, Value]:
    """Values for the `#SBATCH` lines at the top of the script."""
    is_per_rank = settings.launcher == "srun"  # other launchers have one task per node
    ranks = settings.ranks_per_node
    # with --ntasks-per-node SLURM would allocate the minimum of a node range, even if all nodes are idle
    is_range = len(settings.node_counts) > 1
    step_cores = settings.cpus_per_task * (1 if is_per_rank else ranks)
    gres = ":".join(filter(None, ["gpu", settings.gpu_type, str(settings.gpus_per_node)]))
    words = {
        "job_name": settings.job_name or request.folder.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "reservation": settings.reservation,
        "constraint": settings.constraint,
        "exclude": settings.exclude,
        "time": settings.time,
        "memory": settings.memory,
        "nodes": settings.nodes,
        "slurm_tasks_per_node": None if is_range else str(ranks if is_per_rank else 1),
        "slurm_cpus_per_task": str(settings.cpus_per_task * ranks if is_range else step_cores),
        "step_cpus_per_task": str(step_cores),
        "gres": gres if settings.gpus_per_node else None,
        "array": _array(request),
        "working_folder": str(request.working_folder),
        "log": _log(request),
        "signal_seconds": str(settings.signal_seconds),
    }
    quoted: dict[str, Value] = {
        name: None if word is None else sbatch_word(word) for name, word in words.items()
    }
    return {**quoted, "sbatch": settings.sbatch}


def _array(request: JobRequest) -> str | None:
    if request.sweep is None:
        return None
    limit = "" if request.sweep_limit is None else f"%{request.sweep_limit}"
    return f"1-{len(request.sweep)}{limit}"


def _log(request: JobRequest) -> str:
    folder = str(request.folder / STATE)
    if "\\" in folder:
        raise UserError(f"run folder {shown(folder)} contains a backslash, which log names cannot: rename it")
    name = "job-%j.log" if request.sweep is None else "job-%A-%a.log"
    return f"{folder.replace('%', '%%')}/{name}"


def _shell_values(settings: ClusterSettings, request: JobRequest) -> dict[str, Value]:
    """Values for the commands of the script."""
    folder = shlex.quote(str(request.folder))
    python_folder = request.python_folder
    return {
        "run_folder": folder if request.sweep is None else f"{folder}/$SLURM_ARRAY_TASK_ID",
        "max_failures": str(settings.max_failures),
        "tasks_per_node": str(settings.ranks_per_node),
        "first_port": str(FIRST_SLURM_PORT),
        "ports": str(SLURM_PORTS),
        "python_folder": None if python_folder is None else shlex.quote(str(python_folder)),
        "script": shlex.quote(str(request.script)),
        "ds_config": shlex.quote(str(request.ds_config)),
        "overrides": [shlex.quote(each) for each in all_overrides(settings, request)],
        "sweep": None if request.sweep is None else _sweep(request.sweep),
        "setup": settings.setup,
        "environment": [f"{name}={shlex.quote(value)}" for name, value in _environment(settings).items()],
        "container": _container(settings, request),
    }


def _sweep(sweep: Sequence[Sequence[str]]) -> list[str]:
    """Lines of shell that select the overrides of an array task."""
    choices = []
    for number, overrides in enumerate(sweep, start=1):
        words = " ".join(f"--set {shlex.quote(each)}" for each in overrides)
        choices.append(f"    {number}) arguments+=({words}) ;;")
    return ["case $SLURM_ARRAY_TASK_ID in", *choices, "esac"]


def _environment(settings: ClusterSettings) -> dict[str, str]:
    names = ("nccl_socket_ifname", "gloo_socket_ifname", "nccl_ib_hca")
    network = {name.upper(): getattr(settings, name) for name in names}
    return {
        "OMP_NUM_THREADS": str(settings.cpus_per_task),
        "PYTHONUNBUFFERED": "1",  # so that the log is written line by line
        # on CPUs: keeps DeepSpeed's launcher and runtime from searching for a GPU
        **({} if settings.gpus_per_node else {"DS_ACCELERATOR": "cpu"}),
        "TORCH_FR_BUFFER_SIZE": str(RECORDED_COLLECTIVES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        **{name: value for name, value in network.items() if value is not None},
        **settings.environment,
    }


def _container(settings: ClusterSettings, request: JobRequest) -> list[str]:
    """Shell words between `srun` and the command of a task."""
    container = settings.container
    if container is None:
        return []
    folder, has_gpus = str(request.working_folder), settings.gpus_per_node > 0
    words = (
        _pyxis(container, folder) if container.kind == "pyxis" else _apptainer(container, folder, has_gpus)
    )
    return [shlex.quote(word) for word in words]


def _pyxis(container: ContainerSettings, folder: str) -> list[str]:
    mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
    image, workdir = f"--container-image={container.image}", f"--container-workdir={folder}"
    return [image, *mounts, workdir, *container.options]


def _apptainer(container: ContainerSettings, folder: str, has_gpus: bool) -> list[str]:
    binds = [f"--bind={mount}" for mount in container.mounts]
    options = [*(["--nv"] if has_gpus else []), *binds, f"--pwd={folder}", *container.options]
    return ["apptainer", "exec", *options, container.image]
