"""Copies of the installed DeepSpeed with another version number and, optionally, other changes."""

import shutil
import sys
from pathlib import Path

import deepspeed

INSTALLED = Path(deepspeed.__file__).parent
VERSION_FILE = "git_version_info_installed.py"


def copy_deepspeed(folder, version, changes=()):
    """A package `deepspeed` below `folder`, to be put first on PYTHONPATH; returns `folder`.

    Args:
        folder: is created.
        version: value of `deepspeed.__version__`.
        changes: (file, old text, new text) of each edit.
    """
    target = folder / "deepspeed"
    target.mkdir(parents=True)
    changed = {VERSION_FILE, *(path for path, _, _ in changes)}
    for path in INSTALLED.iterdir():
        if path.is_dir() and any(Path(each).parts[0] == path.name for each in changed):
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name not in {*changed, "__pycache__"}:
            (target / path.name).symlink_to(path)
    source = (INSTALLED / VERSION_FILE).read_text()
    before = f"version='{deepspeed.__version__}'"
    assert before in source
    (target / VERSION_FILE).write_text(source.replace(before, f"version='{version}'"))
    for path, old, new in changes:
        text = (target / path).read_text()
        assert old in text
        (target / path).write_text(text.replace(old, new))
    return folder


def environment(folder, base, **more):
    """`base` with the copy first on the path."""
    root = str(Path(__file__).parents[2])
    return {**base, "PYTHONPATH": f"{folder}:{root}", "DS_ACCELERATOR": "cpu", **more}


PYTHON = sys.executable
