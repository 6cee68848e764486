"""What the job scripts of launch/slurm/ do, without SLURM: small programs stand where a script calls SLURM's,
to see what reaches them. What a real SLURM does with the scripts is in tests/slurm."""

import json
import os
import secrets
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from launchers import ROOT
from megalowbit.cluster.script import JobRequest, render
from megalowbit.cluster.settings import load_cluster

TEMPLATES = ROOT / "launch" / "slurm"
LAUNCHERS = ["srun", "torchrun", "deepspeed"]
HOSTILE = "a b'c\"d$(touch pwned)`touch pwned`;touch pwned #{{script}} \\ é\n*"
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

    def __init__(self, place, *overrides, **more):
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
        templates = {path.name: path.read_text() for path in TEMPLATES.glob("*") if path.is_file()}
        script = render(settings, JobRequest(**(request | more)), templates)
        self.script = script.replace("#!/bin/bash\n", "#!/bin/bash\nexport SCRIPT=$$\n", 1)
        self.state = "RUNNING None"
        self.id = secrets.randbelow(10**9)  # scripts end what is left over of their job, on the whole machine

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

    def port(self, restarts):
        return str(15000 + (16 * self.id + restarts) % 16381)

    @property
    def requeues(self):
        """Tasks of jobs that were requeued, the job itself as "job"."""
        path = self.log / "scontrol"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix("requeue ").replace(str(self.id), "job") for line in lines]


DONE = 'mkdir -p "$run"; echo "{}" >"$run/DONE"'
CHECKPOINT = 'made=("$run"/checkpoints/*); n=$(printf "%08d" $((10 * ${#made[@]})))\n'
CHECKPOINT += 'mkdir -p "$run/checkpoints/step-$n"; touch "$run/checkpoints/step-$n/manifest.json"\n'


def test_each_rank_is_a_task_of_srun(tmp_path):
    job = Job(tmp_path, "nodes=2")
    code, output = job.start(DONE)
    assert code == 0, output
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3"} <= {*job.words("srun")}
    run = [str(tmp_path / "pretrain.py"), "--ds-config", str(tmp_path / "x.json"), "--run-dir", str(job.run)]
    assert job.words("command") == ["python", *run, "--resume", "auto"]
    environ = dict(word.split("=", 1) for word in job.words("environment"))
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("n1", job.port(0))
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["MEGALOWBIT_REFUSAL"] == str(job.run / "slurm" / "refusal")
    assert "RANK" not in environ


def test_torchrun_starts_the_ranks_of_a_node_from_one_task(tmp_path):
    job = Job(tmp_path, "launcher=torchrun")
    code, output = job.start(DONE, restarts=2)
    assert code == 0, output
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"} <= {*job.words("srun")}
    name, *words = job.words("command")
    start = words.index(str(tmp_path / "pretrain.py"))
    assert name == "torchrun"
    assert set(words[:start]) == {
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=2",
        "--master-addr=n1",
        f"--master-port={job.port(2)}",
    }
    assert words[start + 1 :][:2] == ["--ds-config", str(tmp_path / "x.json")]


def test_deepspeed_starts_the_ranks_of_a_node_from_one_task_and_a_hostfile(tmp_path):
    job = Job(tmp_path, "launcher=deepspeed")
    code, output = job.start(DONE)
    assert code == 0, output
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"} <= {*job.words("srun")}
    name, *words = job.words("command")
    hostfile = job.run / "slurm" / "hostfile"
    assert name == "deepspeed"
    assert words[:5] == [
        f"--hostfile={hostfile}",
        "--no_ssh",
        "--node_rank=1",
        "--master_addr=n1",
        f"--master_port={job.port(0)}",
    ]
    assert hostfile.read_text() == "n1 slots=2\nn2 slots=2\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", [None, "pyxis", "apptainer"])
