"""SIGKILL of all ranks at arbitrary moments of a save leaves a checkpoint that loads."""

import random
import time

from megalowbit.engine.checkpoint import CheckpointStore

ROUNDS = 3


def wait_for_a_new_checkpoint(ranks, store, known, timeout=60):
    end = time.monotonic() + timeout
    while not store.steps() or store.steps()[-1] <= known:
        assert time.monotonic() < end, ranks.output()
        assert all(process.poll() is None for process in ranks.processes), ranks.output()
        time.sleep(0.01)


def test_a_kill_during_save_leaves_a_loadable_checkpoint(launch_ranks, tmp_path):
    store, moments = CheckpointStore(tmp_path), random.Random(0)
    known = 0
    for _ in range(ROUNDS):
        ranks = launch_ranks("ranks_save_forever.py", tmp_path, "save")  # starts by loading what is there
        wait_for_a_new_checkpoint(ranks, store, known)
        time.sleep(moments.uniform(0, 0.5))
        ranks.kill()
        store.verify(store.latest())
        known = store.steps()[-1]
    found = launch_ranks("ranks_save_forever.py", tmp_path, "look", launcher="slurm").wait(timeout=60)
    assert found == [{"step": known}] * 2
