"""Sweeps of learning rates whose losses are given; test_analysis.py has one in a whole table."""

import statistics

import pytest

from megalowbit.pretrain.sweep.study.report.learning_rates import learning_rates
from megalowbit.pretrain.sweep.study.study_file import study_of

STUDY = {
    "base": "base.json",
    "sizes": [{"name": "s"}],
    "texts": [{"name": "one", "source": "stdlib"}],
    "seeds": [1, 2, 3],
    "steps": [20],
    "recipes": [{"name": "bf16", "lr_factors": [1, 2]}, {"name": "good", "lr_factors": [1, 2]}],
    "baseline": "bf16",
}
BASELINE = {"bf16": {1: 3.0, 2: 4.0, 3: 5.0}, "bf16@lr2": {1: 2.9, 2: 3.91, 3: 4.92}}
GOOD = {"good": {1: 3.02, 2: 4.02, 3: 5.02}, "good@lr2": {1: 2.95, 2: 3.95}}  # without seed 3


def swept(tmp_path, losses):
    study = study_of(STUDY, "study", tmp_path)
    return {each["recipe"]: each for each in learning_rates(study, losses)}


def test_each_recipe_has_its_best_rate_and_gaps_are_between_the_best_ones(tmp_path):
    found = swept(tmp_path, {**BASELINE, **GOOD})
    assert found["bf16"]["gap"] is None
    assert found["bf16"]["best_factor"] == found["good"]["best_factor"] == "2"
    assert found["bf16"]["mean_losses"] == {"1": 4.0, "2": pytest.approx((2.9 + 3.91 + 4.92) / 3)}
    assert found["good"]["mean_losses"] == {"1": pytest.approx(3.52), "2": pytest.approx(3.45)}  # seeds 1, 2
    assert found["good"]["num_seeds"] == 2
    assert found["good"]["gap"]["num_pairs"] == 2
    assert found["good"]["gap"]["mean"] == pytest.approx(statistics.mean((2.95 - 2.9, 3.95 - 3.91)))
    assert found["bf16"]["is_known"]
    assert found["bf16"]["matters"]  # .1, .09 and .08 lower


def test_all_pairs_at_the_best_rate_count_also_those_without_the_others(tmp_path):
    found = swept(tmp_path, {**BASELINE, "good": {1: 3.02}, "good@lr2": GOOD["good@lr2"]})
    assert found["good"]["num_seeds"] == 1
    assert found["good"]["gap"]["num_pairs"] == 2
    assert not found["good"]["is_known"]


NOTHING = {"best_factor": None, "gap": None, "matters": False, "is_known": False}


@pytest.mark.parametrize("at_twice", [{2: 3.0}, {}])  # {}: all have diverged
def test_a_sweep_without_a_common_seed_has_no_figures(tmp_path, at_twice):
    found = swept(tmp_path, {**BASELINE, "good": {1: 3.0}, "good@lr2": at_twice})
    assert found["good"] == {
        "recipe": "good", "num_seeds": 0, "mean_losses": {"1": None, "2": None}, **NOTHING
    }  # fmt: skip
    assert found["bf16"]["num_seeds"] == 3


def test_gaps_need_the_baselines_best_rate(tmp_path):
    """At its usual one they would be the effect of the rate."""
    found = swept(tmp_path, {"bf16": {1: 3.0, 2: 4.0}, "bf16@lr2": {3: 4.9}, **GOOD})
    assert found["good"]["best_factor"] == "2"
    assert found["good"]["gap"] is None


def test_a_single_rate_is_no_sweep(tmp_path):
    assert list(swept(tmp_path, {**BASELINE, "good": GOOD["good"]})) == ["bf16"]
    assert swept(tmp_path, {"bf16": {1: 3.0}, "good": {1: 3.1}}) == {}


def test_without_a_sweep_of_the_baseline_gaps_are_to_its_usual_rate(tmp_path):
    found = swept(tmp_path, {"bf16": BASELINE["bf16"], **GOOD})
    assert list(found) == ["good"]
    assert found["good"]["gap"]["mean"] == pytest.approx(-0.05)
