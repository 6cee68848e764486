"""The test cluster itself: it works, and it leaves nothing behind."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import Cluster, what_is_missing

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
PORT_OF_SLURMD = 6818

LEFT_ALONE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from cluster import Cluster
with Cluster(nodes=2) as cluster:
    cluster.submit("--wrap=sleep 1000", cwd="/tmp")
    print(cluster.folder, flush=True)
    time.sleep(1000)
"""


def until(is_true, seconds=20):
    deadline = time.monotonic() + seconds
    while not (answer := is_true()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return answer


def processes_that_name(folder):
    """Process ids whose command line or environment contains `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:  # no process, or gone by now
            continue
        if str(folder).encode() in seen:
            found.append(int(process.name))
    return found


def is_reached(cluster, node, *, by):
    reach = f"timeout 1 bash -c '</dev/tcp/{node}/{PORT_OF_SLURMD}' && echo yes"
    return "yes" in cluster.run("bash", "-c", reach, on=by, check=False)


def test_every_node_has_a_name_an_address_and_processes_of_its_own(cluster):
    show = "echo $(hostname) $(ip -4 -o addr show eth0 | grep -o '10[.0-9]*') $(ls -d /proc/[0-9]* | wc -l)"
    lines = cluster.run("srun", "--nodes=3", "bash", "-c", show).splitlines()
    seen = dict(line.split(" ", 1) for line in lines)
    assert seen.keys() == {"n1", "n2", "n3"}
    assert len({words.split()[0] for words in seen.values()}) == 3
    assert all(int(words.split()[-1]) < 30 for words in seen.values())


def test_a_disconnected_node_is_reachable_again_after_repair(cluster):
    assert is_reached(cluster, "n2", by="n1")
    cluster.hosts.cut("n2")
    try:
        assert not is_reached(cluster, "n2", by="n1")
        assert is_reached(cluster, "n3", by="n1")
    finally:
        cluster.hosts.mend("n2")
    until(lambda: is_reached(cluster, "n2", by="n1"))


def test_concurrent_clusters_are_isolated(cluster):
    with Cluster(nodes=2) as other:
        job = other.submit("--hold", "--wrap=true", cwd="/tmp")
        assert job.state == "PENDING"
        until(lambda: cluster.run("squeue", "--noheader") == "")  # a job of before may still be ending
        other.power_off("n2")
        assert is_reached(cluster, "n2", by="n1")
        other.power_on("n2")
        until(lambda: other.node_states()["n2"] == "idle")
    assert not other.folder.exists()
    assert processes_that_name(other.folder) == []


def test_a_killed_test_leaves_no_cluster_processes(cluster):
    command = [sys.executable, "-c", LEFT_ALONE, Path(__file__).parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as test:
        folder = test.stdout.readline().strip()
        assert len(processes_that_name(folder)) > 6  # pid 1 of three hosts, munged, slurmctld, two slurmd
        test.kill()
    try:
        until(lambda: processes_that_name(folder) == [])
        assert folder not in Path("/proc/mounts").read_text()
        assert not [
            link for link in Path("/sys/class/net").iterdir() if link.name == "switch" or "to-n" in link.name
        ]
    finally:
        shutil.rmtree(folder)


def test_missing_prerequisites_are_named(cluster, monkeypatch):
    assert what_is_missing() == ""
    os.seteuid(65534)
    try:
        assert what_is_missing() == "a SLURM of one's own needs root"
    finally:
        os.seteuid(0)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("cluster.DAEMONS", "/nowhere")
    assert "slurmctld, slurmd" in what_is_missing()
    assert "munge" in what_is_missing().split("apt-get install")[1]
