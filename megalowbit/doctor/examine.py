"""The examination: hosts, disks and network of this job, then the run that a configuration describes.

On one process nothing is exchanged. On several, every rank looks at its host, and rank 0 examines the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import gather
from megalowbit.doctor.disk import Disk, is_shared, measure_disk
from megalowbit.doctor.fits import check_memory, check_room, save_seconds
from megalowbit.doctor.gemms import check_formats
from megalowbit.doctor.hosts import (
    Host,
    check_folder,
    check_hosts,
    check_planned_folder,
    gather_hosts,
    sees_marks,
)
from megalowbit.doctor.machine import Machine, inspect_machine
from megalowbit.doctor.network import Network, check_bandwidth, check_network, measure_network
from megalowbit.doctor.notices import Notice, by_level, note
from megalowbit.doctor.plan import RunPlan, plan_run
from megalowbit.doctor.risks import check_risks
from megalowbit.doctor.roofline import (
    EFFICIENCY,
    StepTime,
    assumptions,
    bus,
    run_seconds,
    step_times,
    why_unknown,
)
from megalowbit.doctor.shapes import check_shapes
from megalowbit.doctor.target import Target
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.values import counted

DEFAULT_FOLDER = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for.

    Attributes:
        config: None: only the machine is examined.
        target: None: the machine that this runs on.
        assumed_mfu: between 0 and 1; None: the roofline.
        folder: of the run, for the disk; need not exist. None: the default one.
        measures: whether disk and network are measured.
        is_cpu_chosen: whether the user leaves GPUs unused on purpose.
    """

    config: PretrainConfig | None = None
    target: Target | None = None
    assumed_mfu: float | None = None
    folder: Path | None = None
    measures: bool = True
    is_cpu_chosen: bool = False

    @property
    def place(self) -> Path:
        """The folder whose disk is looked at."""
        return self.folder or DEFAULT_FOLDER

    @property
    def is_disk_of_run(self) -> bool:
        """Whether that is the disk of the run: another machine has others, unless its folder is named."""
        return self.target is None or self.folder is not None


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found.

    Attributes:
        hosts: of this job.
        target: for which the run is judged.
        is_here: whether that is this machine.
        network: None: one rank, or not measured.
        plan: None: no configuration was given.
        times: of a step in each phase of the run; empty: unknown, see `why_no_time`.
        why_no_time: the reason.
        assumed_mfu: as given.
        save_seconds: of a checkpoint; None: no configuration was given.
        assumptions: behind the times, one line each.
        notices: problems first.
    """

    hosts: list[Host]
    target: Target
    is_here: bool
    network: Network | None = None
    plan: RunPlan | None = None
    times: list[StepTime] = field(default_factory=list)
    why_no_time: str | None = None
    assumed_mfu: float | None = None
    save_seconds: float | None = None
    assumptions: list[str] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    @property
    def problems(self) -> list[Notice]:
        """Reasons not to start the run."""
        return [each for each in self.notices if each.level == "problem"]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Hosts and network of this job.

    Attributes:
        machine: of this rank.
        hosts: of the job.
        network: None: one rank, or not measured.
        notices: about them.
    """

    machine: Machine
    hosts: list[Host]
    network: Network | None
    notices: list[Notice]


def look_around(request: Request) -> Surroundings:
    """Examine hosts, disks and network; collective."""
    machine = inspect_machine(processes=process_group.world_size(), is_cpu_chosen=request.is_cpu_chosen)
    rank_hosts = gather(machine.host)
    is_leader = rank_hosts.index(machine.host) == process_group.rank()
    disk: Disk | None = None
    of_disk: list[Notice] = []
    if is_leader:
        measures = request.measures and request.is_disk_of_run
        disk, of_disk = measure_disk(request.place, is_measured=measures)
    machine = replace(machine, notices=(*machine.notices, *of_disk))
    hosts = gather_hosts(machine, disk)
    notices = check_hosts(hosts)
    if len(hosts) > 1 and request.is_disk_of_run:
        notices += check_folder(hosts, sees_marks(request.place), rank_hosts)
    network = None
    if request.measures and len(rank_hosts) > 1:
        network = measure_network(rank_hosts)
        notices += check_network(network)
        notices += check_bandwidth(network, expected_bandwidth(machine.target, hosts))
    return Surroundings(machine=machine, hosts=hosts, network=network, notices=notices)


