"""`megalowbit submit` up to sbatch, and what the documentation says of it; its jobs are in tests/slurm."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import ROOT, check_refusal, write_config
from megalowbit.cluster.settings import load_cluster
from megalowbit.commands.runs import submit
from megalowbit.pretrain.command_line import build_parser
from megalowbit.pretrain.config import load_config

SUBMIT = ROOT / "launch" / "slurm" / "submit.py"
LAUNCHERS = ["srun", "torchrun", "deepspeed"]


@pytest.fixture
def files(tmp_path):
    """Arguments that name a cluster of CPUs and a tiny run."""
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"gpus_per_node": 0, "nodes": 2, "cpus_per_task": 1}))
    config = write_config(tmp_path)
    return ["--cluster", str(cluster), "--ds-config", str(config), "--run-dir", str(tmp_path / "run")]


def documented(start, *names):
    """Commands in the documentation that begin so."""
    lines = [line for name in names for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line.startswith(start) and " --ds-config " in line]
    assert found
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_dry_run_shows_a_script_and_writes_nothing(files, capsys, tmp_path, launcher):
    before = sorted(tmp_path.iterdir())
    assert submit.main([*files, "--slurm", f"launcher={launcher}", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert f"--output={tmp_path / 'run'}/slurm/job-%j.log" in script
    assert f"export PATH={Path(sys.executable).parent}:" in script
    assert sorted(tmp_path.iterdir()) == before


DOORS = ("python launch/slurm", "megalowbit submit")


@pytest.mark.parametrize("command", documented(DOORS, "README.md", "docs/clusters.md"))
def test_documented_commands_make_scripts(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "lr.txt").write_text("optimizer.params.lr=1e-3\n")
    assert submit.main([*shlex.split(command)[2:], "--dry-run"]) == 0, capsys.readouterr().err


def test_an_image_is_started_with_its_program_and_the_folders_of_the_run(
    files, capsys, tmp_path, monkeypatch
):
    place = tmp_path / "working"
    place.mkdir()
    monkeypatch.chdir(place)
    assert submit.main([*files, "--container", "/images/m.sif", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert f"apptainer exec --bind={tmp_path}:{tmp_path} --pwd={place} /images/m.sif" in script.replace(
        ")\n    step+=(", " "
    )
    assert "python /opt/megalowbit/pretrain.py" in script
    assert "export PATH=" not in script
    assert submit.main([*files, "--container", "a\nb", "--dry-run"]) == 2
    assert "container.image = 'a\\nb' is not valid" in capsys.readouterr().err


@pytest.mark.parametrize("command", documented(("torchrun", "deepspeed"), "docs/clusters.md"))
def test_documented_commands_for_many_nodes_parse(command):
    words = shlex.split(command)
    options = build_parser().parse_args(words[words.index("launch/pretrain.py") + 1 :])
    load_config(ROOT / options.ds_config, options.overrides, world_size=16)


def test_documented_cluster_and_containers_are_valid(tmp_path):
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    cluster, *containers = map(json.loads, re.findall(r"```json\n(.*?)```", text, re.DOTALL))
    for container in containers:
        (tmp_path / "c.json").write_text(json.dumps({**cluster, "container": container}))
        assert load_cluster(tmp_path / "c.json", []).container.kind == container["kind"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slurm", "noodes=3"], "unknown key 'noodes': did you mean 'nodes'?"),
        (["--set", "megalowbit.recip=bf16"], "unknown key 'megalowbit.recip'"),
        (["--set", "train_batch_size=3"], "train_batch_size"),
        (["--slurm", 'setup=["if true"]'], "the script has a syntax error"),
        (["--array-limit", "2"], "--array-limit 2 needs --array"),
        (["--array", "nowhere.txt"], "--array nowhere.txt cannot be read (No such file or directory)"),
        (["--array", "EMPTY"], "contains no run: write KEY=VALUE"),
        (["--array", "WORD"], "line 2: 'seed' is not KEY=VALUE: write it as for --set"),
        (["--array", "QUOTE"], "line 1: No closing quotation: close the quotation"),
        (["--array", "KEY"], "run 2 of the sweep: unknown key 'megalowbit.run.stps': did you mean"),
        (["--run-dir", "TAKEN"], "is not empty: continue it with --resume auto, or choose another --run-dir"),
        (["--array", "FEED"], "line 1: 'seed\\x0c' is not KEY=VALUE"),
        (["--run-dir", "~nosuch/x"], "'~nosuch/x': this home directory does not exist: write the path out"),
        (["--run-dir", "/tmp/\udcff"], "is not UTF-8 text: write --cluster, --slurm, --set and paths in"),
        (["--slurm", "job_name=\udcff"], "is not UTF-8 text"),
        (["--slurm", 'environment={"A": "\\ud800"}'], "is not UTF-8 text"),
        ([], "sbatch cannot be run (No such file or directory): use a machine where jobs are submitted"),
    ],
)
def test_mistakes_are_reported_before_anything_is_queued(
    files, capsys, tmp_path, monkeypatch, arguments, message
):
    texts = {
        "EMPTY": "# nothing\n\n",
        "WORD": "--set megalowbit.run.seed=1\nseed\n",
        "QUOTE": "a='b\n",
        "FEED": "a=1 seed\x0c\n",
        "KEY": "megalowbit.run.steps=3\nmegalowbit.run.stps=3\n",
    }
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    places = {"TAKEN": "taken", **{name: name for name in texts}}
    words = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    monkeypatch.setenv("PATH", str(only_bash(tmp_path)))
    assert submit.main([*files, *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert not (tmp_path / "run").exists()


WITHOUT_TORCH = """
import importlib.util, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "deepspeed", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
spec = importlib.util.spec_from_file_location("submit", sys.argv.pop(1))
submit = sys.modules["submit"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(submit)
sys.exit(submit.main(sys.argv[1:]))
"""


# Help and most mistakes are printed in 0.3 s; the imports for the full checks (5 s, 400 MB) come last.
LIGHT = """
import runpy, sys
sys.argv[0] = sys.argv.pop(1)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    heavy = {"torch", "deepspeed", "transformers", "numpy"} & set(sys.modules)
    print("imported:", *sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--set", "megalowbit.run.stps=3"], 2)])
def test_help_and_mistakes_do_not_import_torch(files, arguments, code):
    command = [sys.executable, "-c", LIGHT, str(SUBMIT), *files, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "imported:"


@pytest.mark.slow
def test_without_torch_on_the_host_mistakes_are_reported_and_model_sizes_are_not_checked(files):
    image = ["--slurm", 'container={"kind": "apptainer", "image": "/i.sif"}', "--dry-run"]
    start = [sys.executable, "-c", WITHOUT_TORCH, str(SUBMIT), *files, *image]
    sizes = ["--set", "zero_optimization.stage=3", "--set", "zero_optimization.reduce_bucket_size=auto"]
    done = subprocess.run([*start, *sizes], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    for recipe in ("nvfp4", "mxfp4"):
        wrong = ["--set", "megalowbit.run.stps=3", "--set", f"megalowbit.recipe={recipe}"]
        done = subprocess.run([*start, *wrong], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: unknown key 'megalowbit.run.stps': did you mean")


def only_bash(folder):
    made = folder / "only-bash"
    made.mkdir()
    (made / "bash").symlink_to("/bin/bash")
    return made


def test_a_range_of_nodes_is_checked_at_every_number(files, capsys):
    batch = ["--set", "train_batch_size=8", "--set", "gradient_accumulation_steps=auto"]
    assert submit.main([*files, "--slurm", "nodes=1-3", *batch, "--dry-run"]) == 2
    assert "error: on 3 nodes: " in capsys.readouterr().err


def test_grace_time_reaches_the_configuration_of_the_run(files, capsys):
    assert submit.main([*files, "--slurm", "grace_seconds=40", "--dry-run"]) == 0
    script = capsys.readouterr().out
    [setting] = re.findall(r"--set (megalowbit\.watchdog\.\S+=\d+)\)", script)
    config = load_config(ROOT / "configs" / "gpt2_tiny_fp4.json", [setting], world_size=1)
    assert config.parts.settings.watchdog.termination_seconds == 30


def test_a_job_that_sbatch_rejects_leaves_no_files(files, capsys, tmp_path, monkeypatch):
    folder = only_bash(tmp_path)
    (folder / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert submit.main(files) == 2
    assert "sbatch rejects the job (sbatch: error: invalid partition)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("body", ["exit 1", "echo", "echo 'job  is queued'"])
def test_a_job_that_is_not_queued_changes_no_files(files, capsys, tmp_path, monkeypatch, body):
    folder = only_bash(tmp_path)
    (folder / "sbatch").write_text(f"#!/bin/bash\n{body}\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    new = tmp_path / "new" / "run"
    assert submit.main([*files, "--run-dir", str(new)]) == 2
    assert not new.parent.exists()
    script = tmp_path / "run" / "slurm" / "pretrain.sbatch"
    script.parent.mkdir(parents=True)
    script.write_text("of an earlier job")
    capsys.readouterr()
    assert submit.main([*files, "--resume", "auto"]) == 2
    printed = capsys.readouterr()
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert script.read_text() == "of an earlier job"
    assert [*script.parent.iterdir()] == [script]


def test_a_missing_working_folder_is_reported(files, capsys, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert submit.main([*files, "--dry-run"]) == 2
    assert "error: the working directory cannot be used (No such file" in capsys.readouterr().err


def test_a_job_that_submits_another_keeps_its_own_variables(files, capsys, tmp_path, monkeypatch):
    folder = only_bash(tmp_path)
    (folder / "sbatch").write_text('#!/bin/bash\necho "${!SLURM_@} ${!SBATCH_@}" >"$0.names"; echo "7;c"\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")  # it and others would win over what the script says
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    assert submit.main(files) == 0
    assert capsys.readouterr().out.startswith("job 7 is queued")
    assert (folder / "sbatch.names").read_text().split() == ["SLURM_CONF"]
    assert (tmp_path / "run" / "slurm" / "pretrain.sbatch").read_text().startswith("#!/bin/bash\n")


def test_mistakes_on_the_command_line_itself_are_one_line_errors():
    check_refusal(
        subprocess.run([sys.executable, SUBMIT, "--dry-run"], capture_output=True, text=True),
        "the following arguments are required: --ds-config; see --help",
    )
