import json
import math
import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from megalowbit.errors import UserError, invalid_settings
from megalowbit.speculation.settings import (
    BITS,
    EstimatorSettings,
    SpeculationSettings,
    with_current_keys,
)


def refusal(values):
    with pytest.raises(ValidationError) as caught:
        SpeculationSettings.model_validate(values)
    message = str(invalid_settings(caught.value, "megalowbit.speculation", SpeculationSettings))
    assert "\n" not in message
    return message


def test_defaults_are_valid_when_written_out():
    settings = SpeculationSettings()
    assert settings.candidates == ("int8", "fp8", "bf16")
    assert (settings.threshold("int8"), settings.threshold("fp8")) == (15.0, 15.0)
    assert settings.threshold("bf16") == -math.inf
    assert SpeculationSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize("threshold_db", [12, 0, 17.5, {"int8": 12, "mixed": 9.5}])
def test_settings_survive_json(threshold_db):
    written = SpeculationSettings(
        candidates=["int8", "mixed", "bf16"],
        threshold_db=threshold_db,
        estimator={"sample": 256},
    )
    text = json.dumps(written.model_dump(mode="json"), allow_nan=False)
    assert SpeculationSettings.model_validate(json.loads(text)) == written


def test_each_candidate_may_have_a_separate_threshold():
    settings = SpeculationSettings(threshold_db={"fp8": 8, "int8": 12.5})
    assert [settings.threshold(candidate) for candidate in settings.candidates] == [12.5, 8.0, -math.inf]


def test_the_former_key_ladder_is_accepted_and_written_back_as_candidates():
    former = SpeculationSettings(ladder=["int4", "bf16"], threshold_db={"int4": 9})
    assert former == SpeculationSettings(candidates=["int4", "bf16"], threshold_db={"int4": 9})
    assert "ladder" not in former.model_dump()
    assert "unknown precision 'int9'" in refusal({"ladder": ["int9", "bf16"]})


def test_giving_candidates_under_both_names_is_one_error():
    text = refusal({"ladder": ["int4", "bf16"], "candidates": ["int8", "bf16"]})
    assert text.startswith("megalowbit.speculation = ")
    assert text.endswith('"ladder" is the former name of "candidates": remove "ladder"')
    assert "\n" not in text


def test_bf16_as_the_only_candidate_is_allowed():
    assert SpeculationSettings(candidates=["bf16"]).candidates == ("bf16",)
    assert SpeculationSettings(candidates=["bf16"], threshold_db={}).threshold_db == {}


@given(candidates=st.lists(st.sampled_from(list(BITS)), max_size=7))
@example(candidates=["int4", "nvfp4", "int8", "mixed", "fp8", "bf16"])
def test_candidates_are_valid_if_they_rise_to_bf16_without_duplicates(candidates):
    bits = [BITS[candidate] for candidate in candidates]
    is_valid = (
        len(set(candidates)) == len(candidates) and bits == sorted(bits) and candidates[-1:] == ["bf16"]
    )
    if is_valid:
        assert SpeculationSettings(candidates=candidates).candidates == tuple(candidates)
    else:
        refusal({"candidates": candidates})


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        (["int9", "bf16"], r"unknown precision 'int9': did you mean 'int8'\? known: int4, nvfp4, int8, "),
        (["int8", 3, "bf16"], "unknown precision 3: known: "),
        (["int8", ["fp8"], "bf16"], r"unknown precision \['fp8'\]: "),
        (["int8", "fp8"], 'the last precision must be "bf16", such as'),
        (["bf16", "int8"], 'the last precision must be "bf16"'),
        ([], 'the last precision must be "bf16"'),
        (["int8", "int8", "bf16"], "'int8' is listed twice: list it once"),
        (["int8", "bf16", "bf16"], "'bf16' is listed twice"),
        (["int8", "nvfp4", "bf16"], "'nvfp4' has fewer bits than 'int8' before it: list the cheapest first"),
        ("int8", r'= .* expected a list of precisions, cheapest first, such as \["int8", "fp8", "bf16"\]'),
        (None, "expected a list of precisions"),
    ],
)
def test_invalid_candidates_are_rejected(ladder, message):
    text = refusal({"candidates": ladder})
    assert text.startswith("megalowbit.speculation.candidates = ")
    assert re.search(message, text)


@pytest.mark.parametrize(
    ("threshold_db", "message"),
    [
        (-1, "expected a finite number of dB ≥ 0, such as 15"),
        (math.nan, "expected a finite number of dB"),
        (math.inf, "expected a finite number of dB"),
        (10**400, "expected a finite number of dB"),
        (True, 'expected a number of dB, or one for each candidate such as {"int8": 15}'),
        ("15", "expected a number of dB"),
        (None, "expected a number of dB"),
        ([15, 15], "expected a number of dB"),
        ({"int8": 15}, "no threshold for fp8: add it, or write one number for all"),
        ({}, "no threshold for int8, fp8"),
        ({"int8": 15, "fp8": 15, "int4": 5}, "unknown candidate 'int4': did you mean 'int8'"),
        ({"int8": 15, "fp9": 15}, "unknown candidate 'fp9': did you mean 'fp8'"),
        ({"int8": 15, "fp8": 15, "bf16": 50}, '"bf16" is not quantised and has no threshold: leave it out'),
        ({"int8": 15, "fp8": -2}, "fp8: expected a finite number of dB"),
        ({"int8": "15", "fp8": 2}, "int8: expected a number of dB"),
    ],
)
def test_a_wrong_threshold_is_refused(threshold_db, message):
    text = refusal({"threshold_db": threshold_db})
    assert text.startswith("megalowbit.speculation.threshold_db = ")
    assert message in text


