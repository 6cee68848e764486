"""Four ranks make the same decisions from joint statistics, whichever part of the model they hold."""

import pytest
from quick_cases import slow_except

PRODUCTS = ["output", "grad_input", "grad_weight"]
LAYERS = [
    f"transformer.h.{block}.{name}"
    for block in range(2)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
]
ENGINES = [
    "data", "non-reentrant", "reentrant", "stage 3", "pipeline", "pipeline, recomputed", "tensor",
    "tensor, stage 2",
]  # fmt: skip
QUICK = {"data", "pipeline", "tensor"}


@pytest.fixture
def seen(launch_once, part):
    return launch_once("ranks_speculation.py", part, world_size=4)


def decisions(reports):
    return [
        sorted((row["layer"], row["product"], row["precision"]) for row in report["rows"])
        for report in reports
    ]


def ratios(report, name):
    """Of the rows that have one; the others must be the same ones, too."""
    found = {(row["layer"], row["product"]): row[name] for row in report["rows"]}
    return {key: value for key, value in found.items() if value is not None}


def changes(reports):
    return [(report["step"], each) for report in reports for each in report["changes"]]


@pytest.mark.parametrize("kind", ["none", "jump", "nan"])
def test_ranks_decide_as_one_process_with_all_data(seen, kind):
    reports, expected = seen[0]["pooled"][kind], seen[0]["together"][kind]
    assert all(rank["pooled"][kind] == reports for rank in seen)
    assert [report["step"] for report in reports] == [0, 2, 4, 6]
    assert decisions(reports) == decisions(expected)
    for mine, whole in zip(reports, expected, strict=True):
        found, predicted = ratios(mine, "predicted_db"), ratios(whole, "predicted_db")
        assert found.keys() == predicted.keys()
        # each rank has a scale for its own data: if one has an outlier, a quarter of the rows has its noise
        assert all(-0.3 < found[key] - predicted[key] < 6.3 for key in found)
        for name in ("left_ratio", "right_ratio"):
            assert ratios(mine, name) == pytest.approx(ratios(whole, name), rel=0.05), name
    assert [each["reason"] for _, each in changes(reports)] == [
        each["reason"] for _, each in changes(expected)
    ]


def test_data_of_one_rank_affect_the_decisions_of_all(seen):
    """An outlier on the last rank alone, and a NaN, in its input and so in all that depends on it."""
    quiet, jump, spoiled = (seen[0]["pooled"][kind] for kind in ("none", "jump", "nan"))
    assert quiet[:2] == jump[:2] == spoiled[:2]
    left = [each for step, each in changes(jump) if step == 4]
    assert {"layer": "0", "product": "output", "before": "int8", "reason": "predicted"} in [
        {key: each[key] for key in ("layer", "product", "before", "reason")} for each in left
    ]
    assert not [each for step, each in changes(quiet) if step == 4]
    assert quiet[3]["shares"]["int8"] > 0.5
    assert {row["precision"] for row in spoiled[3]["rows"]} == {"bf16"}
    assert {each["reason"] for step, each in changes(spoiled) if step == 4} == {"not finite"}


def test_a_difference_on_one_rank_is_reported_on_all(seen):
    for rank in seen:
        found = rank["refusals"]
        assert "speculation.cooldown is 101 on rank 1 and 100 on rank 0" in found["settings"]
        assert "speculation.cooldown = 0 is not valid" in found["invalid"]
        assert "split_input" in found["recipe"]
        assert "ranks have chosen different precisions" in found["decisions"]
        assert not [text for text in found.values() if "\n" in text]


@pytest.mark.parametrize("name", slow_except(QUICK, ENGINES))
def test_all_ranks_of_an_engine_have_and_apply_the_same_decisions(seen, name):
    first = seen[0]["engines"][name]
    for rank in seen:
        mine = rank["engines"][name]
        for key in ("reports", "state", "totals", "layers"):
            assert mine[key] == first[key], key
        precisions = mine["state"]["layers"]
        for layer, recipe in mine["local"].items():
            chosen = "/".join(precisions[layer][product]["precision"] for product in PRODUCTS)
            assert recipe == f"fp8, {chosen}"
    assert first["layers"] == LAYERS
    assert [report["step"] for report in first["reports"]] == [0, 2, 4, 6]
    assert all(len(report["rows"]) == len(LAYERS) * 3 for report in first["reports"])


@pytest.mark.parametrize("name", slow_except(QUICK, ENGINES))
def test_engines_run_at_several_precisions_and_verify_them(seen, name):
    totals, reports = (seen[0]["engines"][name][key] for key in ("totals", "reports"))
    assert totals["shares"]["int8"] > 0.1
    assert totals["shares"]["fp8"] > 0.1
    measured = [{row["layer"] for row in report["rows"] if row["is_hit"]} for report in reports]
    assert measured == [set(), set(LAYERS), set(LAYERS), set()]
    assert totals["hits"] == sum(report["hits"] for report in reports) == 3 * 16
    assert totals["misses"] == 0


@pytest.mark.parametrize("name", slow_except(QUICK, ["pipeline", "pipeline, recomputed"]))
def test_a_stage_holds_only_its_layers(seen, name):
    local = [list(rank["engines"][name]["local"]) for rank in seen]
    assert local == [LAYERS[:4]] * 2 + [LAYERS[4:]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "same"), [("non-reentrant", "data"), ("reentrant", "data"), ("pipeline, recomputed", "pipeline")]
)
def test_recomputed_activations_change_no_loss_and_no_decision(seen, name, same):
    for rank in seen:
        assert rank["engines"][name] == rank["engines"][same]


@pytest.mark.slow
def test_partitioned_parameters_change_no_decision(seen):
    found, expected = (seen[0]["engines"][name] for name in ("stage 3", "data"))
    assert decisions(found["reports"]) == decisions(expected["reports"])
    for rank in seen:
        losses = rank["engines"]["data"]["losses"]
        assert rank["engines"]["stage 3"]["losses"] == pytest.approx(losses, rel=1e-3)


def test_shards_use_the_statistics_of_full_operands(seen):
    """The pipeline has the same data-parallel ranks, and whole layers."""
    found, expected = (seen[0]["engines"][name]["reports"] for name in ("tensor", "pipeline"))
    assert decisions(found)[:2] == decisions(expected)[:2]
    for mine, whole in zip(found[:2], expected[:2], strict=True):
        # estimated errors are raised by two standard errors, which are larger for a shard: up to 0.31 dB seen
        assert ratios(mine, "predicted_db") == pytest.approx(ratios(whole, "predicted_db"), abs=0.6)
        for name in ("left_ratio", "right_ratio"):
            assert ratios(mine, name) == pytest.approx(ratios(whole, name), rel=0.05), name


def test_ranks_have_different_data(seen):
    losses = [tuple(rank["engines"]["data"]["losses"]) for rank in seen]
    assert len(set(losses)) == 4
