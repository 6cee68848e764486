"""The commit of the code that a report is about. Imports no torch, because the runner needs it at once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path


def commit_of(root: Path) -> str:
    """The commit of the code; if files differ from it, with a hash of the differences."""
    commit = output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*")
    if commit.endswith("-dirty"):
        changes = output_of("git", "-C", str(root), "diff", "HEAD", "--binary")
        commit += f"-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"
    return commit or "unknown"


def output_of(*command: str) -> str:
    """What a program prints; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
