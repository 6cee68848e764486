"""An installed wheel in a folder without a checkout: the command, shipped configurations, job templates."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from launchers import ROOT, free_port

SOURCES = ("megalowbit", "configs", "launch", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]

pytestmark = pytest.mark.slow


def checked(command, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves files in the folder that it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    checked([*PIP, "wheel", *OFFLINE, "--wheel-dir", folder, source])
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel):
    """The folder that it is installed to."""
    target = wheel.parent / "target"
    checked([*PIP, "install", *OFFLINE, "--target", target, wheel])
    return target


@pytest.fixture
def megalowbit(installed, tmp_path):
    """The installed command, in an empty folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    env |= {"MEGALOWBIT_CACHE": str(tmp_path / "cache")}
    (tmp_path / "empty").mkdir()

    def start(*words):
        return checked([installed / "bin" / "megalowbit", *words], env=env, cwd=tmp_path / "empty")

    return start


def test_the_wheel_has_what_the_repository_ships(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("megalowbit/shipped/")}
    expected = [
        *(ROOT / "configs").rglob("*.json"),
        *(ROOT / "launch" / "slurm").glob("*.s*"),
        ROOT / "launch" / "pretrain.py",
        ROOT / "tools" / "study.py",
    ]
    assert names == {f"megalowbit/shipped/{path.relative_to(ROOT)}" for path in expected}


def test_a_shipped_configuration_trains_in_an_empty_folder(megalowbit, installed, tmp_path):
    few = ("--set", "megalowbit.run.steps=2", "--set", "megalowbit.lr_schedule=null")
    text = tmp_path / "text.txt"
    text.write_text("the baker counts letters at dawn. " * 200)
    done = megalowbit(
        "pretrain", "--ds-config", "gpt2_tiny_fp4", "--run-dir", "run", *few,
        "--set", f"megalowbit.data.corpus={text}", "--set", "megalowbit.late_switch=null",
    )  # fmt: skip
    config = installed / "megalowbit" / "shipped" / "configs" / "gpt2_tiny_fp4.json"
    assert done.stdout.startswith(f"config    gpt2_tiny_fp4 comes with megalowbit: {config}\n")
    summary = json.loads((tmp_path / "empty" / "run" / "summary.json").read_text())
    assert summary["steps"] == 2


def test_a_job_script_starts_the_installed_program(megalowbit, installed):
    arguments = ("--ds-config", "gpt2_tiny_fp4", "--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=1")
    script = megalowbit("submit", *arguments, "--dry-run").stdout
    shipped = installed / "megalowbit" / "shipped"
    assert f"python {shipped}/launch/pretrain.py" in script
    assert f"--ds-config {shipped}/configs/gpt2_tiny_fp4.json" in script


def test_a_study_lists_its_cells(megalowbit, installed):
    study = installed / "megalowbit" / "shipped" / "configs" / "studies" / "gap.json"
    cells = megalowbit("study", study, "--out", "out", "--list").stdout.splitlines()
    assert cells
    assert all(line.startswith("-") for line in cells)