def examine(request: Request, around: Surroundings) -> Examination:
    """Examine the run; on one rank, without collectives.

    Raises:
        UserError: the configuration is invalid.
    """
    machine, hosts, network, notices = around.machine, around.hosts, around.network, around.notices
    is_here = request.target is None
    target = request.target or _measured(machine.target, hosts, network)
    found = Examination(hosts=hosts, target=target, is_here=is_here, network=network)
    if request.config is None:
        return replace(found, notices=by_level(notices))
    plan = plan_run(request.config)
    target = _with_processes(target, hosts, plan.processes)
    speed, of_speed = None, list[str]()
    if request.is_disk_of_run:
        speed, of_speed = _disk_speed(hosts, target.hosts(plan.processes))
    times = step_times(plan, target, request.assumed_mfu)
    why = why_unknown(plan, target, request.assumed_mfu)
    seconds = run_seconds(plan, times) if times else None
    notices = [
        *notices,
        *check_formats(plan, target),
        *check_shapes(plan),
        *check_memory(plan, target, machine.memory if is_here else None),
        *_check_disk(request, plan, target, hosts),
        *check_risks(plan, target, seconds, speed),
        *_above_roofline(times),
    ]
    return replace(
        found,
        target=target,
        plan=plan,
        times=times,
        why_no_time=why,
        assumed_mfu=request.assumed_mfu,
        save_seconds=save_seconds(plan, speed),
        assumptions=[*assumptions(plan, target, request.assumed_mfu), *of_speed],
        notices=by_level(notices),
    )


def expected_bandwidth(target: Target, hosts: list[Host]) -> float:
    """Bytes/s at which a ring of all ranks of the job should pass its messages on; 0: unknown."""
    ranks = sum(host.ranks for host in hosts)
    return bus(_with_processes(target, hosts, ranks), range(ranks))


def _with_processes(target: Target, hosts: list[Host], processes: int) -> Target:
    """The target with as many processes on a host as were started, or on CPUs all that the run has."""
    started = max(host.ranks for host in hosts)
    if sum(host.ranks for host in hosts) > 1 and len(hosts) * started >= processes:
        return replace(target, devices_of_host=started)
    return replace(target, devices_of_host=processes) if target.is_cpu else target


def _check_disk(request: Request, plan: RunPlan, target: Target, hosts: list[Host]) -> list[Notice]:
    if not request.is_disk_of_run:
        return []
    disk, found = hosts[0].disk, list[Notice]()
    if request.measures:
        found += check_room(plan, disk.free, disk.folder)
    if len(hosts) == 1:
        found += check_planned_folder(disk, target.hosts(plan.processes))
    return found


def _disk_speed(hosts: list[Host], planned: int) -> tuple[float | None, list[str]]:
    """Bytes/s of all hosts of the run, and what that assumes; None: none was measured.

    More hosts write faster only to disks of their own. What they reach on a shared file system is not known.
    """
    speeds = [host.disk.write for host in hosts if host.disk.write is not None]
    if not speeds:
        return None, []
    speed, kind, measured = sum(speeds), hosts[0].disk.file_system, counted(len(speeds), "host")
    if planned <= len(speeds):
        return speed, [f"checkpoints are written at {speed / 1e6:,.0f} MB/s, as measured on {measured}"]
    if is_shared(kind) or kind == "unknown":
        line = f"as measured on {measured}, although the run has {planned}: more may not be faster on {kind}"
    else:
        speed *= planned / len(speeds)
        line = (
            f"as measured on {measured}, times {planned}/{len(speeds)}: each host has its own disk ({kind})"
        )
    return speed, [f"checkpoints are written at {speed / 1e6:,.0f} MB/s, {line}"]


def _measured(target: Target, hosts: list[Host], network: Network | None) -> Target:
    """This machine, with the bandwidth that NCCL reached in the place of the table's.

    Messages over the network also passed the links, which thus reach at least as much.
    """
    if network is None or network.backend != "nccl":
        return target
    reached = network.bandwidth / 1e9
    if len(hosts) <= target.hosts_of_domain:
        return replace(target, link=reached, measured=("link",))
    found = replace(target, network=reached / min(host.ranks for host in hosts), measured=("network",))
    if target.link is not None and reached > target.link * EFFICIENCY["network"]:
        found = replace(found, link=reached, measured=("link", "network"))
    return found


def _above_roofline(times: list[StepTime]) -> list[Notice]:
    first = times[0] if times else None
    if first is None or first.assumed_mfu is None or not first.terms:
        return []
    if first.seconds >= first.roofline_seconds:
        return []
    most = first.mfu * first.seconds / first.roofline_seconds
    return [
        note(
            "mfu-above-roofline",
            f"--assume-mfu {first.assumed_mfu:g} is above the roofline's {most:.1%} for this run: a step "
            f"would take {first.seconds:.3g} s, and the roofline has {first.roofline_seconds:.3g} s",
        )
    ]