def test_invalid_candidates_are_reported_before_their_thresholds():
    assert "unknown precision 'int9'" in refusal(
        {"candidates": ["int9", "bf16"], "threshold_db": {"int9": 3}}
    )


# Former settings: other noise models and estimators


def test_former_settings_with_the_values_that_are_built_in_are_accepted_and_not_written_back():
    """As configurations and the records of earlier runs have them."""
    written = {
        "model": "calibrated",
        "signal": "bulk",
        "estimator": {"type": "quantile", "sample": 64, "negative_k": 5},
    }
    assert SpeculationSettings.model_validate(written) == SpeculationSettings(estimator={"sample": 64})
    assert with_current_keys({"ladder": ["int8", "bf16"], **written}) == {
        "candidates": ["int8", "bf16"],
        "estimator": {"sample": 64},
    }


@pytest.mark.parametrize(
    ("values", "where", "message"),
    [
        ({"model": "zeros"}, "", "model 'zeros' was removed, \"calibrated\" is built in: remove model"),
        ({"model": None}, "", "model None was removed"),
        ({"signal": "all"}, "", "signal 'all' was removed, \"bulk\" is built in: remove signal"),
        (
            {"estimator": {"type": "mad"}},
            ".estimator",
            "type 'mad' was removed, \"quantile\" is built in: remove type",
        ),
        ({"estimator": {"type": "negative", "negative_k": 3}}, ".estimator", "type 'negative' was removed"),
    ],
)
def test_former_settings_with_other_values_are_refused_with_the_remedy(values, where, message):
    text = refusal(values)
    assert text.startswith(f"megalowbit.speculation{where} = ")
    assert message in text
    with pytest.raises(UserError, match=r"the run to resume .* start a new run from its weights") as caught:
        with_current_keys(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "is_valid"),
    [
        ({"every": 20}, True),
        ({"every": 21}, False),
        ({"lookahead": 9}, False),
        ({"lookahead": 10}, True),
        ({"lookahead": 0, "every": 500}, True),
    ],
)
def test_a_trend_must_reach_the_next_check(values, is_valid):
    if is_valid:
        SpeculationSettings(**values)
    else:
        text = refusal(values)
        assert text.startswith("megalowbit.speculation.lookahead = ")
        assert f"set it to {values.get('every', 10)} or more, to 0 for no trend, or lower every" in text


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ({"every": 0}, "every = 0 is not valid: Input should be greater than or equal to 1"),
        ({"every": True}, "every = True is not valid"),
        ({"every": "10"}, "every = '10' is not valid"),
        ({"every": 2.5}, "every = 2.5 is not valid"),
        (
            {"every": 10**9 + 1},
            "every = 1000000001 is not valid: Input should be less than or equal to 1000000000",
        ),
        ({"lookahead": -1}, "lookahead = -1 is not valid"),
        ({"trend_window": 1}, "trend_window = 1 is not valid: Input should be greater than or equal to 2"),
        ({"hysteresis_db": -0.5}, "hysteresis_db = -0.5 is not valid"),
        ({"hysteresis_db": math.nan}, "hysteresis_db = nan is not valid"),
        ({"hysteresis_db": math.inf}, "hysteresis_db = inf is not valid"),
        ({"patience": 0}, "patience = 0 is not valid"),
        ({"verify_every": -1}, "verify_every = -1 is not valid"),
        ({"verify_size": 0}, "verify_size = 0 is not valid"),
        ({"cooldown": -1}, "cooldown = -1 is not valid"),
        ({"use_alignment": 1}, "use_alignment = 1 is not valid"),
        ({"estimator": {"sample": 0}}, "estimator.sample = 0 is not valid"),
        (
            {"trend_window": 1001},
            "trend_window = 1001 is not valid: Input should be less than or equal to 1000",
        ),
        ({"estimator": 5}, "estimator = 5 is not valid"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(values, start):
    assert refusal(values).startswith(f"megalowbit.speculation.{start}")


COUNTS = [name for name, field in SpeculationSettings.model_fields.items() if type(field.default) is int]
COUNTS += ["estimator.sample"]


@pytest.mark.parametrize("digits", [10, 400, 5000])
@pytest.mark.parametrize("key", COUNTS)
def test_counts_have_bounds_far_beyond_any_run(key, digits):
    name, _, inner = key.partition(".")
    text = refusal({name: {inner: 10**digits} if inner else 10**digits})
    assert text.startswith(f"megalowbit.speculation.{key} = ")
    assert "Input should be less than or equal to 1" in text
    assert len(text) < 250


def test_the_largest_counts_are_allowed():
    largest = {"every": 10**9, "lookahead": 10**9, "trend_window": 1000, "patience": 10**9}
    largest |= {"verify_every": 10**9, "verify_size": 10**9, "cooldown": 10**9}
    assert set(largest) == {key for key in COUNTS if "." not in key}
    SpeculationSettings(**largest, estimator={"sample": 10**9})


def test_an_unknown_key_is_refused_with_the_nearest_one():
    assert "did you mean" not in refusal({"foo": 10})
    assert "did you mean 'megalowbit.speculation.every'?" in refusal({"evry": 10})
    assert "did you mean 'megalowbit.speculation.estimator.sample'?" in refusal({"estimator": {"smple": 9}})


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        SpeculationSettings().every = 3
    with pytest.raises(ValidationError, match="frozen"):
        EstimatorSettings().sample = 3


def test_settings_are_checked_without_torch():
    code = "import sys; import megalowbit.speculation.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