def test_no_value_is_read_as_shell(tmp_path, launcher, kind):
    one_line = HOSTILE.replace("\n", "")
    container = {"kind": kind, "image": one_line, "mounts": [f"/{one_line}"], "options": [f"--{one_line}"]}
    settings = {"environment": {"HOSTILE": HOSTILE}, "nccl_ib_hca": HOSTILE}
    settings |= {"container": container} if kind else {}
    folder = tmp_path / one_line.replace("/", "").replace("\\", "")
    job = Job(
        tmp_path,
        f"launcher={launcher}",
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        folder=folder,
        ds_config=Path(f"/{HOSTILE}.json"),
        overrides=[f"a={HOSTILE}"],
    )
    code, output = job.start(DONE)
    assert code == 0, output
    words = job.words("command")
    assert words[words.index("--ds-config") + 1] == f"/{HOSTILE}.json"
    assert words[words.index("--run-dir") + 1] == str(folder)
    assert words[words.index("--set") + 1] == f"a={HOSTILE}"
    assert {f"HOSTILE={HOSTILE}", f"NCCL_IB_HCA={HOSTILE}"} <= {*job.words("environment")}
    if kind == "pyxis":
        expected = {f"--container-image={one_line}", f"--container-mounts=/{one_line}", f"--{one_line}"}
        assert expected <= {*job.words("srun")}
    if kind == "apptainer":
        given = job.words("apptainer")
        assert given[:3] == ["exec", f"--bind=/{one_line}", f"--pwd={tmp_path}"]
        assert given[3:6] == [f"--{one_line}", one_line, "bash"]
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("pwned").exists()


def test_a_task_of_an_array_has_its_own_folder_and_overrides(tmp_path):
    job = Job(tmp_path, sweep=[["a=1"], ["a=2", f"b={HOSTILE}"]], overrides=["c=3"])
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    code, output = job.start('touch "$run/2/DONE"', **array)
    assert code == 0, output
    assert "job 5_2: the run is finished" in output
    words = job.words("command")
    assert words[words.index("--run-dir") + 1] == str(job.run / "2")
    sets = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    assert sets == ["c=3", "a=2", f"b={HOSTILE}"]
    job.start("exit 1", **array)
    assert job.requeues == ["5_2"]  # its id alone may mean all tasks


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_that_comes_before_the_ranks_look_for_it_harms_nobody(tmp_path, launcher):
    job = Job(tmp_path, f"launcher={launcher}")
    code, output = job.start(f"kill -USR1 $$; {DONE}")
    assert (code, job.requeues) == (0, []), output
    assert {"--kill-on-bad-exit=1", "--wait=60"} <= {*job.words("srun")}  # one rank's end is that of all


def test_launchers_exit_code_does_not_decide(tmp_path):
    job = Job(tmp_path)
    code, output = job.start(f"{DONE}\nexit 9")
    assert (code, job.requeues) == (0, [])
    assert "the run is finished" in output
    (job.run / "DONE").unlink()
    code, output = job.start("exit 0")
    assert (code, job.requeues) == (0, ["job"])


def test_a_mark_of_an_earlier_job_is_not_believed(tmp_path):
    job = Job(tmp_path)
    job.run.mkdir()
    (job.run / "DONE").touch()
    _, output = job.start("exit 1")
    assert "is finished" not in output
    assert job.requeues == ["job"]


def test_a_refusal_is_told_and_not_tried_again(tmp_path):
    job = Job(tmp_path)
    code, output = job.start('echo "no corpus: name one" >"$MEGALOWBIT_REFUSAL"; exit 1')
    assert (code, job.requeues) == (2, [])
    assert "not tried again: no corpus: name one" in output
    _, output = job.start("exit 1", restarts=1)
    assert "no corpus" not in output


def test_tries_without_progress_are_counted_over_requeues_and_those_with_it_are_not(tmp_path):
    job = Job(tmp_path, "max_failures=2")
    codes = [job.start("exit 1", restarts=number)[0] for number in range(2)]
    codes.append(job.start(f"{CHECKPOINT}\nexit 1", restarts=2)[0])
    codes += [job.start("exit 1", restarts=number)[0] for number in range(3, 5)]
    assert (codes, len(job.requeues)) == ([0] * 5, 5)
    code, output = job.start("exit 1", restarts=5)
    assert (code, len(job.requeues)) == (1, 5)
    assert "is given up: 3 tries in a row without a new checkpoint" in output
    code, _ = job.start("exit 1")  # submitted again
    assert (code, len(job.requeues)) == (0, 6)


