"""Two nodes where there is no SLURM: `deepspeed --hostfile` over pdsh and ssh, and torchrun on each node."""

import re
import subprocess
import sys
from pathlib import Path

import cpu_products
import pytest

from launchers import ROOT, SCRIPT, make_cache, metrics, write_config

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
BIN = Path(sys.executable).parent
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    block = {"run": {"steps": STEPS}, "checkpoint": {"every": 4, "keep": None, "export_hf": False}}
    write_config(made, block=block, zero_optimization={"stage": 1})
    make_cache(made / "cache")
    return made


def variables(folder):
    return {
        **cpu_products.variables(),
        "MEGALOWBIT_CACHE": str(folder / "cache"),
        "TORCH_EXTENSIONS_DIR": str(folder / "cache"),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def arguments(folder, name):
    return ["--ds-config", folder / "tiny.json", "--run-dir", folder / name]


@pytest.fixture(scope="module")
def with_torchrun(ssh_cluster, folder):
    """Losses of a run under torchrun, started on each node by hand."""
    command = [
        BIN / "torchrun",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=n1",
        "--master-port=29501",
    ]
    started = [
        subprocess.Popen(
            ssh_cluster.hosts[node].inside(
                *command, f"--node-rank={rank}", SCRIPT, *arguments(folder, "torchrun"), cwd=folder
            ),
            env=ssh_cluster.environment(**variables(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node in enumerate(ssh_cluster.nodes)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    return [(row["step"], row["loss"]) for row in metrics(folder / "torchrun")]


def test_torchrun_on_each_node(with_torchrun):
    assert [step for step, _ in with_torchrun] == list(range(1, STEPS + 1))
    assert with_torchrun[-1][1] < with_torchrun[0][1]


def test_deepspeed_with_a_hostfile_over_pdsh(ssh_cluster, folder, with_torchrun):
    (folder / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    # what the launcher hands on to the other nodes beside PYTHON… variables
    handed = [f"{name}={value}" for name, value in variables(folder).items() if name != "PYTHONPATH"]
    (folder / ".deepspeed_env").write_text("\n".join(handed) + "\n")
    command = [BIN / "deepspeed", "--hostfile=hostfile", "--master_port=29502", SCRIPT]
    output = ssh_cluster.run(*command, *arguments(folder, "pdsh"), on="n1", cwd=folder, PYTHONPATH=str(ROOT))
    assert (folder / "pdsh" / "DONE").exists(), output
    assert re.search(r"n2: .*", output)  # pdsh says where a line comes from
    assert [(row["step"], row["loss"]) for row in metrics(folder / "pdsh")] == with_torchrun
