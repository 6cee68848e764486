import os
import socket
import subprocess
import sys

import pytest

from megalowbit.distributed.process_group import (
    ProcessIdentity,
    check_local_devices,
    export,
    identify,
    local_size,
)
from megalowbit.errors import UserError


def test_a_plain_process_is_rank_zero_of_one():
    assert identify({}) == ProcessIdentity(rank=0, local_rank=0, world_size=1, launcher="single")
    assert identify({}).is_main


def test_torchrun_and_deepspeed_variables_are_read():
    environ = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    identity = identify(environ)
    assert (identity.rank, identity.local_rank, identity.world_size) == (3, 1, 4)
    assert identity.launcher == "environment"
    assert not identity.is_main


def test_slurm_tasks_become_ranks():
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[07-10]",
        "SLURM_JOB_ID": "123456",
    }
    identity = identify(environ)
    export(identity, environ)
    assert (identity.rank, identity.local_rank, identity.world_size) == (5, 1, 8)
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("5", "1", "8")
    assert environ["MASTER_ADDR"] == "gpu07"
    assert environ["MASTER_PORT"] == "24576"


@pytest.mark.parametrize(
    ("nodes", "head"),
    [
        ("n3", "n3"),
        ("n[3-5,9]", "n3"),
        ("a1,b2", "a1"),
        ("rack-2[01,04]", "rack-201"),
        ("n[01-03,7]-ib", "n01-ib"),
        ("a[1-2]b[3-4]", "a1b3"),
        ("n[7],m[1-2]", "n7"),
        ("gpu.site.org,n[1-2]", "gpu.site.org"),
    ],
)
def test_the_first_slurm_node_is_the_master(nodes, head):
    environ = {"SLURM_STEP_NODELIST": nodes}
    export(ProcessIdentity(world_size=2, launcher="slurm"), environ)
    assert environ["MASTER_ADDR"] == head


@pytest.mark.parametrize("nodes", [",n1", "[1-2", "n[1-2", "n[a]", "n1]", "n[]"])
def test_a_node_list_that_is_not_understood_is_refused(nodes):
    with pytest.raises(UserError, match=r"node list .* cannot be parsed: set MASTER_ADDR"):
        export(ProcessIdentity(world_size=2, launcher="slurm"), {"SLURM_STEP_NODELIST": nodes})


def slurm_port(**more):
    environ = {"SLURM_STEP_NODELIST": "n1", **{name: str(value) for name, value in more.items()}}
    export(ProcessIdentity(world_size=2, launcher="slurm"), environ)
    return int(environ["MASTER_PORT"])


def test_neighbouring_jobs_steps_and_tries_get_ports_of_their_own():
    ports = {
        slurm_port(SLURM_JOB_ID=job, SLURM_STEP_ID=step) for job in range(990, 1010) for step in range(8)
    }
    assert len(ports) == 20 * 8
    assert all(1024 < port < 32768 for port in ports)  # where systems begin to give ports to clients
    assert slurm_port(SLURM_JOB_ID=7) != slurm_port(SLURM_JOB_ID=7, SLURM_RESTART_COUNT=1)


