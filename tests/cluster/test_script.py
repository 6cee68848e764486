"""The text of a job script. tests/launch runs it under bash, tests/slurm under SLURM."""

import re
from pathlib import Path

import pytest

from launchers import ROOT
from megalowbit.cluster.script import JobRequest, render, sbatch_word, template_names
from megalowbit.cluster.settings import load_cluster
from megalowbit.errors import UserError

FOLDER = ROOT / "launch" / "slurm"
LAUNCHERS = ["srun", "torchrun", "deepspeed"]


def request(**more):
    paths = {
        "ds_config": Path("/c/x.json"),
        "folder": Path("/runs/r"),
        "script": Path("/p/launch/pretrain.py"),
        "working_folder": Path("/home/me"),
    }
    return JobRequest(**(paths | more))


def script(*overrides, **more):
    settings = load_cluster(None, ["gpus_per_node=8", "cpus_per_task=12", *overrides])
    templates = {name: (FOLDER / name).read_text() for name in template_names(settings)}
    return render(settings, request(**more), templates)


def header(text):
    """Options in the `#SBATCH` lines, which end at the first command."""
    top = re.match(r"(?:#.*\n)*", text)[0]
    return [line.removeprefix("#SBATCH ") for line in top.splitlines() if line.startswith("#SBATCH ")]


def test_the_same_input_gives_the_same_output():
    assert script("nodes=2") == script("nodes=2")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_placeholder_is_left_in_the_script(launcher):
    text = script(f"launcher={launcher}")
    assert "{{" not in text
    assert "#:" not in text
    assert text.startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("launcher", "tasks", "cores"), [("srun", 8, 12), ("torchrun", 1, 96), ("deepspeed", 1, 96)]
)
def test_a_task_is_a_rank_or_a_launcher_of_all_ranks_of_a_node(launcher, tasks, cores):
    options = header(script("nodes=2", f"launcher={launcher}"))
    assert {"--nodes=2", "--gres=gpu:8", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}"} <= {
        *options
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_range_of_nodes_sets_no_task_count_because_slurm_would_pick_the_fewest_nodes(launcher):
    text = script("nodes=1-2", f"launcher={launcher}")
    assert not [option for option in header(text) if option.startswith("--ntasks")]
    assert {"--nodes=1-2", "--cpus-per-task=96"} <= {*header(text)}
    assert f"--cpus-per-task={12 if launcher == 'srun' else 96})" in text


def test_requeue_and_signal_options_are_always_set():
    options = header(script("signal_seconds=120"))
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@120"} <= {*options}
    assert "--output=/runs/r/slurm/job-%j.log" in options
    assert "--chdir=/home/me" in options


def test_requested_settings_become_options_and_others_are_absent():
    wishes = {
        "partition": "gpu",
        "account": "a1",
        "qos": "high",
        "reservation": "r",
        "constraint": "ib&h100",
        "exclude": "n[1-2]",
        "time": "1-0",
        "nodes": "1-2",
    }
    overrides = [f"{key}={value}" for key, value in wishes.items()]
    options = header(script(*overrides, "memory=64G", "gpu_type=h100", 'sbatch=["--mail-type=END", "-L x"]'))
    wishes |= {"mem": "64G", "gres": "gpu:h100:8", "constraint": '"ib&h100"', "exclude": '"n[1-2]"'}
    assert {f"--{key}={value}" for key, value in wishes.items()} <= {*options}
    assert options[-2:] == ["--mail-type=END", "-L x"]
    names = {option.split("=")[0] for option in header(script("gpus_per_node=0"))}
    assert not names & {"--partition", "--account", "--qos", "--time", "--mem", "--gres", "--array"}


def test_sbatch_arguments_are_quoted():
    assert sbatch_word("gpu,n[1]") == '"gpu,n[1]"'
    assert sbatch_word("/a/b-%j.log") == "/a/b-%j.log"
    assert sbatch_word('a "b" \\ #c') == '"a \\"b\\" \\\\ #c"'
    with pytest.raises(UserError, match="control characters"):
        sbatch_word("a\n#SBATCH --no-requeue")


def test_the_log_has_a_name_that_slurm_does_not_change():
    assert "--output=/runs/100%%j/slurm/job-%j.log" in header(script(folder=Path("/runs/100%j")))
    with pytest.raises(UserError, match="contains a backslash"):
        script(folder=Path("/runs/a\\b"))


def test_a_sweep_is_an_array_of_runs_with_folders_and_overrides_of_their_own():
    text = script(sweep=[["a=1"], ["a=2", "b=x y"]], sweep_limit=1, overrides=["c=3"])
    assert "--array=1-2%1" in header(text)
    assert "--output=/runs/r/slurm/job-%A-%a.log" in header(text)
    assert "run_folder=/runs/r/$SLURM_ARRAY_TASK_ID\n" in text
    assert "arguments+=(--set c=3)\n" in text
    assert "    2) arguments+=(--set a=2 --set 'b=x y') ;;\n" in text
    assert "case $SLURM_ARRAY_TASK_ID" not in script()


def test_ranks_get_the_clusters_environment_variables():
    text = script("nccl_socket_ifname=ib0", "gloo_socket_ifname=ib1", "nccl_ib_hca=mlx5", "environment.A=b c")
    exported = re.findall(r"^    export (\w+=.*)$", text, re.MULTILINE)
    assert {"OMP_NUM_THREADS=12", "NCCL_SOCKET_IFNAME=ib0", "GLOO_SOCKET_IFNAME=ib1"} <= {*exported}
    assert {"NCCL_IB_HCA=mlx5", "A='b c'"} <= {*exported}
    assert "DS_ACCELERATOR" not in text
    assert {"TORCH_FR_BUFFER_SIZE=2000", "TORCH_NCCL_DUMP_ON_TIMEOUT=1"} <= {*exported}
    assert "export DS_ACCELERATOR=cpu" in script("gpus_per_node=0")
    assert "export OMP_NUM_THREADS=3" in script("environment.OMP_NUM_THREADS=3")


def test_grace_time_is_a_default_that_a_users_override_replaces():
    assert "termination_seconds" not in script(overrides=["c=3"])
    text = script("grace_seconds=600", overrides=["c=3"])
    sets = re.findall(r"^arguments\+=\(--set (.*)\)$", text, re.MULTILINE)
    assert sets == ["megalowbit.watchdog.termination_seconds=590", "c=3"]


def test_containers_are_used_only_on_request():
    assert "container" not in script()
    assert "apptainer" not in script()
    mounts = 'container.mounts=["/data:/data:ro", "/home"]'
    pyxis = script("container.kind=pyxis", "container.image=i.sqsh", mounts, 'container.options=["--no-x"]')
    words = re.findall(r"^    step\+=\((.*)\)$", pyxis, re.MULTILINE)[-4:]
    assert words == [
        "--container-image=i.sqsh",
        "--container-mounts=/data:/data:ro,/home",
        "--container-workdir=/home/me",
        "--no-x",
    ]
    apptainer = script("container.kind=apptainer", "container.image=i.sif", mounts)
    words = re.findall(r"^    step\+=\((.*)\)$", apptainer, re.MULTILINE)[-7:]
    assert words == [
        "apptainer",
        "exec",
        "--nv",
        "--bind=/data:/data:ro",
        "--bind=/home",
        "--pwd=/home/me",
        "i.sif",
    ]
    assert "--nv" not in script("gpus_per_node=0", "container.kind=apptainer", "container.image=i.sif")