def test_tries_that_cannot_be_counted_are_the_last(tmp_path):
    job = Job(tmp_path)
    (job.run / "slurm" / "failures").mkdir(
        parents=True
    )  # as little to be written to as a file on a full disk
    code, output = job.start("exit 1", restarts=1)
    assert (code, job.requeues) == (1, [])
    assert "is the disk full?" in output


def test_incomplete_and_damaged_checkpoints_are_no_progress(tmp_path):
    job = Job(tmp_path)
    for name in ("step-00000040.damaged", "step-00000050", "step-00000009"):
        (job.run / "checkpoints" / name).mkdir(parents=True)
    (job.run / "checkpoints" / "step-00000040.damaged" / "manifest.json").touch()
    (job.run / "checkpoints" / "step-00000009" / "manifest.json").touch()  # octal it would be no number
    _, output = job.start("exit 1")
    assert "from step 9\n" in output
    assert "ended at step 9 (code 1)" in output


def test_a_wish_to_stop_goes_to_all_ranks_until_they_end(tmp_path):
    job = Job(tmp_path)
    stop = f"kill -USR1 $SCRIPT; while [ ! -e $LOG/scancel ]; do sleep 0.05; done\n{CHECKPOINT}"
    code, output = job.start(stop)
    assert (code, job.requeues) == (0, ["job"])
    assert "ended at step 10 (code 0, asked to stop)" in output
    assert (job.log / "scancel").read_text() == f"--signal=USR1 {job.id}\n"


@pytest.mark.parametrize(
    ("state", "code", "requeues", "told"),
    [
        ("COMPLETING None", 143, [], "is cancelled or requeued from outside, at step 0"),
        ("COMPLETING TimeLimit", 0, ["job"], "the time is up"),
        ("RUNNING None", 0, ["job"], "asked to stop"),
    ],
)
def test_a_term_means_what_slurm_says(tmp_path, state, code, requeues, told):
    job = Job(tmp_path)
    job.state = state
    ended, output = job.start("kill -TERM $SCRIPT; sleep 0.5")
    assert (ended, job.requeues) == (code, requeues), output
    assert told in output
    assert ("ended at step" in output) == bool(requeues)


def test_a_job_that_is_cancelled_late_does_not_come_back(tmp_path):
    job = Job(tmp_path)
    job.state = "COMPLETING None"
    late = '#!/bin/bash\n[[ "$*" != *end_strays* ]] || kill -TERM $SCRIPT\n'
    (job.bin / "srun").write_text(late)
    code, output = job.start("")
    assert (code, job.requeues) == (143, []), output


def test_what_outlives_a_try_is_ended_before_the_next(tmp_path):
    job = Job(tmp_path)
    code, output = job.start('setsid sleep 600 &>/dev/null & echo $! >"$LOG/orphan"; exit 0')
    orphan = (job.log / "orphan").read_text().strip()
    assert (code, job.requeues) == (0, ["job"])
    assert f"process {orphan} on " in output
    deadline = time.monotonic() + 20
    while is_alive(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_a_line_of_setup_that_fails_ends_the_try(tmp_path):
    job = Job(tmp_path, 'setup=["export A=1", "test -e nowhere", "export B=1"]')
    code, output = job.start(DONE)
    assert (code, job.requeues) == (0, ["job"])
    assert "a line of the setup has failed" in output
    assert not (job.log / "command").exists()


def test_each_of_the_next_tries_numbers_its_steps_otherwise(tmp_path):
    job = Job(tmp_path)
    (job.bin / "srun").write_text('#!/bin/bash\necho "${@: -1}" >>"$LOG/steps"\n')
    for restarts in (0, 1, 2):
        job.start("", restarts=restarts)
    steps = "".join("t" if line == "true" else "r" for line in (job.log / "steps").read_text().splitlines())
    assert [len(before) for before in steps.replace("rr", "r").split("r")][:3] == [0, 1, 2]
