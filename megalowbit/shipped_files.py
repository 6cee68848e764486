"""Finds files that come with the package but are no modules: configurations, job templates, entry scripts.

In a checkout they are in `configs/`, `launch/` and `tools/`, next to the package. A wheel has the same
folders in `megalowbit/shipped/`; setup.py copies them there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from megalowbit.errors import UserError, unknown_name

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


def to_stderr(line: str) -> None:
    """Print a line that does not belong to a command's result."""
    print(line, file=sys.stderr, flush=True)


def find_config(path: Path, announce: Callable[[str], None] = to_stderr) -> Path:
    """The configuration that `--ds-config` names: a file, or a shipped configuration by its name.

    Args:
        path: as given. A file of this name comes before a shipped configuration.
        announce: called with a line that says which file a shipped name stands for.

    Raises:
        UserError: it is neither, and looks like a name: it has no folder and no suffix.
    """
    name = path.name.removesuffix(".json")
    known = shipped_configs()
    try:
        is_other = path.name != str(path) or path.exists()
    except OSError:  # a name of more than 255 bytes
        is_other = True
    if is_other:
        return path
    if name in known:
        announce(f"config    {name} comes with megalowbit: {known[name]}")
        return known[name]
    if path.suffix:
        return path
    raise UserError(f"there is no file {path}, and {unknown_name('shipped configuration', name, known)}")
