"""Training runs as SLURM jobs: submitted with launch/slurm/submit.py, and watched from outside."""

import itertools
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cluster import OVER, Cluster, Job
from launchers import ROOT, make_cache, metrics, write_config

SUBMIT = ROOT / "launch" / "slurm" / "submit.py"
STEPS = 80
SAVE_EVERY = 6
SECONDS = 300
ATTEMPT = r"job [\d_]+: restart \d+, on \S+, from step (\d+)"
# the process of a rank, not that of a launcher that has the script among its arguments
RANK = r"^\S*python\S* (-u )?\S*launch/pretrain\.py"


def processes(cluster, node, pattern=RANK):
    """Ids of the processes on a node whose command line matches `pattern`; by default the ranks."""
    return cluster.run("pgrep", "-f", pattern, on=node, check=False).split()


@dataclass(frozen=True)
class Run:
    """A job of launch/slurm/submit.py and the folder of its run."""

    job: Job
    folder: Path

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "slurm").glob("job-*.log")))

    @property
    def attempts(self) -> list[str]:
        """What was printed in each start of the script."""
        log = self.log
        bounds = [*(match.start() for match in re.finditer(ATTEMPT, log)), len(log)]
        return [log[start:end] for start, end in itertools.pairwise(bounds)]

    @property
    def step(self) -> int:
        """The newest step that the latest attempt has printed; 0 if none."""
        steps = re.findall(r"(?m)^ *(\d+)/\d+ ", self.attempts[-1]) if self.attempts else []
        return int(steps[-1]) if steps else 0

    @property
    def starts(self) -> list[int]:
        """The first step of each attempt."""
        return [int(step) for step in re.findall(ATTEMPT, self.log)]

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of each line in the run's records, in their order."""
        return [(row["step"], row["loss"]) for row in metrics(self.folder)]

    def member(self, number: int) -> "Run":
        """One run of a sweep."""
        return Run(Job(self.job.cluster, f"{self.job.id}_{number}"), self.folder / str(number))

    def files_of_checkpoint(self, step: int) -> list[str]:
        """Names of the files of a complete checkpoint."""
        manifest = self.folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        return [file["name"] for file in json.loads(manifest.read_text())["files"]]

    def reach(self, *, attempts: int = 1, step: int, seconds: float = SECONDS) -> None:
        """Wait until the script's start number `attempts` has come to `step`."""
        begin = asked = time.monotonic()
        while len(self.attempts) < attempts or self.step < step:
            now = time.monotonic()
            assert len(self.attempts) <= attempts, f"more attempts than expected\n{self.log}"
            assert not (self.folder / "DONE").exists(), f"finished before step {step} was seen\n{self.log}"
            assert now < begin + seconds, f"not at step {step} of attempt {attempts} in time\n{self.log}"
            if now > asked + 3:
                asked = now
                assert self.job.state not in OVER, (
                    f"ended before step {step} of attempt {attempts}\n{self.log}"
                )
            time.sleep(0.1)

    def end(self, seconds: float = SECONDS) -> str:
        """The state in which the job has ended for good."""
        try:
            return self.job.wait(seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def nodes(self) -> list[str]:
        """Nodes the job is on, in SLURM's order: the script runs on the first."""
        names = self.job.facts()["NodeList"]
        return self.job.cluster.run("scontrol", "show", "hostnames", names).split()

    def kill_rank(self, node: str) -> None:
        """SIGKILL to the only rank on `node`."""
        self.job.cluster.run("pkill", "-KILL", "-f", RANK, on=node)


class Workspace:
    """A tiny run's configuration, and what all runs of a test share: compiled kernels and tokens."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        checkpoint = {"every": SAVE_EVERY, "keep": None, "export_hf": False}
        block = {
            "run": {"steps": STEPS},
            "checkpoint": checkpoint,
            "telemetry": {"log_every": 1, "tensorboard": False},
        }
        self.config = write_config(folder, block=block, zero_optimization={"stage": 1})
        cache = make_cache(folder / "cache")
        shared = {"MEGALOWBIT_CACHE": cache, "TORCH_EXTENSIONS_DIR": cache, "PYTHONPATH": ROOT}
        settings = {
            "nodes": 2,
            "gpus_per_node": 0,
            "tasks_per_node": 1,
            "cpus_per_task": 1,
            "gloo_socket_ifname": "eth0",
            "environment": {**{name: str(value) for name, value in shared.items()}, "WANDB_MODE": "offline"},
        }
        self.settings = folder / "cluster.json"
        self.settings.write_text(json.dumps(settings))

    def submit(
        self,
        name: str,
        *slurm: str,
        config: Path | None = None,
        sets: tuple[str, ...] = (),
        options: tuple[object, ...] = (),
    ) -> Run:
        """Submit a run; `slurm` and `sets` are KEY=VALUE of --slurm and --set."""
        run_dir = self.folder / name
        command = [sys.executable, SUBMIT, "--cluster", self.settings, "--ds-config", config or self.config]
        command += [word for value in slurm for word in ("--slurm", value)]
        command += [word for value in sets for word in ("--set", value)]
        command += ["--run-dir", run_dir, *options]
        output = self.cluster.run(*command, cwd=self.folder, PYTHONPATH=str(ROOT))
        return Run(Job(self.cluster, re.search(r"job (\d+)", output)[1]), run_dir)
