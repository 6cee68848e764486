from dataclasses import replace

import pytest

from megalowbit.doctor.disk import Disk, not_writable
from megalowbit.doctor.hosts import (
    Host,
    check_folder,
    check_hosts,
    check_planned_folder,
    gather_hosts,
    sees_marks,
)
from megalowbit.doctor.machine import Machine
from megalowbit.doctor.notices import warning

DISK = Disk(folder="/runs", file_system="ext4", free=10**12)


def host(name, *, ranks=8, notices=(), **facts):
    machine = Machine(
        host=name,
        facts={"torch": "2.13.0", "driver": "570", "cpu cores": "96", **facts},
        gpus=(),
        capability=None,
        gpu_memory=0.0,
        memory=512.0,
        notices=tuple(notices),
    )
    return Host(machine=machine, disk=DISK, ranks=ranks)


def test_equal_hosts_have_no_notices():
    assert check_hosts([host("n1"), host("n2"), host("n3")]) == []


@pytest.mark.parametrize(
    ("fact", "value", "level"), [("torch", "2.12.0", "problem"), ("driver", "550", "warning")]
)
def test_the_host_that_differs_from_most_is_named(fact, value, level):
    (found,) = check_hosts([host("n1", **{fact: value}), host("n2"), host("n3")])
    assert (found.level, found.code, found.hosts) == (level, "hosts-differ", ("n1",))
    assert f"{fact} is {value}, on other hosts" in found.text


def test_another_number_of_ranks_is_named():
    (found,) = check_hosts([host("n1"), host("n2", ranks=4), host("n3")])
    assert found.hosts == ("n2",)


def test_notices_of_all_hosts_are_said_once():
    slow = warning("disk-slow", "slow")
    (found,) = check_hosts([host("n1", notices=[slow]), host("n2", notices=[slow])])
    assert found.hosts == ()
    (found,) = check_hosts([host("n1", notices=[slow]), host("n2")])
    assert found.hosts == ("n1",)


def test_one_process_is_its_own_host(tmp_path):
    (found,) = gather_hosts(host("n1").machine, DISK)
    assert (found.name, found.ranks) == ("n1", 1)
    assert sees_marks(tmp_path / "later") == [True]
    assert list(tmp_path.iterdir()) == []


def test_hosts_that_do_not_see_the_file_of_rank_0_are_a_problem():
    hosts = [host("n1"), host("n2")]
    (found,) = check_folder(hosts, [True, True, False, False], ["n1", "n1", "n2", "n2"])
    assert (found.level, found.code, found.hosts) == ("problem", "disk-not-shared", ("n2",))
    assert list(check_folder(hosts, [True] * 4, ["n1", "n1", "n2", "n2"])) == []


def test_a_folder_that_rank_0_cannot_write_to_is_a_problem_once():
    ranks = ["n1", "n1", "n2", "n2"]
    (found,) = check_folder([host("n1"), host("n2")], [False] * 4, ranks)
    assert (found.level, found.code, found.hosts) == ("problem", "disk-write", ("n1",))
    assert "/runs cannot be written to" in found.text
    # a measurement of the disk has said it already
    measured = host("n1", notices=[not_writable("/runs", "Permission denied")])
    assert list(check_folder([measured, host("n2")], [False] * 4, ranks)) == []


def test_from_one_host_a_local_disk_is_only_suspected():
    (found,) = check_planned_folder(DISK, 2)
    assert found.level == "warning"
    assert list(check_planned_folder(DISK, 1)) == []
    assert list(check_planned_folder(replace(DISK, file_system="lustre"), 2)) == []
