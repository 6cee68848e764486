"""Limits of control groups, in made hierarchies of both versions."""

import os

import pytest

from megalowbit.commands.runs.init import _numbers_of
from megalowbit.doctor.machine import inspect_machine
from megalowbit.pretrain.estimate import host_memory as module
from megalowbit.pretrain.estimate.host_memory import host_memory

MIB = 2**20
TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes `/proc/self/cgroup` and files with limits in MiB, or as text."""

    def groups(lines, **limits):
        for name, limit in limits.items():
            file = tmp_path / "mount" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(limit if isinstance(limit, str) else f"{limit * MIB}\n")
        (tmp_path / "cgroup").write_text(lines)
        monkeypatch.setattr(module, "GROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(module, "MOUNT", tmp_path / "mount")

    return groups


@pytest.mark.parametrize(
    ("lines", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": 64, "a/memory.max": "max\n"}, 64),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": 32, "c/memory.max": 1}, 32),
        ("0::/a:b\n", {"a:b/memory.max": 16}, 16),
        ("0::/\n", {"memory.max": 48}, 48),
        ("0::/../../job\n", {"memory.max": 48}, 48),
        (
            "5:cpu,cpuacct:/c\n4:memory:/slurm/job\n0::/\n",
            {
                "memory/slurm/job/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slurm/memory.limit_in_bytes": 24,
                "memory/c/memory.limit_in_bytes": 1,
            },
            24,
        ),
        # the host's path in a container, whose own group is at the top
        ("4:memory:/docker/1234\n", {"memory/memory.limit_in_bytes": 40}, 40),
    ],
)
def test_the_lowest_limit_of_the_group_and_those_above_it_counts(groups, lines, limits, expected):
    groups(lines, **limits)
    assert host_memory() == expected * MIB


@pytest.mark.parametrize("lines", ["", "0::/none\n", "nonsense\n", "4:memory:/none\n0::/\n"])
def test_without_a_limit_it_is_the_hosts_memory(groups, lines):
    groups(lines)
    assert host_memory() == TOTAL


def test_doctor_and_init_read_the_same_memory(groups):
    groups("0::/job\n", **{"job/memory.max": 512})
    assert inspect_machine().memory == 0.5
    assert _numbers_of("cpu")[1] == 0.5
