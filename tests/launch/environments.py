"""Environments with further packages, which tests compare with and the project does not depend on."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

MINUTES = 15


def environment_with(folder, requirement, *options):
    """Make a virtual environment with `requirement` and all packages of this one; return its folder.

    Packages are installed into the environment only. A test must not pass because it could not be run, so it
    fails if PyPI cannot be reached.

    Args:
        folder: where the environment is made.
        requirement: what to install, with its version: `name==1.2`.
        options: further arguments of pip, such as `--no-deps`.
    """
    assert "==" in requirement, "a new release must not change what a test shows"
    made = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True, timeout=300)
    inside = {"base": str(made), "platbase": str(made)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=inside))
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "project.pth").write_text("".join(f"{path}\n" for path in ours))
    command = [sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "install", "--quiet"]
    # not compiled: most files of large packages are never imported
    command += ["--no-compile", "--disable-pip-version-check", "--retries", "1", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.fail(f"{requirement} cannot be installed from PyPI, which this test needs: {last}")
    return made