@pytest.mark.parametrize(
    ("counts", "node", "local_size"), [("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("8", 0, 8), ("4,2(x2)", 1, 2)]
)
def test_slurm_tasks_know_their_place_on_the_node_and_among_nodes(counts, node, local_size):
    environ = {
        "SLURM_STEP_NODELIST": "n[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_NTASKS_PER_NODE": "99",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_NODEID": str(node),
    }
    export(ProcessIdentity(world_size=7, launcher="slurm"), environ)
    assert environ["LOCAL_SIZE"] == environ["LOCAL_WORLD_SIZE"] == str(local_size)
    assert (environ["CROSS_RANK"], environ["CROSS_SIZE"]) == (str(node), "4")


def test_the_place_comes_from_the_jobs_variables_where_the_step_has_none():
    environ = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "LOCAL_SIZE": "3"}
    export(ProcessIdentity(world_size=16, launcher="slurm"), environ)
    assert (environ["LOCAL_WORLD_SIZE"], environ["CROSS_RANK"], environ["CROSS_SIZE"]) == ("8", "1", "2")
    assert environ["LOCAL_SIZE"] == "3"  # somebody knew better


@pytest.mark.parametrize("counts", ["2(x3", "two", "2"])
def test_counts_of_tasks_that_are_not_understood_are_refused(counts):
    environ = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": "1"}
    with pytest.raises(UserError, match="unset it"):
        export(ProcessIdentity(world_size=2, launcher="slurm"), environ)


def test_an_invalid_number_of_nodes_is_rejected():
    environ = {"SLURM_NNODES": "two", "SLURM_NODEID": "1"}
    with pytest.raises(UserError, match="SLURM_NNODES must be a whole number ≥ 0, not 'two'"):
        export(ProcessIdentity(world_size=2, launcher="slurm"), environ)


def test_a_launchers_variables_take_precedence_over_those_of_srun():
    environ = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
    }
    identity, before = identify(environ), dict(environ)
    export(identity, environ)
    assert (identity.rank, identity.local_rank, identity.world_size) == (5, 1, 8)
    assert environ == before


def test_a_process_in_a_batch_script_without_srun_is_single():
    assert identify({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).launcher == "single"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK must be a whole number ≥ 0, not 'x'"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK 2 is out of range for WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
    ],
)
def test_contradictory_rank_variables_are_refused(environ, named):
    with pytest.raises(UserError, match=named):
        identify(environ)


def test_a_single_process_gets_a_free_port_and_keeps_a_given_one():
    environ = {}
    export(ProcessIdentity(), environ)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(environ["MASTER_PORT"])))
    given = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    export(ProcessIdentity(), given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("head", "1234")


def test_an_exported_identity_starts_a_real_process_group():
    code = (
        "import torch.distributed as dist\n"
        "from megalowbit.distributed.process_group import export, identify\n"
        "from megalowbit.distributed.process_group import is_initialized, rank, world_size\n"
        "assert not is_initialized() and world_size() == 1 and rank() == 0\n"
        "export(identify())\n"
        "dist.init_process_group('gloo')\n"
        "assert is_initialized() and world_size() == 1 and rank() == 0\n"
        "dist.destroy_process_group()\n"
    )
    # other tests of this process may have set the address of a group that still listens
    of_a_group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {k: v for k, v in os.environ.items() if k not in of_a_group}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_port_that_is_not_a_number_is_rejected():
    with pytest.raises(UserError, match="MASTER_PORT must be a whole number ≥ 0, not 'not-a-port'"):
        export(ProcessIdentity(), {"MASTER_PORT": "not-a-port"})


@pytest.mark.parametrize("port", ["99999999", "65536", "0", "9" * 5000])
def test_an_invalid_port_is_rejected(port):
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}
    with pytest.raises(UserError, match="MASTER_PORT") as caught:
        export(identify(environ), environ)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 1),
        ({"LOCAL_SIZE": "2"}, 2),  # the DeepSpeed launcher
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "1"}, 4),  # torchrun in a task of srun
    ],
)
def test_launchers_say_how_many_processes_a_node_has(environ, size):
    assert local_size(environ) == size


def test_a_process_without_a_device_is_told_in_one_line(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def check(local_rank, num_devices):
        identity = ProcessIdentity(rank=local_rank, local_rank=local_rank, world_size=4)
        check_local_devices(identity, num_devices)

    for local_rank in range(4):
        check(local_rank, 4)
    check(1, 2)
    with pytest.raises(UserError) as seen:
        check(2, 2)
    message = str(seen.value)
    assert message.startswith(f"4 processes on {socket.gethostname()}, but local rank 2 sees 2 cuda devices")
    assert ", CUDA_VISIBLE_DEVICES='0,1': start one process for each device" in message
    assert "deepspeed --num_accelerators 2" in message
    assert not seen.value.is_reported
    with pytest.raises(UserError) as seen:
        check(3, 2)
    assert seen.value.is_reported  # local rank 2 prints the line
