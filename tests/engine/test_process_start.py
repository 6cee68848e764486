import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from forks import run_script

from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError

ROOT = Path(__file__).parents[2]
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_plain_python_starts_a_group_of_one_without_output():
    environ = {key: value for key, value in os.environ.items() if key not in RANK_NAMES}
    environ["PYTHONPATH"] = str(ROOT)
    code = (
        "from megalowbit.engine.process_start import start_process_group as start\n"
        "import torch.distributed as dist\n"
        "identity = start(); again = start()\n"
        "import deepspeed\n"
        "print(identity.rank, identity.world_size, again.world_size, dist.get_backend(),\n"
        "      deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0", "1", "1", "gloo", "False"], "")


def test_an_existing_process_group_is_used():
    start_process_group()
    size = dist.get_world_size()
    os.environ.pop("RANK")
    identity = start_process_group()
    assert (identity.rank, identity.world_size) == (0, size)
    assert os.environ["RANK"] == "0"


def run(folder, code, env):
    script = folder / "program.py"
    script.write_text(code)
    return run_script(script, env=env)


def test_a_port_in_use_raises_a_one_line_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        code = (
            "from megalowbit.engine.process_start import start_process_group as start\n"
            "from megalowbit.errors import UserError\n"
            "try:\n    start()\nexcept UserError as error:\n    print(error)\n"
        )
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = run(tmp_path, code, {**os.environ, **ranks, **address})
    assert done.returncode == 0, done.stderr
    assert f"no connection to the main process at 127.0.0.1:{port}" in done.stdout
    assert "--master_port" in done.stdout


@pytest.mark.slow
def test_stopping_the_group_destroys_it_and_may_be_repeated(tmp_path):
    code = (
        "from megalowbit.engine.process_start import start_process_group, stop_process_group\n"
        "import torch.distributed as dist\n"
        "start_process_group(); stop_process_group()\n"
        "print(dist.is_initialized())\n"
        "stop_process_group()  # harmless without a group\n"
    )
    environ = {key: value for key, value in os.environ.items() if key not in RANK_NAMES}
    done = run(tmp_path, code, environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_missing_network_interface_raises_a_one_line_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib77")
    with pytest.raises(
        UserError, match=r"GLOO_SOCKET_IFNAME ib77 is not a network interface of .*: use one of .*lo"
    ):
        start_process_group()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_process_group()


def test_deterministic_algorithms_are_set_up_and_operations_without_one_are_named(tmp_path):
    code = (
        "import os, torch\n"
        "from megalowbit.engine import process_start\n"
        "from megalowbit.errors import UserError\n"
        "process_start.compute_deterministically()\n"
        "print(os.environ['CUBLAS_WORKSPACE_CONFIG'], torch.are_deterministic_algorithms_enabled(),\n"
        "      torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark,\n"
        "      os.environ['FLASH_ATTENTION_DETERMINISTIC'])\n"
        "try:\n"
        "    with process_start.naming_nondeterministic_operations():\n"
        "        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))\n"
        "except UserError as error:\n    print(error)\n"
        "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':0:0'\n"
        "try:\n    process_start.compute_deterministically()\n"
        "except UserError as error:\n    print(error)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = run(tmp_path, code, environ)
    flags, operation, workspace = done.stdout.splitlines()
    assert flags == ":4096:8 True False False 1"
    assert operation.startswith("run.deterministic: put_ has no deterministic algorithm on this device")
    assert workspace.startswith(
        "CUBLAS_WORKSPACE_CONFIG=':0:0' is not deterministic: use one of :4096:8, :16:8"
    )
