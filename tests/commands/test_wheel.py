"""Wheel and source distribution: equal bytes from equal files, and what an installed wheel can do without a
checkout: the command, shipped configurations, job templates."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
from distribution import built, checked, copied
from environments import environment_with

import megalowbit as package
from launchers import ROOT, free_port, make_cache

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]

pytestmark = pytest.mark.slow


def digests(paths):
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Wheel and source distribution."""
    folder = tmp_path_factory.mktemp("archives")
    return built(copied(folder / "source"), folder)


@pytest.fixture(scope="module")
def wheel(archives):
    return archives[0]


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
    env |= {"MEGALOWBIT_CACHE": str(make_cache(tmp_path / "cache"))}
    (tmp_path / "empty").mkdir()

    def start(*words):
        return checked([installed / "bin" / "megalowbit", *words], env=env, cwd=tmp_path / "empty")

    return start


def test_other_folders_dates_modes_and_leftovers_do_not_change_a_byte(archives, tmp_path):
    other = copied(tmp_path / "another" / "place")
    for path in sorted(other.rglob("*"), reverse=True):
        path.chmod(0o700 if path.is_dir() or path.stat().st_mode & 0o100 else 0o600)
        os.utime(path, (981_173_106, 981_173_106))
    stale = other / "build" / "lib" / "megalowbit" / "removed.py"
    listed = other / "megalowbit.egg-info" / "SOURCES.txt"
    for path, text in ((stale, "x = 1\n"), (listed, "notes.txt\n"), (other / "notes.txt", "private\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert digests(built(other, tmp_path / "out", umask=0o077)) == digests(archives)


def test_a_source_distribution_builds_the_same_wheel(archives, tmp_path):
    wheel, sdist = archives
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    assert digests(built(source, tmp_path / "out")[:1]) == digests([wheel])


def test_source_date_epoch_sets_the_date_and_nothing_else(archives, tmp_path):
    source = copied(tmp_path / "source")
    wheel, _ = built(source, tmp_path / "out", env={"SOURCE_DATE_EPOCH": "1764547200"})
    old, new = zipfile.ZipFile(archives[0]), zipfile.ZipFile(wheel)
    assert {info.date_time for info in old.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert {info.date_time for info in new.infolist()} == {(2025, 12, 1, 0, 0, 0)}
    assert {info.external_attr >> 16 for info in new.infolist()} <= {0o100644, 0o100755}
    assert [(info.filename, info.CRC) for info in new.infolist()] == [
        (info.filename, info.CRC) for info in old.infolist()
    ]
    command = [sys.executable, source / "tools" / "build_backend.py", tmp_path / "none"]
    wrong = os.environ | {"SOURCE_DATE_EPOCH": "yesterday"}
    done = subprocess.run(command, env=wrong, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("SOURCE_DATE_EPOCH='yesterday' is not a date from 1980 to 2107")


def test_a_bare_environment_gets_the_command_and_everything_that_it_requires(wheel, tmp_path):
    """Of the packages of these tests, pip finds the requirements; nothing of the checkout is on the path."""
    options = ("--no-index", "--no-deps", "--ignore-installed", "--find-links", wheel.parent)
    made = environment_with(tmp_path, f"megalowbit=={package.__version__}", *map(str, options))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    version = checked([made / "bin" / "megalowbit", "--version"], env=env, cwd=tmp_path).stdout
    assert version == f"megalowbit {package.__version__}\n"
    code = "import megalowbit; print(megalowbit.__file__)"
    where = checked([made / "bin" / "python", "-c", code], env=env, cwd=tmp_path)
    assert where.stdout.startswith(str(made))
    checks = [sys.executable, "-m", "pip", "--python", made / "bin" / "python", "check"]
    done = subprocess.run(list(map(str, checks)), env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("megalowbit ")] == []


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
