"""What the job scripts of launch/slurm/ start and how: words, variables, quoting.

How their attempts end is in test_slurm_attempts.py; what a real SLURM does with them in tests/slurm."""

import json
import os
from pathlib import Path

import pytest
from slurm_script import DONE, Job

from megalowbit.cluster.script import TERMINATION

LAUNCHERS = ["srun", "torchrun", "deepspeed"]
HOSTILE = "a b'c\"d$(touch pwned)`touch pwned`;touch pwned #{{script}} \\ é\n*"


def test_each_rank_is_a_task_of_srun(tmp_path):
    job = Job(tmp_path, "nodes=2", id=123456)
    code, output = job.start(DONE)
    assert code == 0, output
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3"} <= {*job.words("srun")}
    run = [str(tmp_path / "pretrain.py"), "--ds-config", str(tmp_path / "x.json"), "--run-dir", str(job.run)]
    assert job.words("command") == ["python", *run, "--resume", "auto"]
    environ = dict(word.split("=", 1) for word in job.words("environment"))
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("n1", "24576")
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["MEGALOWBIT_REFUSAL"] == str(job.run / "slurm" / "refusal-123456-0")
    assert "RANK" not in environ
    assert environ["TRITON_CACHE_DIR"] == f"/tmp/megalowbit-triton-{os.getuid()}"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == str(job.run / "slurm" / "flight-123456-0-rank")


def test_the_clusters_settings_replace_the_scripts_folders(tmp_path):
    job = Job(tmp_path, "environment.TRITON_CACHE_DIR=/fast/triton")
    job.start(DONE)
    assert "TRITON_CACHE_DIR=/fast/triton" in job.words("environment")


def test_torchrun_starts_the_ranks_of_a_node_from_one_task(tmp_path):
    job = Job(tmp_path, "launcher=torchrun", id=1000)
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
        "--master-port=31002",
    }
    assert words[start + 1 :][:2] == ["--ds-config", str(tmp_path / "x.json")]


def test_deepspeed_starts_the_ranks_of_a_node_from_one_task_and_a_hostfile(tmp_path):
    job = Job(tmp_path, "launcher=deepspeed", id=1000)
    code, output = job.start(DONE)
    assert code == 0, output
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"} <= {*job.words("srun")}
    name, *words = job.words("command")
    hostfile = job.run / "slurm" / "hostfile-1000"
    assert name == "deepspeed"
    assert words[:5] == [
        f"--hostfile={hostfile}",
        "--no_ssh",
        "--node_rank=1",
        "--master_addr=n1",
        "--master_port=31000",
    ]
    assert hostfile.read_text() == "n1 slots=2\nn2 slots=2\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", [None, "pyxis", "apptainer"])
def test_no_value_is_evaluated_by_the_shell(tmp_path, launcher, kind):
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


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("image", ["/images/m.sif", "/images/m.sqsh"])
def test_ranks_run_in_an_image_with_the_program_of_the_image(tmp_path, launcher, image):
    """The stand-in of apptainer executes the command that follows the image, as apptainer would inside it."""
    job = Job(tmp_path, f"launcher={launcher}", image=image)
    code, output = job.start(DONE)
    assert code == 0, output
    assert "the run is finished" in output
    words = job.words("command")
    assert words[0] == {"srun": "python"}.get(launcher, launcher)
    assert "/opt/megalowbit/pretrain.py" in words
    if image.endswith(".sif"):
        mount = f"--bind={tmp_path}:{tmp_path}"
        assert job.words("apptainer")[:5] == ["exec", mount, f"--pwd={tmp_path}", image, "bash"]
    else:
        mount = f"--container-mounts={tmp_path}:{tmp_path}"
        assert {f"--container-image={image}", mount} <= {*job.words("srun")}
        assert not (job.log / "apptainer").exists()


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
def test_an_early_signal_does_not_end_the_ranks(tmp_path, launcher):
    job = Job(tmp_path, f"launcher={launcher}")
    code, output = job.start(f"kill -USR1 $$; {DONE}")
    assert (code, job.requeues) == (0, []), output
    assert {"--kill-on-bad-exit=1", "--wait=60"} <= {*job.words("srun")}  # one rank's end is that of all


def test_a_failing_setup_line_ends_the_attempt(tmp_path):
    job = Job(tmp_path, 'setup=["export A=1", "test -e nowhere", "export B=1"]')
    code, output = job.start(DONE)
    assert (code, job.requeues) == (0, ["job"])
    assert "a setup command has failed" in output
    assert not (job.log / "command").exists()


@pytest.mark.parametrize(
    "line", ["set -e", "set -euo pipefail", "set -f; IFS=:; shopt -s failglob", "trap '' USR1"]
)
def test_setup_cannot_change_the_shell_of_the_rest_of_the_script(tmp_path, line):
    job = Job(tmp_path, f"setup={json.dumps([line])}")
    stop = "kill -USR1 $SCRIPT; while [ ! -e $LOG/scancel ]; do sleep 0.05; done; exit 1"
    code, output = job.start(stop)
    assert (code, job.requeues) == (0, ["job"]), output
    assert "ended at step 0 (code 1, asked to stop)" in output


@pytest.mark.parametrize(
    "line",
    [
        "exit 3",
        "set -u; echo $NOWHERE",
        "trap - EXIT TERM; false",
        "job=5",
        "export state=on",
        "unset attempt",
    ],
)
def test_setup_that_exits_ends_the_attempt_and_counts_as_a_failure(tmp_path, line):
    job = Job(tmp_path, "max_failures=1", f"setup={json.dumps([line])}")
    code, output = job.start(DONE)
    assert (code, job.requeues) == (0, ["job"]), output
    code, output = job.start(DONE, restarts=1)
    assert (code, job.requeues) == (1, ["job"]), output
    assert not (job.log / "command").exists()


def test_setup_that_returns_early_keeps_the_master_address(tmp_path):
    job = Job(tmp_path, 'setup=["return 0"]')
    assert job.start(DONE)[0] == 0
    assert "MASTER_ADDR=n1" in job.words("environment")


def test_steps_inherit_the_variables_whatever_sbatch_exports(tmp_path):
    job = Job(tmp_path)
    assert job.start(DONE, SLURM_EXPORT_ENV="NONE")[0] == 0
    assert not [word for word in job.words("environment") if word.startswith("SLURM_EXPORT_ENV=")]


def test_neighbouring_jobs_and_attempts_use_different_ports_below_the_ephemeral_range(tmp_path):
    ports = []
    for number in (1_048_575, 1_048_576):
        place = tmp_path / str(number)
        place.mkdir()
        job = Job(place, id=number)
        for restarts in (0, 1):
            job.start("exit 1", restarts=restarts)
            ports.append(job.port)
    assert len({*ports}) == 4
    assert all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(("asked", "sets"), [((), []), (("grace_seconds=120",), [f"{TERMINATION}=110"])])
def test_ranks_get_the_grace_time_if_the_cluster_sets_one(tmp_path, asked, sets):
    job = Job(tmp_path, *asked, overrides=["a=1"])
    job.start(DONE)
    words = job.words("command")
    assert [words[index + 1] for index, word in enumerate(words) if word == "--set"] == [*sets, "a=1"]
