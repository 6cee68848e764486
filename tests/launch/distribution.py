"""Builds the project's wheel and source distribution for tests."""

import os
import shutil
import subprocess
import sys

from launchers import ROOT

FOLDERS = ("megalowbit", "configs", "launch", "tools")
FILES = (
    "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt",
)  # fmt: skip


def checked(command, **more):
    """Run a command that must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def copied(source):
    """The files of a distribution, copied to the folder `source`, because setuptools leaves files there."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    for name in FILES:
        shutil.copy2(ROOT / name, source / name)
    return source


def built(source, target, **more):
    """Build both archives from `source`; returns the paths of the wheel and of the source distribution."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | more.pop("env", {})
    checked([sys.executable, source / "tools" / "build_backend.py", target], env=env, **more)
    [wheel], [sdist] = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist
