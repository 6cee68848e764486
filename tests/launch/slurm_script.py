"""Job scripts of launch/slurm/ under bash, without SLURM: small programs stand where a script calls SLURM's,
to see what reaches them."""

import os
import secrets
import shlex
import subprocess

from launchers import ROOT
from megalowbit.cluster.script import JobRequest, render
from megalowbit.cluster.settings import load_cluster

TEMPLATES = ROOT / "launch" / "slurm"
# Options of srun go to a file; then it does what it is asked to, as the second of two nodes.
SRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do printf '%s\0' "$1" >>"$LOG/srun"; shift; done
[[ $1 == true ]] || SLURM_NODEID=1 "$@"
"""
# The ranks' program, and the launchers: what they are given; and what the test wants to happen.
RECORD = r"""#!/bin/bash
printf '%s\0' "${0##*/}" "$@" >"$LOG/command"
env -0 >"$LOG/environment"
source "$LOG/happens"
"""
APPTAINER = r"""#!/bin/bash
printf '%s\0' "$@" >"$LOG/apptainer"
while [[ $1 != bash ]]; do shift; done
"$@"
"""
SCONTROL = r"""#!/bin/bash
if [[ $1 == show ]]; then printf 'n1\nn2\n'; else echo "$*" >>"$LOG/scontrol"; fi
"""
STANDS_IN = {
    "srun": SRUN,
    "python": RECORD,
    "torchrun": RECORD,
    "deepspeed": RECORD,
    "apptainer": APPTAINER,
    "scontrol": SCONTROL,
    "squeue": '#!/bin/bash\ncat "$LOG/state"\n',
    "scancel": '#!/bin/bash\necho "$*" >>"$LOG/scancel"\n',
}


class Job:
    """A script under bash, with programs that stand in for SLURM's and the launchers'."""

    def __init__(self, place, *overrides, id=None, **more):
        self.place, self.log, self.bin = place, place / "log", place / "bin"
        self.run = more.get("folder", place / "run")
        for made in (self.log, self.bin):
            made.mkdir()
        for name, text in STANDS_IN.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        request = {
            "ds_config": place / "x.json",
            "folder": self.run,
            "script": place / "pretrain.py",
            "working_folder": place,
            "python_folder": self.bin,
        }
        settings = load_cluster(None, ["gpus_per_node=0", "tasks_per_node=2", "cpus_per_task=3", *overrides])
        if image := more.pop("image", None):
            settings = settings.in_image(image, [place])
            request |= {"script": settings.script, "python_folder": None}
        templates = {path.name: path.read_text() for path in TEMPLATES.glob("*") if path.is_file()}
        script = render(settings, JobRequest(**(request | more)), templates)
        self.script = script.replace("#!/bin/bash\n", "#!/bin/bash\nexport SCRIPT=$$\n", 1)
        self.state = "RUNNING None"
        # scripts end what is left over of their job, on the whole machine
        self.id = secrets.randbelow(10**9) if id is None else id

    def start(self, happens, restarts=0, **more):
        """Exit code and output of the script; `happens` is shell that the ranks' program ends with."""
        (self.log / "happens").write_text(f"run={shlex.quote(str(self.run))}\n{happens}\n")
        (self.log / "state").write_text(self.state)
        environ = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "SLURM_JOB_ID": str(self.id),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
            "RANK": "3",  # of the shell that submitted it
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            **more,
        }
        command = ["bash", "-c", self.script]
        done = subprocess.run(
            command, env=environ, cwd=self.place, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    def words(self, name):
        return (self.log / name).read_text().split("\0")[:-1]

    @property
    def port(self):
        """The main process's, as passed to the ranks."""
        [word] = [word for word in self.words("environment") if word.startswith("MASTER_PORT=")]
        return int(word.removeprefix("MASTER_PORT="))

    def attempt_name(self, restarts):
        return f"{self.id}-{restarts}"

    @property
    def requeues(self):
        """Tasks of jobs that were requeued, the job itself as "job"."""
        path = self.log / "scontrol"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix("requeue ").replace(str(self.id), "job") for line in lines]


DONE = 'mkdir -p "$run"; echo "{}" >"$run/DONE"'
CHECKPOINT = 'made=("$run"/checkpoints/*); n=$(printf "%08d" $((10 * ${#made[@]})))\n'
CHECKPOINT += 'mkdir -p "$run/checkpoints/step-$n"; touch "$run/checkpoints/step-$n/manifest.json"\n'
