import json
from dataclasses import FrozenInstanceError, asdict

import pytest

from megalowbit.errors import UserError
from megalowbit.spectral.settings import (
    METHODS,
    OperandSplit,
    ParameterSplit,
    block_over,
    check_rank,
    resolve_rank,
    settings_from,
)


@pytest.mark.parametrize(
    ("rank", "sizes", "columns"),
    [
        (60, (768, 3072), 60),
        (60, (3072, 48), 48),
        (0.015, (768, 3072), 12),  # 11.52 rounded up
        (0.015, (3072, 768), 12),
        (0.5, (3, 100), 2),
        (0.001, (64, 64), 1),
        (1, (1, 1), 1),
        (1, (64, 64), 1),
        (1.0, (64, 48), 48),
    ],
)
def test_rank_is_a_number_or_a_fraction_of_the_smaller_size(rank, sizes, columns):
    assert resolve_rank(rank, *sizes) == columns
    assert OperandSplit(rank=rank).rank_of(*sizes) == columns
    assert ParameterSplit(rank=rank).rank_of(*sizes) == columns


def test_the_mean_is_one_direction():
    assert OperandSplit(method="mean").rank_of(768, 768) == 1


@pytest.mark.parametrize(
    "rank", [0, -3, 1.0001, 1.5, 0.0, -0.1, True, "60", None, float("nan"), float("inf")]
)
def test_other_ranks_are_refused(rank):
    with pytest.raises(
        UserError, match=r"split rank = .*: expected a whole number ≥ 1, or a fraction .* up to 1\.0"
    ):
        check_rank(rank)
    for kind in (OperandSplit, ParameterSplit):
        with pytest.raises(UserError, match="split rank"):
            kind(rank=rank)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "qr"}, "unknown split method 'qr'"),
        ({"method": "svd_lowrnk"}, "did you mean 'svd_lowrank'"),
        ({"order": "before"}, "unknown split order"),
        ({"reuse": "all"}, "unknown split reuse"),
        ({"niter": -1}, "niter = -1: expected a whole number ≥ 0"),
        ({"niter": 1.0}, "niter = 1.0"),
        ({"niter": True}, "niter = True"),
        ({"power_every": -1}, "power_every = -1"),
        ({"refresh_every": 0}, "refresh_every = 0: expected a whole number ≥ 1"),
        ({"broadcast_dim": -1}, "broadcast_dim = -1"),
        ({"sample_fraction": 0}, "sample_fraction = 0"),
        ({"sample_fraction": 1.5}, "sample_fraction = 1.5"),
        ({"sample_fraction": float("nan")}, "sample_fraction = nan"),
        ({"q_factors": 4}, "q_factors = 4"),
        ({"q_factors": "nvfp5"}, "unknown quantizer 'nvfp5'"),
        ({"gains": "ysch"}, "did you mean 'ysche'"),
        ({"method": "power", "niter": 0}, 'niter = 0 does not change the start directions of method "power"'),
        ({"reuse": "factors"}, "reuse = 'factors' has no effect with refresh_every 1"),
    ],
)
def test_wrong_operand_splits_are_refused_in_one_line(values, message):
    with pytest.raises(UserError, match=message) as caught:
        OperandSplit(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps = -1"),
        ({"merge_steps": 0.5}, "merge_steps = 0.5"),
        ({"optimizer_state": "keep"}, "unknown split optimizer_state"),
        ({"merged_lr": 0}, "merged_lr = 0"),
        ({"merged_lr": True}, "merged_lr = True"),
        ({"merged_lr": float("inf")}, "merged_lr = inf"),
    ],
)
def test_wrong_parameter_splits_are_refused_in_one_line(values, message):
    with pytest.raises(UserError, match=message) as caught:
        ParameterSplit(**values)
    assert "\n" not in str(caught.value)


