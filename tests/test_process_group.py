import os
import socket
import subprocess
import sys

import pytest

from megalowbit.errors import UserError
from megalowbit.process_group import ProcessIdentity, export, identify


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
    assert environ["MASTER_PORT"] == str(20000 + 123456 % 20000)


@pytest.mark.parametrize(
    ("nodes", "head"), [("n3", "n3"), ("n[3-5,9]", "n3"), ("a1,b2", "a1"), ("rack-2[01,04]", "rack-201")]
)
def test_the_first_slurm_node_is_the_master(nodes, head):
    environ = {"SLURM_STEP_NODELIST": nodes}
    export(ProcessIdentity(world_size=2, launcher="slurm"), environ)
    assert environ["MASTER_ADDR"] == head


def test_inside_a_batch_script_without_srun_we_are_single():
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
        "from megalowbit.process_group import export, identify, is_initialized, rank, world_size\n"
        "assert not is_initialized() and world_size() == 1 and rank() == 0\n"
        "export(identify())\n"
        "dist.init_process_group('gloo')\n"
        "assert is_initialized() and world_size() == 1 and rank() == 0\n"
        "dist.destroy_process_group()\n"
    )
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
