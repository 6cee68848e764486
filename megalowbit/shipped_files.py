"""Finds files that come with the package but are no modules: configurations, job templates, entry scripts.

In a checkout they are in `configs/`, `launch/` and `tools/`, next to the package. A wheel has the same
folders in `megalowbit/shipped/`; setup.py copies them there.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
IN_WHEEL = PACKAGE / "shipped"


def checkout() -> Path | None:
    """The root of the repository that this package is in; None if the package was installed from a wheel."""
    return None if IN_WHEEL.is_dir() else PACKAGE.parent


def shipped_folder() -> Path:
    """The folder that has `configs/`, `launch/` and `tools/study.py`."""
    return checkout() or IN_WHEEL


def pretrain_script() -> Path:
    """`launch/pretrain.py`, the file that launchers start as ranks."""
    return shipped_folder() / "launch" / "pretrain.py"


def study_script() -> Path:
    """`tools/study.py`, the file that runs a cell of a study."""
    return shipped_folder() / "tools" / "study.py"


def job_templates() -> Path:
    """The folder with the templates of job scripts."""
    return shipped_folder() / "launch" / "slurm"


def shipped_configs() -> dict[str, Path]:
    """The configurations of runs that are shipped, by name: that of the file, without `.json`."""
    return {path.stem: path for path in sorted((shipped_folder() / "configs").glob("*.json"))}
