import json
import re
from pathlib import Path

import pytest

from launchers import ROOT
from megalowbit.cluster.settings import ClusterSettings, load_cluster, seconds_of
from megalowbit.errors import UserError

CPU = ["gpus_per_node=0", "cpus_per_task=1"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "clusters").glob("*.json")), ids=lambda p: p.stem)
def test_the_examples_are_valid(path):
    assert load_cluster(path, []).ranks_per_node >= 1


def test_a_file_and_values_over_it(tmp_path):
    path = tmp_path / "c.json"
    container = {"kind": "pyxis", "image": "a.sqsh"}
    path.write_text(
        json.dumps({"gpus_per_node": 8, "cpus_per_task": 4, "container": container, "environment": {"A": 1}})
    )
    overrides = ["nodes=4", "time=02:00:00", "container.image=b c.sqsh", "environment.B=x=y", "qos=null"]
    settings = load_cluster(path, overrides)
    assert (settings.nodes, settings.time, settings.container.image) == ("4", "02:00:00", "b c.sqsh")
    assert settings.environment == {"A": "1", "B": "x=y"}
    assert (settings.launcher, settings.ranks_per_node, settings.signal_seconds) == ("srun", 8, 300)


def test_the_number_of_ranks_is_gpus_or_on_cpus_tasks():
    assert load_cluster(None, ["gpus_per_node=4", "cpus_per_task=1"]).ranks_per_node == 4
    assert load_cluster(None, [*CPU, "tasks_per_node=3"]).ranks_per_node == 3
    assert load_cluster(None, CPU).ranks_per_node == 1


def test_grace_time_keeps_a_margin_before_slurm_kills():
    assert load_cluster(None, CPU).termination_seconds is None
    assert load_cluster(None, [*CPU, "grace_seconds=30"]).termination_seconds == 20
    assert load_cluster(None, [*CPU, "grace_seconds=30", "launcher=deepspeed"]).termination_seconds == 20


