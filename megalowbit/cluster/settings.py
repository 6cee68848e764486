"""The settings of a cluster: a JSON file, and overrides of single values.

The file describes the machine and its queue, not the training: the same file serves every run. Keys have
SLURM's names where SLURM has one (`partition`, `time`, `cpus_per_task`). Values end up in `#SBATCH` lines and
in a shell script: those that could break out of their place are rejected here, or quoted by `script.py`. Not
covered: whether the cluster has that partition or that much memory; `sbatch` checks it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from megalowbit.cluster.sbatch_options import check_sbatch_option
from megalowbit.errors import UserError, invalid_settings, shown
from megalowbit.json_text import NotJsonError, parse_json, read_json_object
from megalowbit.values import SettingsModel, unit

ONE_LINE = r"[^\x00-\x1f\x7f]+"
# the formats that sbatch accepts: d-h, d-h:m and d-h:m:s, or m, m:s and h:m:s
DAYS = r"(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
MINUTES = r"(?:(?P<h>\d+):(?=\d+:))?(?P<m>\d+)(?::(?P<s>\d+))?"
KILL_MARGIN = 10  # seconds from the end of the run's grace time after SIGTERM to SLURM's SIGKILL
LAUNCHERS_WAIT = 30  # seconds from SIGTERM until torchrun and the DeepSpeed launcher kill their ranks
MOST_NODES = 100_000
WIDEST_RANGE = 1000  # node counts in a range; the configuration is checked for each of them
LONGEST_TIME = 366 * 24 * 3600  # seconds
IMAGE_SCRIPT = "/opt/megalowbit/pretrain.py"  # launch/pretrain.py in the images of launch/containers/
MAX_TIME_CHARACTERS = 40  # Python cannot convert numbers of thousands of digits
# set for the ranks by the job script and the launchers, or by the shell itself: a value in `environment`
# would be overwritten
RESERVED_VARIABLES = {
    "BASHOPTS", "BASHPID", "BASH_VERSINFO", "EUID", "IFS", "MASTER_ADDR", "MASTER_PORT",
    "MEGALOWBIT_REFUSAL", "MEGALOWBIT_TRY", "PPID", "RANK", "SECONDS", "SHELLOPTS", "UID", "WORLD_SIZE",
}  # fmt: skip
RESERVED_PREFIXES = ("SLURM_", "LOCAL_", "CROSS_")
# variables of the job script itself, which would continue with another value
SCRIPT_VARIABLES = {
    "answer", "arguments", "attempt", "cell", "code", "counted", "failures", "file", "host", "hostfile",
    "job", "last", "lock", "manifest", "max_failures", "newest", "next_signal", "number", "pause", "process",
    "ranks", "refusal", "restarts", "run_folder", "shell_before_setup", "state", "status", "step",
    "stop_asked", "tasks_per_node", "terminated",
}  # fmt: skip


def _like(pattern: str, remedy: str) -> AfterValidator:
    """Accept a value that matches `pattern` as a whole, and raise `remedy` for any other."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise UserError(remedy)
        return text

    return AfterValidator(check)


Word = Annotated[str, _like(ONE_LINE, "write a word on one line")]
Nodes = Annotated[str, _like(r"[1-9]\d*(-[1-9]\d*)?", "write a number such as 2, or a range such as '1-2'")]
GpuType = Annotated[str, _like(r"[\w.-]+", "write a type that the cluster has, e.g. 'h100'")]
Memory = Annotated[str, _like(r"\d+[KMGT]?", "write a number and K, M, G or T: '64G'")]
AbsolutePath = Annotated[str, _like(f"/{ONE_LINE}", "write an absolute path")]