VALUES = {
    "rank": 60,
    "niter": 5,
    "power_every": 3,
    "sample_fraction": 0.1,
    "refresh_every": 4,
    "reuse": "factors",
    "broadcast_dim": 0,
    "order": "seed",
    "q_factors": "fp32",
    "gains": "ysche",
}
UNREAD = {
    "mean": VALUES.keys() - {"broadcast_dim"},
    "svd": {"niter", "power_every", "sample_fraction"},
    "random": {"niter", "power_every", "sample_fraction"},
    "channels": {"niter", "power_every", "sample_fraction"},
    "sampled": {"niter", "power_every"},
    "svd_lowrank": {"power_every", "sample_fraction"},
    "power": {"power_every", "sample_fraction"},
    "qb": {"sample_fraction"},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("field", VALUES)
def test_keys_that_a_method_does_not_read_are_rejected_with_the_remedy(method, field):
    values = {"method": method, field: VALUES[field]}
    if field == "reuse" and method != "mean":
        values["refresh_every"] = 2
    if field not in UNREAD[method]:
        assert getattr(OperandSplit(**values), field) == VALUES[field]
        return
    expected = f'split {field} = {VALUES[field]!r} has no effect with method "{method}": remove it'
    with pytest.raises(UserError) as caught:
        OperandSplit(**values)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("below", "block", "expected"),
    [
        ({"rank": 60, "niter": 5}, {"method": "mean"}, {"method": "mean"}),
        ({"rank": 60, "niter": 5}, {"method": "svd"}, {"method": "svd", "rank": 60}),
        ({"rank": 60, "niter": 5}, {"method": "power"}, {"method": "power", "rank": 60, "niter": 5}),
        ({"rank": 60, "niter": 5}, {"rank": 8}, {"rank": 8, "niter": 5}),
        ({"refresh_every": 5, "reuse": "factors"}, {"refresh_every": 1}, {}),
        (
            {"refresh_every": 5, "reuse": "factors"},
            {"refresh_every": 2},
            {"refresh_every": 2, "reuse": "factors"},
        ),
        ({"method": "mean"}, {"method": "qb", "rank": 4}, {"rank": 4}),
    ],
)
def test_a_block_inherits_what_its_method_reads(below, block, expected):
    values = block_over(OperandSplit(**below), block)
    assert OperandSplit(**values) == OperandSplit(**expected)


@pytest.mark.parametrize("own", [{"niter": 5}, {"rank": 8}])
def test_what_a_block_itself_says_in_vain_is_still_refused(own):
    with pytest.raises(UserError, match='has no effect with method "mean"'):
        OperandSplit(**block_over(OperandSplit(rank=60), {"method": "mean", **own}))


def test_blocks_with_mistakes_are_left_to_be_refused():
    for block in ({"method": "svdd"}, {"method": ["svd"]}, {"rnak": 3}):
        with pytest.raises(UserError, match="unknown"):
            settings_from(OperandSplit, block_over(OperandSplit(rank=60), block), "split_input")
    merged = block_over(ParameterSplit(rank=60, merge_steps=5), {"warmup_steps": 2})
    assert ParameterSplit(**merged) == ParameterSplit(rank=60, merge_steps=5, warmup_steps=2)


@pytest.mark.parametrize("method", METHODS)
def test_settings_survive_json(method):
    split = OperandSplit(method=method, broadcast_dim=3)
    assert settings_from(OperandSplit, json.loads(json.dumps(asdict(split))), "split_input") == split
    with pytest.raises(FrozenInstanceError):
        split.rank = 4


def test_blocks_are_read_or_refused_by_key():
    assert settings_from(OperandSplit, None, "split_input") is None
    ready = ParameterSplit()
    assert settings_from(ParameterSplit, ready, "parameter_split") is ready
    assert settings_from(OperandSplit, {"rank": 60}, "split_input") == OperandSplit(rank=60)
    for value, message in (
        (60, 'split_input = 60: expected an object such as {"rank": 60}, or null'),
        ({"rnak": 60}, "unknown split_input key 'rnak': did you mean 'rank'"),
        ({"rank": 0}, "split_input: split rank = 0"),
    ):
        with pytest.raises(UserError, match=message):
            settings_from(OperandSplit, value, "split_input")


@pytest.mark.parametrize(
    ("warmup", "merge", "due"), [(0, 0, [0]), (2, 0, [2]), (2, 3, [2, 5, 8]), (0, 4, [0, 4, 8])]
)
def test_parameter_splits_are_due_at_their_steps(warmup, merge, due):
    split = ParameterSplit(warmup_steps=warmup, merge_steps=merge)
    assert [step for step in range(10) if split.is_due(step)] == due