def test_a_range_of_nodes_is_all_the_numbers_the_job_may_get():
    assert list(load_cluster(None, [*CPU, "nodes=2-4"]).node_counts) == [2, 3, 4]
    assert list(load_cluster(None, [*CPU, "nodes=2"]).node_counts) == [2]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:01", 7201),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("1-0:0:5", 86405),
        ("0", 0),
        ("1:2:3:4", None),
        ("soon", None),
        ("1:", None),
        ("-5", None),
        ("5\n", None),
    ],
)
def test_times_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cpus_per_task=1"], "gpus_per_node is missing: ranks on each node, e.g. 8"),
        ([*CPU, "node=2"], "unknown key 'node': did you mean 'nodes'?"),
        (
            [*CPU, "container.kind=pyxis", "container.image=i", "container.mount=[]"],
            "unknown key 'container.mount': did you mean",
        ),
        (
            [*CPU, "container.kind=docker", "container.image=i"],
            "container.kind = 'docker' is not valid: Input should be 'pyxis'",
        ),
        ([*CPU, "launcher=mpirun"], "launcher = 'mpirun' is not valid: Input should be 'srun', 'torchrun'"),
        ([*CPU, "nodes=0"], "nodes = 0 is not valid: write a number such as 2, or a range"),
        ([*CPU, "nodes=4-2"], "nodes = '4-2' is not valid: write the smaller number first: '2-4'"),
        ([*CPU, "time=soon"], "time = 'soon' is not valid: write minutes"),
        ([*CPU, "time=5"], "signal_seconds = 300 is not valid: time '5' is only 300 seconds"),
        ([*CPU, "grace_seconds=10"], "grace_seconds = 10 is not valid: Input should be greater than 10"),
        (
            [*CPU, "launcher=torchrun", "grace_seconds=120"],
            "grace_seconds = 120 is not valid: torchrun kills ranks 30 s after TERM",
        ),
        ([*CPU, "gpu_type=h100"], "gpu_type = 'h100' is not valid: gpus_per_node is 0"),
        (
            ["gpus_per_node=8", "cpus_per_task=1", "tasks_per_node=4"],
            "tasks_per_node = 4 is not valid: each of the 8 GPUs",
        ),
        ([*CPU, 'partition="a\\nb"'], r"partition = 'a\nb' is not valid: write a word on one line"),
        ([*CPU, 'environment={"A B": "1"}'], "'A B' is not a variable name"),
        ([*CPU, "environment.MASTER_PORT=1"], "MASTER_PORT is set for the ranks by the script or by SLURM"),
        ([*CPU, "environment.SLURM_NODEID=1"], "SLURM_NODEID is set for the ranks"),
        ([*CPU, "environment.RANK=1"], "RANK is set for the ranks"),
        ([*CPU, "environment.LOCAL_WORLD_SIZE=1"], "LOCAL_WORLD_SIZE is set for the ranks"),
        ([*CPU, "environment.CROSS_RANK=1"], "CROSS_RANK is set for the ranks"),
        ([*CPU, "environment.UID=1"], "UID is set for the ranks"),
        ([*CPU, "environment.run_folder=1"], "run_folder is a variable of the job script: use another name"),
        (
            ["cpus_per_task=1", "gpus_per_node=true"],
            "gpus_per_node = True is not valid: no key is true or false",
        ),
        ([*CPU, "nodes=99999999999999999999"], "is not valid: write at most 100000"),
        ([*CPU, "nodes=100001"], "is not valid: write at most 100000"),
        ([*CPU, f'nodes="{"9" * 5000}"'], "is not valid: write at most 100000"),
        ([*CPU, "nodes=1-100000"], "nodes = '1-100000' is not valid: a range may have at most"),
        ([*CPU, 'nodes="1\u0662"'], "is not valid: write a number such as"),
        ([*CPU, "time=999999-0"], "time = '999999-0' is not valid: write at most 366 days"),
        ([*CPU, f'time="{"9" * 5000}"'], "is not valid: write minutes"),
        ([*CPU, 'setup=["a\\nb"]'], "must be a command on one line"),
        ([*CPU, 'setup=["a # b"]'], "must be a command on one line, without a comment"),
        ([*CPU, 'setup=["a \\\\"]'], "must be a command on one line"),
        ([*CPU, 'sbatch=["--no-requeue"]'], "'--no-requeue' is set by the script"),
        ([*CPU, 'container={"kind": "pyxis", "image": "i", "mounts": ["data:/data"]}'], "must be absolute"),
        ([*CPU, 'container={"kind": "pyxis", "image": "i", "mounts": ["/a:/a,/b:/b"]}'], "without comma"),
        ([*CPU, 'container={"kind": "pyxis", "image": "i", "options": ["x"]}'], "must begin with '-'"),
        ([*CPU, "script=launch/pretrain.py"], "script = 'launch/pretrain.py' is not valid"),
        ([*CPU, "memory=64 GB"], "memory = '64 GB' is not valid: write a number and K, M, G or T"),
        ([*CPU, "nodes"], "--slurm 'nodes' is not key=value: write for example --slurm nodes=4"),
        ([*CPU, "time.x=1", "time.x.y=2"], "--slurm 'time.x.y=2': x is 1, not an object"),
    ],
)
def test_mistakes_are_one_line_errors(overrides, message):
    with pytest.raises(UserError) as caught:
        load_cluster(None, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_of_the_script_are_reserved():
    texts = [
        path.read_text()
        for path in (ROOT / "launch" / "slurm").glob("*")
        if path.suffix in (".sbatch", ".sh")
    ]
    names = set(re.findall(r"^(?:    )*(?:local )?([a-z_]+)\+?=", "\n".join(texts), re.MULTILINE))
    names |= {
        name
        for line in re.findall(r"\blocal ([a-z_ ]+)$", "\n".join(texts), re.MULTILINE)
        for name in line.split()
    }
    names |= {name for line in re.findall(r"\bread -r ([a-z ]+)", "\n".join(texts)) for name in line.split()}
    assert {"job", "attempt", "ranks", "run_folder", "failures"} <= names
    for name in names:
        with pytest.raises(UserError, match=f"{name} is a variable of the job script"):
            load_cluster(None, [*CPU, f"environment.{name}=1"])


def test_the_largest_number_of_nodes_and_days_are_accepted():
    assert load_cluster(None, [*CPU, "nodes=100000", "time=366-0"]).node_counts[-1] == 100_000


def test_signals_within_the_time_limit_and_hash_signs_inside_words_are_accepted():
    overrides = [*CPU, "time=5", "signal_seconds=299", 'setup=["module load a#b", "[[ -d x ]] && cd x"]']
    assert isinstance(load_cluster(None, overrides), ClusterSettings)
    assert load_cluster(None, [*CPU, "time=0"]).time == "0"  # no limit


HERE = [Path("/home/me"), Path("/data/runs/a"), Path("/home/me/runs/b")]


def test_an_image_brings_its_program_and_mounts_what_is_not_mounted():
    settings = load_cluster(None, CPU).in_image("m.sif", HERE)
    assert settings.script == "/opt/megalowbit/pretrain.py"
    assert settings.container.kind == "apptainer"
    assert settings.container.mounts == ("/data/runs/a:/data/runs/a", "/home/me:/home/me")
    assert load_cluster(None, CPU).in_image("me/image:1", HERE).container.kind == "pyxis"


@pytest.mark.parametrize(
    ("mount", "is_enough"),
    [("/data", True), ("/data:/data", True), ("/data:/data:ro", False), ("/data:/d", False)],
)
def test_a_mount_for_reading_or_under_another_path_does_not_serve_a_run(mount, is_enough):
    container = json.dumps({"kind": "pyxis", "image": "old", "mounts": [mount], "options": ["--x"]})
    settings = load_cluster(None, [*CPU, f"container={container}", "script=/s/pretrain.py"])
    found = settings.in_image("m.sif", [Path("/data/runs/a")])
    assert found.script == "/s/pretrain.py"
    assert (found.container.kind, found.container.image, found.container.options) == (
        "pyxis",
        "m.sif",
        ("--x",),
    )
    assert found.container.mounts == ((mount,) if is_enough else (mount, "/data/runs/a:/data/runs/a"))


def test_folders_and_images_that_a_job_script_cannot_name_are_refused():
    settings = load_cluster(None, CPU)
    with pytest.raises(UserError, match="'/a:b' cannot be mounted, because of its colon: rename it"):
        settings.in_image("m.sif", [Path("/a:b")])
    with pytest.raises(UserError, match="must be absolute and without comma"):
        settings.in_image("m.sif", [Path("/a,b")])
    with pytest.raises(UserError, match=r"container\.image = .* write a word on one line"):
        settings.in_image("", HERE)
