"""Damaged checkpoints on two ranks: both load the same one or raise the same error."""

import pytest
from checkpoint_fuzz import DAMAGES

pytestmark = pytest.mark.slow

CASES = 32  # each damage twice


@pytest.mark.parametrize("stage", [0, 2])
def test_every_damage_has_the_same_outcome_on_both_ranks(launch_ranks, tmp_path, stage):
    results = launch_ranks("ranks_checkpoint_fuzz.py", tmp_path, stage, 5000 + stage, CASES).wait(timeout=600)
    for result in results:
        assert not result["failures"], "\n\n".join(result["failures"])
        damages = {outcome.partition(":")[0] for outcome in result["counts"]}
        assert damages == {damage.__name__ for damage in DAMAGES}
        assert sum(result["counts"].values()) == CASES
