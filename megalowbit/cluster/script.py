"""From a cluster's settings and a run to the text of its job script: pure, the same in, the same out.

What a script does stands in the templates (`launch/slurm/`); here each value gets its final form. Everything
that users write is quoted for where it stands, a word of the shell or an argument in an `#SBATCH` line, and
cannot end there and begin something else. Only `setup` and `sbatch` are taken as they are, on purpose.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalowbit.cluster.settings import ClusterSettings, ContainerSettings
from megalowbit.cluster.template import Value, fill
from megalowbit.distributed.process_group import FIRST_SLURM_PORT, SLURM_PORTS
from megalowbit.errors import UserError, shown

TEMPLATE = "pretrain.sbatch"
STATE = "slurm"  # folder below a run's or sweep's folder: script, logs, what the script remembers
TERMINATION = "megalowbit.watchdog.termination_seconds"
PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One run, or one sweep of runs, to be started; all paths are absolute, as the nodes see them.

    Attributes:
        ds_config: its DeepSpeed configuration.
        folder: of the run; of a sweep, where each run has a folder below, `1`, `2` and so on.
        script: `launch/pretrain.py`.
        working_folder: where it runs; relative paths of overrides are seen from there.
        python_folder: where `python`, `torchrun` and `deepspeed` lie; put before PATH. None: PATH as it is.
        overrides: `"key=value"` of every run.
        sweep: further overrides of each run of a sweep; None for a single run.
        sweep_limit: how many of them run at the same time; None: as many as can.
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
    """Files that the script is made of."""
    return TEMPLATE, f"start_{settings.launcher}.sh"


def render(settings: ClusterSettings, request: JobRequest, templates: Mapping[str, str]) -> str:
    """The job script, from the texts of the files that `template_names` says.

    Raises:
        UserError: a template names a value that there is not, or a path cannot stand in an `#SBATCH` line.
    """
    main, start = template_names(settings)
    values = {**_sbatch_values(settings, request), **_shell_values(settings, request)}
    start_ranks = fill(templates[start], values).rstrip("\n")
    return fill(templates[main], {**values, "start_ranks": start_ranks})


def all_overrides(settings: ClusterSettings, request: JobRequest) -> list[str]:
    """`"key=value"` of every run: what the cluster asks for, then the user's own, which win."""
    seconds = settings.termination_seconds
    return [*([] if seconds is None else [f"{TERMINATION}={seconds}"]), *request.overrides]


def sbatch_word(value: str) -> str:
    """`value` as one argument in an `#SBATCH` line, whose quoting is not the shell's.

    Raises:
        UserError: it has more than one line.
    """
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise UserError(f"{shown(value)} cannot stand in an #SBATCH line: leave control characters out")
    if PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def _sbatch_values(settings: ClusterSettings, request: JobRequest) -> dict[str, Value]:
    """Values for the `#SBATCH` lines at the top of the script."""
    is_per_rank = settings.launcher == "srun"  # others start a node's ranks from one task
    ranks = settings.ranks_per_node
    # told how many tasks a node has, SLURM would take the fewest nodes of a range even if all are idle
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
        raise UserError(f"run folder {shown(folder)} holds a backslash, the name of a log may not: rename it")
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
    """Lines of shell that choose the overrides of one task."""
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
        "PYTHONUNBUFFERED": "1",  # a log that can be followed
        # where there is no GPU, DeepSpeed's launcher and runtime each search for one
        **({} if settings.gpus_per_node else {"DS_ACCELERATOR": "cpu"}),
        **{name: value for name, value in network.items() if value is not None},
        **settings.environment,
    }


def _container(settings: ClusterSettings, request: JobRequest) -> list[str]:
    """Words between `srun` and the command of a task."""
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