class ContainerSettings(SettingsModel):
    """The image that the ranks run in."""

    kind: Literal["pyxis", "apptainer"] = Field(
        description="`pyxis`: options of srun. `apptainer`: `apptainer exec` around each task"
    )
    image: Word = Field(description="a file, or an address that the kind understands")
    mounts: tuple[str, ...] = Field(
        default=(), description='`"/outside:/inside"`, optionally followed by `:ro`'
    )
    options: tuple[str, ...] = Field(
        default=(), description="further options of srun, or of `apptainer exec`"
    )

    @field_validator("mounts")
    @classmethod
    def _mounts_can_be_listed(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for mount in mounts:
            if not re.fullmatch(r"/[^,\x00-\x1f\x7f]*", mount):
                raise UserError(f"mount {shown(mount)} must be absolute and without comma: '/data:/data:ro'")
        return mounts

    @field_validator("options")
    @classmethod
    def _options_are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not re.fullmatch(r"-[^\x00-\x1f\x7f]+", option):
                raise UserError(f"option {shown(option)} must begin with '-': write '--name=value'")
        return options


class ClusterSettings(SettingsModel):
    """The JSON file of a cluster: `megalowbit submit --cluster`. `--slurm KEY=VALUE` overrides a key."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    launcher: Literal["srun", "torchrun", "deepspeed"] = Field(
        default="srun",
        description="what starts the ranks. `srun`: one task for each rank. `torchrun`, `deepspeed`: one "
        "task for each node, in which that launcher starts the ranks",
    )
    nodes: Nodes = Field(
        default="1",
        description='number of nodes, `2`, or a range, `"1-2"`, of which SLURM gives what it has. A range '
        "has at most 1000 numbers",
    )
    gpus_per_node: int = Field(
        ge=0, le=1024, description="ranks on each node, e.g. 8; or 0 for a run on CPUs with tasks_per_node"
    )
    tasks_per_node: int | None = Field(
        default=None, ge=1, le=4096, description="ranks on each node of a run on CPUs. `null`: 1"
    )
    gpu_type: GpuType | None = Field(
        default=None, description="type of GPU, as the cluster names it in `--gres=gpu:TYPE:8`"
    )
    cpus_per_task: int = Field(
        ge=1,
        le=4096,
        description="cores for each rank, e.g. 8; also its `OMP_NUM_THREADS`",
        json_schema_extra=unit("cores"),
    )
    memory: Memory | None = Field(
        default=None, description='memory of each node, such as `"64G"`. `"0"`: all of it'
    )
    time: str | None = Field(
        default=None,
        description='time limit of one attempt, in a format that sbatch accepts: `"12:00:00"`. A run may '
        "take many attempts",
    )
    signal_seconds: int = Field(
        default=300,
        ge=1,
        le=65535,
        validate_default=True,
        description="how long before the limit all ranks are asked to save and end",
        json_schema_extra=unit("seconds"),
    )
    grace_seconds: int | None = Field(
        default=None,
        gt=KILL_MARGIN,
        le=65535,
        description="the cluster's time between SIGTERM and SIGKILL. `null`: 30 seconds or less, SLURM's "
        "default",
        json_schema_extra=unit("seconds"),
    )
    max_failures: int = Field(
        default=3,
        ge=0,
        le=1_000_000,
        description="how many attempts in a row may end without a new checkpoint. After one more, the job "
        "gives up",
        json_schema_extra=unit("attempts"),
    )
    job_name: Word | None = Field(
        default=None, description="name of the job. `null`: the name of the run folder"
    )
    partition: Word | None = Field(default=None, description="`--partition` of sbatch")
    account: Word | None = Field(default=None, description="`--account` of sbatch")
    qos: Word | None = Field(default=None, description="`--qos` of sbatch")
    reservation: Word | None = Field(default=None, description="`--reservation` of sbatch")
    constraint: Word | None = Field(default=None, description="`--constraint` of sbatch")
    exclude: Word | None = Field(default=None, description="`--exclude` of sbatch: nodes to avoid")
    nccl_socket_ifname: str | None = Field(default=None, description="the variable `NCCL_SOCKET_IFNAME`")
    gloo_socket_ifname: str | None = Field(default=None, description="the variable `GLOO_SOCKET_IFNAME`")
    nccl_ib_hca: str | None = Field(default=None, description="the variable `NCCL_IB_HCA`")
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="further variables of the ranks, passed on literally. Variables that identify a rank, "
        "and those of the job script, are rejected",
    )
    setup: tuple[str, ...] = Field(
        default=(),
        description='shell commands to run before the ranks start, such as `"module load cuda/12.8"`',
    )
    sbatch: tuple[str, ...] = Field(
        default=(), description='further options of sbatch, such as `"--mail-type=END"`'
    )
    container: ContainerSettings | None = Field(default=None, description="the image that the ranks run in")
    script: AbsolutePath | None = Field(
        default=None,
        description="path of `launch/pretrain.py` on the nodes. `null`: that of this installation",
    )

    @property
    def ranks_per_node(self) -> int:
        """Processes of the run on each node."""
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def termination_seconds(self) -> int | None:
        """Time that a run has to save after SIGTERM before it ends itself; None: the run's default."""
        return None if self.grace_seconds is None else self.grace_seconds - KILL_MARGIN

    @property
    def node_counts(self) -> range:
        """All node counts that the job may get."""
        fewest, _, most = self.nodes.partition("-")
        return range(int(fewest), int(most or fewest) + 1)

    def in_image(self, image: str, folders: Sequence[Path]) -> ClusterSettings:
        """These settings, with the ranks in an image of `launch/containers/` and its megalowbit.

        `kind`, `mounts` and `options` of a container that the settings have are kept. By default, apptainer
        runs files `.sif`, and pyxis all others.

        Args:
            image: a file, or an address that the kind understands.
            folders: what the ranks read and write, mounted under the paths that they have here.

        Raises:
            UserError: the image or a folder cannot be named in a job script.
        """
        given = {} if self.container is None else self.container.model_dump()
        mounts = list(given.get("mounts", ()))
        for folder in sorted(set(folders)):
            if ":" in str(folder):
                raise UserError(f"{shown(str(folder))} cannot be mounted, because of its colon: rename it")
            if not any(_mounts_in_place(mount, folder) for mount in mounts):
                mounts.append(f"{folder}:{folder}")
        kind = given.get("kind", "apptainer" if image.lower().endswith(".sif") else "pyxis")
        container = {**given, "kind": kind, "image": image, "mounts": mounts}
        changes = {"container": container, "script": self.script or IMAGE_SCRIPT}
        try:
            return ClusterSettings.model_validate({**self.model_dump(), **changes})
        except ValidationError as error:
            raise invalid_settings(error, "", ClusterSettings) from None

    @field_validator("*", mode="before")
    @classmethod
    def _nothing_is_true_or_false(cls, value: Any) -> Any:
        if isinstance(value, bool):  # it would become 1 or 0 in a number's place
            raise UserError("no key is true or false: write a number or a text")
        return value

    @field_validator("nodes")
    @classmethod
    def _nodes_ascend(cls, nodes: str) -> str:
        fewest, _, most = nodes.partition("-")
        if max(len(fewest), len(most)) > len(str(MOST_NODES)) or int(most or fewest) > MOST_NODES:
            raise UserError(f"write at most {MOST_NODES}")
        if most and int(most) - int(fewest) >= WIDEST_RANGE:
            raise UserError(
                f"a range may have at most {WIDEST_RANGE} node counts: the configuration is checked with each"
            )
        if most and int(most) < int(fewest):
            raise UserError(f"write the smaller number first: '{most}-{fewest}'")
        return nodes

    @field_validator("time")
    @classmethod
    def _time_can_be_read(cls, time: str | None) -> str | None:
        if time is not None and seconds_of(time) is None:
            raise UserError("write minutes, or hours:minutes:seconds, or days-hours, as for sbatch")
        if time is not None and (seconds_of(time) or 0) > LONGEST_TIME:
            raise UserError("write at most 366 days, or 0 for no limit")
        return time

    @field_validator("environment")
    @classmethod
    def _variables_can_be_set(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise UserError(f"{shown(name)} is not a variable name: use letters, digits and _")
            if name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIXES):
                raise UserError(f"{name} is set for the ranks by the script or by SLURM: leave it out")
            if name in SCRIPT_VARIABLES:
                raise UserError(f"{name} is a variable of the job script: use another name")
            if "\0" in value:
                raise UserError(f"{name} = {shown(value)} contains a zero byte: remove it")
        return environment

    @field_validator("setup")
    @classmethod
    def _each_setup_line_is_a_command(cls, setup: tuple[str, ...]) -> tuple[str, ...]:
        for line in setup:
            if not re.fullmatch(ONE_LINE, line) or re.search(r"(^|\s)#|\\$|^\s*$", line):
                raise UserError(f"{shown(line)} must be a command on one line, without a comment")
        return setup

    @field_validator("sbatch")
    @classmethod
    def _sbatch_options_are_free(cls, sbatch: tuple[str, ...]) -> tuple[str, ...]:
        for option in sbatch:
            check_sbatch_option(option)
        return sbatch

    @field_validator("tasks_per_node")
    @classmethod
    def _a_rank_has_one_gpu(cls, tasks: int | None, info: ValidationInfo) -> int | None:
        gpus = info.data.get("gpus_per_node", 0)
        if gpus and tasks not in (None, gpus):
            raise UserError(
                f"each of the {gpus} GPUs (gpus_per_node) gets one rank: leave tasks_per_node out"
            )
        return tasks

    @field_validator("gpu_type")
    @classmethod
    def _a_type_needs_gpus(cls, gpu_type: str | None, info: ValidationInfo) -> str | None:
        if gpu_type is not None and not info.data.get("gpus_per_node", 1):
            raise UserError("gpus_per_node is 0: leave gpu_type out")
        return gpu_type

    @field_validator("grace_seconds")
    @classmethod
    def _launchers_wait_as_long(cls, seconds: int | None, info: ValidationInfo) -> int | None:
        launcher = info.data.get("launcher", "srun")
        if seconds is not None and seconds > LAUNCHERS_WAIT and launcher != "srun":
            raise UserError(f"{launcher} kills ranks {LAUNCHERS_WAIT} s after TERM: use launcher srun")
        return seconds

    @field_validator("signal_seconds")
    @classmethod
    def _ranks_have_time_before_the_signal(cls, seconds: int, info: ValidationInfo) -> int:
        time = info.data.get("time")
        limit = None if time is None else seconds_of(time)
        if limit and seconds >= limit:
            raise UserError(f"time {time!r} is only {limit} seconds: lower signal_seconds or raise time")
        return seconds


def seconds_of(time: str) -> int | None:
    """Parse a time in a format that sbatch accepts, into seconds; None if it is invalid. 0 means no limit."""
    match = re.fullmatch(f"{DAYS}|{MINUTES}", time, re.ASCII)
    if match is None or len(time) > MAX_TIME_CHARACTERS:
        return None
    part = {name: int(text or 0) for name, text in match.groupdict().items()}
    hours = 24 * part["d"] + part["dh"] + part["h"]
    return 3600 * hours + 60 * (part["dm"] + part["m"]) + part["ds"] + part["s"]


def _mounts_in_place(mount: str, folder: Path) -> bool:
    """Whether a mount has a folder under the same path as outside, and not only for reading."""
    outside, *inside = mount.split(":")
    return inside in ([], [outside], [outside, "rw"]) and folder.is_relative_to(outside)


def load_cluster(path: Path | None, overrides: list[str]) -> ClusterSettings:
    """Read a cluster's JSON file (None: an empty one) and apply overrides.

    Overrides are `"key=value"` or `"container.image=value"`; values are JSON, or otherwise plain strings.

    Raises:
        UserError: the file, a key, a value or an override is invalid.
    """
    raw = {} if path is None else read_json_object(path, is_strict=True)
    for override in overrides:
        _apply(raw, override)
    try:
        return ClusterSettings.model_validate(raw)
    except ValidationError as error:
        raise invalid_settings(error, "", ClusterSettings) from None


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--slurm {shown(override)} is not key=value: write for example --slurm nodes=4")
    try:
        value = parse_json(text, f"--slurm {shown(override)}", is_strict=True)
    except NotJsonError:
        value = text
    *parents, last = key.split(".")
    node: Any = raw
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise UserError(f"--slurm {shown(override)}: {parent} is {shown(node)}, not an object")
    node[last] = value
