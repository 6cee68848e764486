"""The examination as a page for a terminal, and as JSON.

The keys of the JSON are stable: they may be added to within a `version`, not renamed. docs/doctor.md lists
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from megalowbit.doctor import fits
from megalowbit.doctor.examine import Examination
from megalowbit.doctor.gemms import ProductFormat, product_formats, to_dicts
from megalowbit.doctor.hosts import Host
from megalowbit.doctor.network import Network
from megalowbit.doctor.notices import LEVELS
from megalowbit.doctor.plan import RunPlan
from megalowbit.doctor.roofline import StepTime, run_seconds
from megalowbit.doctor.shapes import sizes_of
from megalowbit.doctor.target import Target
from megalowbit.layers.layer_recipe import PRODUCTS
from megalowbit.pretrain.estimate.memory import GIB
from megalowbit.values import counted

VERSION = 1
DAY = 86400.0
MOST_HOSTS = 8  # more are not listed unless something was found on them
SOFTWARE = (
    "torch",
    "CUDA of torch",
    "driver",
    "NCCL",
    "deepspeed",
    "transformers",
    "triton",
    "C compiler",
    "apex",
)


def to_json(found: Examination) -> dict[str, Any]:
    """The report for programs."""
    plan, target = found.plan, found.target
    counts = Counter(each.level for each in found.notices)
    report: dict[str, Any] = {
        "version": VERSION,
        "verdict": "problems" if counts["problem"] else "fine",
        "counts": {level: counts[level] for level in LEVELS},
        "findings": [each.to_dict() for each in found.notices],
        "hosts": [each.to_dict() for each in found.hosts],
        "network": None if found.network is None else found.network.to_dict(),
        "target": _target(target, is_here=found.is_here),
        "run": None,
    }
    if plan is not None:
        report["run"] = {
            **plan.to_dict(),
            "memory_gib": fits.to_dict(plan, target),
            "sizes": [each.to_dict() for each in sizes_of(plan)],
            "phases": [
                {
                    "share_of_steps": phase.share,
                    "recipe": phase.recipe.name,
                    "products": to_dicts(product_formats(plan, target, phase.recipe)),
                }
                for phase in plan.phases
            ],
            "time": _time(found),
        }
    return report


def _target(target: Target, *, is_here: bool) -> dict[str, Any]:
    peaks = {dtype: target.peak(dtype) for dtype in ("bf16", "fp32", "fp8", "fp4")}
    return {
        "name": target.name,
        "is_this_machine": is_here,
        "compute_capability": None if target.capability is None else list(target.capability),
        "matrix_units": list(target.units),
        "peak_tflops": peaks,
        "memory_gib": target.memory,
        "memory_gb_per_second": target.bandwidth,
        "link_gb_per_second": target.link,
        "network_gb_per_second": target.network,
        "measured": list(target.measured),
        "devices_of_host": target.devices_of_host,
    }


def _time(found: Examination) -> dict[str, Any]:
    plan = found.plan
    assert plan is not None  # asked only of a run
    seconds = run_seconds(plan, found.times) if found.times else None
    return {
        "unknown_because": found.why_no_time,
        "phases": [each.to_dict() for each in found.times],
        "seconds": seconds,
        "days": None if seconds is None else seconds / DAY,
        "device_hours": None if seconds is None else seconds / 3600 * plan.processes,
        "save_seconds": found.save_seconds,
        "assumptions": found.assumptions,
    }


def to_text(found: Examination) -> str:
    """The report for people."""
    sections = {"hosts": _hosts(found), "software": _software(found.hosts[0])}
    if found.network is not None:
        sections["network"] = _network(found.network)
    if found.plan is not None:
        plan, target = found.plan, found.target
        where = "this machine" if found.is_here else "as if on"
        sections |= {
            "run": _run(plan),
            f"target: {where}": f"  {target.describe()}",
            "number formats": _formats(plan, target),
            "sizes": _sizes(plan),
            "memory (estimate)": _memory(found),
            "time (estimate)": _times(found),
        }
    sections["notices"] = "\n".join(map(str, found.notices)) or "  none"
    text = "\n\n".join(f"== {title}\n{body}" for title, body in sections.items())
    return f"{text}\n\n{verdict(found)}"


def verdict(found: Examination) -> str:
    """One line: how many notices, and the codes of problems."""
    counts = Counter(each.level for each in found.notices)
    others = f"{counted(counts['warning'], 'warning')}, {counted(counts['note'], 'note')}"
    if not counts["problem"]:
        return f"doctor: no problems, {others}"
    codes = ", ".join(dict.fromkeys(each.code for each in found.problems))
    return f"doctor: {counted(counts['problem'], 'problem')} ({codes}), {others}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.0f} MB/s"


def _hosts(found: Examination) -> str:
    with_notices = {host for each in found.notices for host in each.hosts}
    chosen = [
        host for number, host in enumerate(found.hosts) if number < MOST_HOSTS or host.name in with_notices
    ]
    rows = [("host", "ranks", "devices", "memory", "disk", "free", "write", "read", "differs")]
    for host in chosen:
        machine, disk = host.machine, host.disk
        devices = machine.facts["GPUs"] if machine.gpus else f"{machine.facts['cpu cores']} CPU cores"
        differs = [each.code for each in found.notices if host.name in each.hosts]
        rows.append(
            (
                host.name,
                str(host.ranks),
                devices,
                f"{machine.memory:.0f} GiB",
                disk.file_system,
                f"{disk.free / GIB:,.0f} GiB",
                _speed(disk.write),
                _speed(disk.read),
                ", ".join(dict.fromkeys(differs)) or "-",
            )
        )
    left_out = len(found.hosts) - len(chosen)
    return _table(rows) + (f"\n  and {left_out} more hosts, like most of these" if left_out else "")


def _software(host: Host) -> str:
    facts = host.machine.facts
    lines = [", ".join(f"{name} {facts[name]}" for name in SOFTWARE)]
    lines.append(f"{facts['cpu']}: {facts['cpu units']}")
    return "\n".join(f"  {line}" for line in lines)


def _network(network: Network) -> str:
    lines = [
        f"{network.backend} over {network.ranks} ranks on {counted(network.hosts, 'host')}",
        f"all-reduce of 4 B: {network.latency * 1e6:,.0f} µs; of {network.bytes / 2**20:,.0f} MiB: "
        f"{network.bandwidth / 1e9:.3g} GB/s of each rank",
    ]
    if network.links:
        least = min(network.links, key=lambda host: network.links[host])
        lines.append(
            f"slowest link of a host to a neighbour: {network.links[least] / 1e9:.3g} GB/s ({least})"
        )
    if len(network.clocks) > 1:
        host, (ahead, sure) = max(network.clocks.items(), key=lambda item: abs(item[1][0]))
        lines.append(
            f"largest difference of clocks to rank 0: {ahead * 1e3:+.3g} ms ± {sure * 1e3:.2g} ms ({host})"
        )
    return "\n".join(f"  {line}" for line in lines)


def _run(plan: RunPlan) -> str:
    sized = " (the smallest number that fits the configuration; --processes sets another)"
    lines = [
        f"{plan.config.source}: {plan.parameters:,} parameters, recipe {plan.recipe.name}, {plan.precision}",
        f"{_processes(plan.processes)}{sized * plan.config.is_sized_to_fit}: "
        f"{plan.config.grid}; ZeRO stage {plan.zero_stage}",
        f"{plan.micro_batch} × {plan.sequence_length:,} tokens × {plan.accumulation} accumulated: "
        f"{plan.step_tokens:,} tokens a step, {plan.step_tokens * plan.steps:,} in {plan.steps:,} steps",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _formats(plan: RunPlan, target: Target) -> str:
    rows = [("projection", "out × in", "layers", *PRODUCTS)]
    by_name: dict[tuple[str, int], list[ProductFormat]] = {}
    formats = product_formats(plan, target, plan.recipe)
    for number, projection in enumerate(plan.projections):
        by_name[projection.name, number] = formats[number * len(PRODUCTS) : (number + 1) * len(PRODUCTS)]
    for number, projection in enumerate(plan.projections):
        found = by_name[projection.name, number]
        rows.append(
            (
                projection.name,
                f"{projection.out_features} × {projection.in_features}",
                str(projection.layers),
                *map(str, found),
            )
        )
    later = [
        f"\n  after {1 - phase.share:.0%} of the steps: {phase.recipe.name}" for phase in plan.phases[1:]
    ]
    return _table(rows) + "".join(later)


def _sizes(plan: RunPlan) -> str:
    rows = [("size", "value", "multiple of", "wanted", "fix")]
    left_out = 0
    for each in sizes_of(plan):
        if each.is_of_projection and each.value % each.wanted == 0:
            left_out += 1
            continue
        divisor = f"{each.largest}" if each.largest > 1 else "none of 8 … 128"
        rows.append((each.name, f"{each.value:,}", divisor, str(each.wanted), each.fix))
    return _table(rows) + f"\n  and {left_out} sizes of projections, which are multiples of what is wanted"


def _memory(found: Examination) -> str:
    plan, target = found.plan, found.target
    assert plan is not None  # asked only of a run
    local = min(plan.processes, target.devices_of_host)
    device, save = fits.device_bytes(plan, target) / GIB, found.save_seconds or 0.0
    return (
        f"  a device: {device:.1f} of {target.memory:.1f} GiB\n"
        f"  a host with {_processes(local)}: {fits.host_bytes(plan, target) / GIB:.1f} "
        "GiB, Python and libraries included\n"
        f"  a checkpoint: {plan.checkpoint_bytes / GIB:.1f} GiB, saved in some {save:.0f} s"
    )


def _times(found: Examination) -> str:
    plan = found.plan
    assert plan is not None  # asked only of a run
    if not found.times:
        return "\n".join(f"  {line}" for line in (f"unknown: {found.why_no_time}", *_assumed(found)))
    lines = []
    for phase, each in zip(plan.phases, found.times, strict=True):
        title = "" if len(found.times) == 1 else f"{phase.recipe.name}, {phase.share:.0%} of the steps: "
        lines.append(f"{title}{_of_step(each)}")
        if each.terms:
            parts = ", ".join(f"{name} {value:.3g}" for name, value in each.terms.items() if value > 0)
            lines.append(f"  roofline {each.roofline_seconds:.3g} s: {parts}")
    seconds = run_seconds(plan, found.times)
    lines.append(
        f"{plan.steps:,} steps: {seconds / DAY:.3g} days, {seconds / 3600 * plan.processes:,.0f} device "
        "hours, without saves, validation and failures"
    )
    return "\n".join(f"  {line}" for line in (*lines, *_assumed(found)))


def _assumed(found: Examination) -> list[str]:
    return ["assumed:", *_indented(found.assumptions)] if found.assumptions else []


def _of_step(time: StepTime) -> str:
    return (
        f"{time.seconds:.3g} s a step, {time.tokens_per_second:,.0f} tokens/s "
        f"({time.tokens_per_second / time.devices:,.0f} a device), MFU {time.mfu:.1%}"
    )


def _processes(count: int) -> str:
    return f"{count:,} process{'' if count == 1 else 'es'}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
