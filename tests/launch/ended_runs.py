"""What tests of ended and lost runs share: their length, how they are killed, what lies in their folder."""

import json

STEPS = ("megalowbit.run.steps=4", "megalowbit.checkpoint.every=2")


class Killed(BaseException):
    """As SIGKILL: nothing of ours expects it."""


def contents(folder):
    """Every file below a run's folder with its bytes, but for the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def rows(folder, name="metrics.jsonl"):
    """Steps with a line in a file of records."""
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def dangle(folder):
    """Let a run's checkpoints be a link to a folder that does not exist."""
    (folder / "checkpoints").rename(folder.parent / "moved")
    (folder / "checkpoints").symlink_to(folder / "gone")


def remove_manifests(folder):
    """Leave a run's checkpoints without what vouches for them."""
    for path in (folder / "checkpoints").glob("step-*/manifest.json"):
        path.unlink()
