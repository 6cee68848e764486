"""Damaged checkpoints on two ranks: both load the same one or raise the same error."""

import pytest

pytestmark = pytest.mark.slow

LEAST = 10  # cases, on a busy machine


@pytest.mark.parametrize("stage", [0, 2])
def test_every_damage_has_the_same_outcome_on_both_ranks(launch_ranks, tmp_path, stage):
    results = launch_ranks("ranks_checkpoint_fuzz.py", tmp_path, stage, 5000 + stage, "25s").wait(timeout=600)
    for result in results:
        assert not result["failures"], "\n\n".join(result["failures"])
        assert sum(result["counts"].values()) >= LEAST
