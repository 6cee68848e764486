from dataclasses import replace

import pytest

from launchers import write_config
from megalowbit.doctor import examine as examine_module
from megalowbit.doctor.examine import Request, examine, expected_bandwidth, look_around
from megalowbit.doctor.hosts import Host
from megalowbit.doctor.machine import inspect_machine
from megalowbit.doctor.roofline import bus
from megalowbit.doctor.target import TARGETS
from megalowbit.pretrain.config import load_config

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def config(tmp_path):
    return lambda world_size, *overrides: load_config(
        write_config(tmp_path), list(overrides), world_size=world_size
    )


def codes(found):
    return {each.code for each in found.notices}


def test_without_a_configuration_only_the_machine_is_examined(around):
    found = examine(Request(), around())
    assert (found.plan, found.times, found.notices) == (None, [], [])
    assert found.target.is_cpu


def test_the_machine_is_the_target_with_its_measured_network(config, around, network):
    eight = [H100] * 8
    one = examine(Request(config=config(8)), around(*eight, ranks=8, network=network))
    assert (one.is_here, one.target.name, one.target.link, one.target.network) == (True, "h100", 80, 50)
    two = examine(Request(config=config(16)), around(*eight, hosts=2, ranks=8, network=network))
    assert (two.target.link, two.target.network) == (450, 10)
    assert bus(one.target, range(8)) == pytest.approx(80e9)
    assert bus(two.target, range(16)) == pytest.approx(80e9)
    fast = replace(network, bandwidth=400e9)  # more than the share of the link's peak
    found = examine(Request(config=config(16)), around(*eight, hosts=2, ranks=8, network=fast))
    assert bus(found.target, range(16)) == pytest.approx(400e9)
    gloo = replace(network, backend="gloo")
    assert examine(Request(config=config(8)), around(*eight, ranks=8, network=gloo)).target.link == 450


def test_two_hosts_of_four_are_two_domains_and_those_of_a_rack_are_one(config, around, network):
    fours = examine(Request(config=config(8)), around(*[H100] * 8, hosts=2, ranks=4, network=network))
    assert (fours.target.domain, fours.target.link, fours.target.network) == (4, 450, 20)
    assert bus(fours.target, range(8)) == pytest.approx(80e9)
    named = Request(config=config(8), target=TARGETS["h100"])
    assert examine(named, around(hosts=2, ranks=4)).target.domain == 4
    assert examine(named, around()).target.domain == 8
    rack = examine(
        Request(config=config(8)), around(*["NVIDIA GB200"] * 4, hosts=2, ranks=4, network=network)
    )
    assert (rack.target.domain, rack.target.link, rack.target.network) == (72, 80, 50)


def test_the_expected_bandwidth_is_that_of_the_ranks_that_were_started(around):
    """Two of the eight GPUs of each of two hosts: two adapters of 50 GB/s, not NVLink."""
    two = around(*[H100] * 8, hosts=2, ranks=2)
    assert expected_bandwidth(two.machine.target, two.hosts) == pytest.approx(2 * 50e9 * 0.8)
    one = around(*[H100] * 8, ranks=4)
    assert expected_bandwidth(one.machine.target, one.hosts) == pytest.approx(450e9 * 0.8)


def test_a_named_target_replaces_the_machine_and_its_disk(config, around):
    small = around(write=1e2, file_system="ext4", memory=0.001)
    here = examine(Request(config=config(16)), small)
    assert {"memory-host", "watchdog-save"} <= codes(here)
    there = examine(Request(config=config(16), target=TARGETS["h100"]), small)
    assert not {"memory-host", "watchdog-save", "disk-room", "disk-not-shared"} & codes(there)
    assert there.times
    assert not there.is_here


def test_a_named_folder_is_that_of_the_run_on_any_target(config, around, tmp_path):
    request = Request(config=config(16), target=TARGETS["h100"], folder=tmp_path)
    assert "disk-not-shared" in codes(examine(request, around(file_system="ext4")))


@pytest.mark.parametrize(
    ("file_system", "hosts", "speed", "said"),
    [
        ("ext4", 1, 4e6, "measured on 1 host, times 4/1: each host has its own disk (ext4)"),
        ("ext4", 4, 4e6, "4 MB/s, as measured on 4 hosts"),
        ("lustre", 1, 1e6, "measured on 1 host, although the run has 4: more may not be faster on lustre"),
        ("lustre", 2, 2e6, "measured on 2 hosts, although the run has 4: more may not be faster on lustre"),
        ("unknown", 1, 1e6, "although the run has 4"),
    ],
)
def test_only_disks_of_hosts_are_faster_on_more_of_them(config, around, file_system, hosts, speed, said):
    surroundings = around(*[H100] * 8, hosts=hosts, write=1e6, file_system=file_system)
    found = examine(Request(config=config(32)), surroundings)
    assert found.save_seconds == pytest.approx(found.plan.checkpoint_bytes / speed)
    (line,) = (line for line in found.assumptions if "checkpoints" in line)
    assert said in line


def test_a_disk_that_was_not_measured_has_no_assumption(config, around):
    for request in (Request(config=config(8), target=TARGETS["h100"]), Request(config=config(8))):
        found = examine(request, around(*[H100] * 8, write=None))
        assert not any("checkpoints" in line for line in found.assumptions)


@pytest.mark.parametrize("target", [None, "h100"])
@pytest.mark.parametrize("is_folder_named", [True, False])
def test_several_hosts_try_the_folder_of_the_run_only(tmp_path, monkeypatch, target, is_folder_named):
    """As a job step with --target, the folder is not that of the run unless it is named."""
    this = host_name()
    monkeypatch.setattr(examine_module, "gather", lambda value: [this, "n2"])
    monkeypatch.setattr(examine_module, "gather_hosts", two_hosts)
    monkeypatch.setattr(examine_module, "sees_marks", lambda folder: [True, False])
    monkeypatch.chdir(tmp_path)
    request = Request(
        target=TARGETS[target] if target else None,
        folder=tmp_path if is_folder_named else None,
        measures=False,
    )
    found = codes(look_around(request))
    assert ("disk-not-shared" in found) == (is_folder_named or target is None)


def host_name():
    return inspect_machine(processes=1).host


def two_hosts(machine, disk):
    return [Host(machine=each, disk=disk, ranks=1) for each in (machine, replace(machine, host="n2"))]


def test_an_mfu_above_the_roofline_is_noted(config, around):
    request = Request(config=config(1), target=TARGETS["h100"])
    assert "mfu-above-roofline" in codes(examine(replace(request, assumed_mfu=1.0), around()))
    assert "mfu-above-roofline" not in codes(examine(request, around()))


def test_cpus_have_no_time_but_a_reason_and_all_processes_on_one_host(config, around):
    found = examine(Request(config=config(4)), around(file_system="ext4"))
    assert found.times == []
    assert "telemetry.peak_tflops" in found.why_no_time
    assert found.target.devices_of_host == 4
    assert "disk-not-shared" not in codes(found)


def test_one_process_looks_around_without_collectives(tmp_path, monkeypatch):
    monkeypatch.setattr(examine_module, "measure_network", lambda hosts: pytest.fail("measured"))
    found = look_around(Request(folder=tmp_path, measures=False))
    assert [host.ranks for host in found.hosts] == [1]
    assert found.network is None
