"""SIGKILL of one rank or of all at arbitrary moments of a save leaves a checkpoint that loads, at any stage.

Stages alternate, so that each start also resumes what another stage has left.
"""

import random
import signal
import time

import pytest

from megalowbit.durable_files import verify_folder
from megalowbit.engine.checkpoints.store import CheckpointStore

STAGES = (0, 1, 2, 3)


def wait_for_a_new_checkpoint(ranks, store, known, timeout=60):
    end = time.monotonic() + timeout
    while not store.steps() or store.steps()[-1] <= known:
        assert time.monotonic() < end, ranks.output()
        assert all(process.poll() is None for process in ranks.processes), ranks.output()
        time.sleep(0.01)


def kill_and_check(launch_ranks, folder, rounds, seed):
    """Start, wait for a save, kill; then the newest checkpoint must be whole, and the next start load it."""
    store, moments = CheckpointStore(folder), random.Random(seed)
    known, interrupted = 0, 0
    for number in range(rounds):
        stage = STAGES[number % len(STAGES)]
        ranks = launch_ranks("ranks_save_forever.py", folder, "save", stage)  # loads what is there
        wait_for_a_new_checkpoint(ranks, store, known)
        time.sleep(moments.uniform(0, 0.5))
        victim = moments.choice([0, 1, None])
        if victim is not None:
            ranks.processes[victim].send_signal(signal.SIGKILL)
            time.sleep(moments.uniform(0, 0.1))  # what the other one does meanwhile must do no harm
        ranks.kill()
        known = store.steps()[-1]
        verify_folder(store.path_of(known), remedy="")
        interrupted += any(path.name > store.path_of(known).name for path in folder.glob("step-*"))
    stage = STAGES[rounds % len(STAGES)]
    found = launch_ranks("ranks_save_forever.py", folder, "check", stage, launcher="slurm").wait(timeout=60)
    assert found == [{"step": known}] * 2
    assert not list(folder.glob("*.damaged*"))
    return interrupted


@pytest.mark.slow
def test_a_kill_during_a_save_leaves_a_loadable_checkpoint(launch_ranks, tmp_path):
    kill_and_check(launch_ranks, tmp_path, rounds=len(STAGES), seed=0)


@pytest.mark.slow
def test_thirty_kills_during_save(launch_ranks, tmp_path):
    interrupted = kill_and_check(launch_ranks, tmp_path, rounds=30, seed=1)
    print(f"{interrupted} of 30 kills left an incomplete checkpoint")
    assert interrupted
