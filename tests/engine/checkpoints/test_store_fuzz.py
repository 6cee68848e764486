"""Damaged checkpoints on one process; `tests/distributed/test_checkpoint_fuzz.py` has two and a long run."""

import pytest
from checkpoint_fuzz import fuzz
from small_engines import make_engine, step


@pytest.mark.parametrize(
    ("stage", "cases"),
    [(2, 40), *(pytest.param(stage, 150, marks=pytest.mark.slow) for stage in (0, 2))],
)
def test_any_damage_ends_in_a_complete_checkpoint_or_a_one_line_error(tmp_path, stage, cases):
    def make():
        return make_engine(stage)

    failures, counts = fuzz(make, step, tmp_path, first_seed=1000 * stage, cases=cases)
    assert not failures, "\n\n".join(failures)
    assert sum(counts.values()) == cases
    assert sum(count for name, count in counts.items() if name.endswith("loaded step-00000001")) > cases / 4
