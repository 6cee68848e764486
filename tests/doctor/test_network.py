"""Measured between two processes in tests/distributed/test_doctor.py; here, what is made of the figures."""

from dataclasses import replace

import pytest

from megalowbit.doctor.network import Network, check_bandwidth, check_network

NETWORK = Network(
    backend="nccl",
    ranks=32,
    hosts=4,
    latency=3e-5,
    bytes=2**28,
    bandwidth=300e9,
    links={"n1": 45e9, "n2": 46e9, "n3": 44e9, "n4": 45e9},
    clocks={"n1": (0.0, 0.0), "n2": (0.001, 0.0005), "n3": (-0.002, 0.0005), "n4": (0.0, 0.001)},
)


def with_values(**changes):
    return replace(NETWORK, **{name: {**getattr(NETWORK, name), **more} for name, more in changes.items()})


def test_a_healthy_network_has_no_notices():
    assert list(check_network(NETWORK)) == []
    assert list(check_bandwidth(NETWORK, 400e9)) == []
    assert list(check_bandwidth(NETWORK, None)) == []


def test_a_host_with_slow_links_is_named():
    (found,) = check_network(with_values(links={"n3": 10e9}))
    assert (found.level, found.code, found.hosts) == ("warning", "network-slow-host", ("n3",))
    assert "10.00 GB/s, others at 45.00 GB/s" in found.text


@pytest.mark.parametrize(
    ("clock", "level"),
    [
        ((7.0, 0.01), "problem"),
        ((-0.5, 0.01), "note"),
        ((0.5, 0.6), None),  # too uncertain
        ((0.05, 0.001), None),
    ],
)
def test_clocks_that_differ_for_certain(clock, level):
    found = list(check_network(with_values(clocks={"n4": clock})))
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(each.hosts == ("n4",) for each in found)


def test_nccl_below_half_of_the_hardware():
    (found,) = check_bandwidth(NETWORK, 700e9)
    assert found.code == "network-slow"
    assert list(check_bandwidth(replace(NETWORK, backend="gloo"), 700e9)) == []
