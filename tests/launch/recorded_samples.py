"""Makes a forked rank write down which samples its steps take: `install` is a hook of forks.py.

Samples of `write_corpus` contain their own number, so the record does not depend on the loader's counting.
"""

import json
import os
from pathlib import Path

LENGTH = 32  # bytes of a sample, which is as many tokens
FOLDER = "SAMPLES"  # variable that names where to write


def write_corpus(path, num_samples):
    path.write_text("".join(f"{number:0{LENGTH - 1}d}\n" for number in range(num_samples)))


def install():
    from megalowbit.data.loader import ShardedLoader

    take = ShardedLoader.__next__
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl"

    def take_and_write(loader):
        first = loader.position + loader.rank * loader.micro_batch_size
        batch = take(loader)
        numbers = [int(bytes(row.tolist())) for row in batch["input_ids"]]
        with path.open("a") as file:
            file.write(json.dumps([first, numbers]) + "\n")
        return batch

    ShardedLoader.__next__ = take_and_write


def read(folder):
    """Position and number of each sample that was taken, sorted."""
    taken = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            first, numbers = json.loads(line)
            taken += enumerate(numbers, start=first)
    return sorted(taken)
