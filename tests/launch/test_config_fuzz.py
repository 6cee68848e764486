import json
import os

import pytest
from config_fuzz import check_meaning, damaged, fuzz, try_one

from launchers import ROOT


@pytest.fixture(autouse=True)
def _environment_as_before():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_damaged_configurations_are_accepted_or_refused_in_lines(tmp_path):
    outcomes = fuzz(7, tmp_path, count=400)
    assert sum(outcomes.values()) == 400
    for kind in ("run", "cluster"):
        assert outcomes[kind, "accepted"] > 5
        assert outcomes[kind, "refused"] > 20
    assert outcomes["model", "refused"] > 10


@pytest.mark.slow
def test_damaged_configurations_in_both_programs(tmp_path):
    outcomes = fuzz(2, tmp_path, count=800, commands=5)
    assert sum(count for (_, outcome), count in outcomes.items() if "command" not in outcome) == 800
    assert sum(count for (_, outcome), count in outcomes.items() if "command" in outcome) >= 3


def test_the_fuzz_sees_a_value_that_was_taken_for_another():
    with pytest.raises(AssertionError, match=r"checkpoint\.keep = True was accepted as 1"):
        check_meaning({"checkpoint": {"keep": True}}, {"checkpoint": {"keep": 1}})
    with pytest.raises(AssertionError, match=r"a\.b = 3 was accepted and is gone"):
        check_meaning({"a": {"b": 3}}, {"a": {}})
    check_meaning({"a": None, "b": "auto", "c": 1}, {"a": 5, "b": 2, "c": 1.0})


def test_the_fuzz_damages_what_it_is_given_and_nothing_else(tmp_path):
    import random

    raw = json.loads((ROOT / "configs" / "gpt2_tiny_fp4.json").read_text())
    before = json.dumps(raw)
    others = [damaged(raw, random.Random(seed)) for seed in range(50)]
    assert json.dumps(raw) == before
    assert sum(other != raw for other in others) > 40
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert try_one("run", path, 1) is False
