"""`launch_ranks`: real processes, as a launcher would start them, on a free port and with a hard end.

A program of this folder writes what it saw to `$RESULTS/rank<r>.json`, and the test compares. Making process
groups and engines takes its time, so one launch should check several things.
"""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import collective_order
import pytest
from forks import Forked

from launchers import free_port

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LAUNCH = ROOT / "tests" / "launch"
PROGRAMS_PATH = ":".join(map(str, (ROOT, HERE, LAUNCH, ROOT / "tests" / "families")))
RANK_NAMES = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID"),
}


@dataclass
class Ranks:
    """Running processes, one a rank."""

    processes: list
    folder: Path
    is_compared: bool = True
    logs: list = field(default_factory=list)

    def wait(self, timeout: float) -> list:
        """What each rank wrote; fails with all output if a rank ends with an error or not in time.

        Fails too if ranks issued different collectives, or one that NCCL would refuse.
        """
        end = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not done after {timeout} s\n{self.output()}")
        if any(process.returncode for process in self.processes):
            pytest.fail(f"exit codes {[p.returncode for p in self.processes]}\n{self.output()}")
        if self.is_compared and len(self.processes) > 1:
            records = self.collectives()
            assert records
            assert all(record["calls"] for record in records)
            assert not collective_order.problems(records)
        return [json.loads((self.folder / f"rank{r}.json").read_text()) for r in range(len(self.processes))]

    def kill(self) -> None:
        """End all ranks at once, as a power cut would."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def collectives(self) -> list:
        """The record of each rank's collectives; empty if a rank has written none."""
        return collective_order.read(recorded_in(self.folder, rank) for rank in range(len(self.processes)))

    def output(self) -> str:
        """The last lines of every rank."""
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)


def recorded_in(folder: Path, rank: int) -> Path:
    return folder / f"collectives-rank{rank}.json"


@pytest.fixture(scope="module")
def launch_ranks(tmp_path_factory):
    """`launch_ranks(program, *arguments, world_size=2, launcher="torchrun", is_compared=True) -> Ranks`.

    `program` is a file of this folder; launcher `"slurm"` exports what `srun` does, not what torchrun does.
    Without `is_compared`, ranks may issue different collectives, or end without a record of them.
    """
    launched = []

    def launch(
        program: str,
        *arguments: object,
        world_size: int = 2,
        launcher: str = "torchrun",
        is_compared: bool = True,
    ) -> Ranks:
        folder = tmp_path_factory.mktemp("launch")
        port = str(free_port())
        ranks = Ranks([], folder, is_compared)
        for rank in range(world_size):
            log = folder / f"rank{rank}.log"
            env = {
                **{key: value for key, value in os.environ.items() if key not in RANK_NAMES["torchrun"]},
                **dict(zip(RANK_NAMES[launcher], map(str, (rank, rank, world_size, 0)), strict=False)),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1", "PYTHONPATH": PROGRAMS_PATH, "RESULTS": str(folder),
                collective_order.FILE: str(recorded_in(folder, rank)),
            }  # fmt: skip
            log.write_text("")
            more = {"cwd": folder, "output": log, "hook": "collective_order.install"}
            ranks.processes.append(Forked(HERE / program, *arguments, env=env, **more))
            ranks.logs.append(log)
        launched.append(ranks)
        return ranks

    yield launch
    for ranks in launched:
        ranks.kill()


@pytest.fixture(scope="module")
def launch_once(launch_ranks):
    """`launch_once(program, *arguments, world_size=2, timeout=600) -> list`: one launch a module.

    The list has what each rank wrote.
    """

    @functools.cache
    def launch(program: str, *arguments: object, world_size: int = 2, timeout: float = 600) -> list:
        return launch_ranks(program, *arguments, world_size=world_size).wait(timeout=timeout)

    return launch


@pytest.fixture
def part(request):
    """The part of a program's cases that a test needs: `"quick"` or `"rest"`.

    A program that takes this argument runs few representative cases for the quick tests, and the others for
    the slow ones. A slow test marked `quick_part` runs the representative cases, unless its own
    parameter is marked slow.
    """
    parameters = getattr(request.node, "callspec", None)
    if parameters is not None and any(mark.name == "slow" for mark in parameters.marks):
        return "rest"
    is_quick = request.node.get_closest_marker("quick_part") or not request.node.get_closest_marker("slow")
    return "quick" if is_quick else "rest"


@pytest.fixture(scope="session")
def tiny():
    """The module `tiny_training`, which the launched programs import by name."""
    spec = importlib.util.spec_from_file_location("tiny_training", HERE / "tiny_training.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
