"""ZeRO stages 1 to 3, with and without CPU offload: the rules of stage 0 hold, to the last bit if possible.

`ranks_zero.py` runs all cases in one process group. The matrix of stages and precisions is compared with a
plain loop in test_matrix.py; here it is closed forms, and stage 0, which test_steps.py compares with a loop.
"""

import pytest
from quick_cases import slow_except

STAGES = ["1", "2", "3", "1 offload", "2 offload", "3 offload"]
PRECISIONS = ["fp16", "bf16", "fp32"]
QUICK = {"0", "2", "3 offload"}


@pytest.fixture
def seen(launch_once, part):
    """What both ranks reported."""
    return launch_once("ranks_zero.py", part)


def largest_difference(found, expected):
    """Largest |difference| of two nested lists of numbers."""
    if isinstance(found, list):
        pairs = zip(found, expected, strict=True)
        return max((largest_difference(*pair) for pair in pairs), default=0.0)
    return 0.0 if found is expected else abs(found - expected)


@pytest.mark.parametrize("stage", slow_except(QUICK, ["0", *STAGES]))
def test_sgd_of_gradient_one_moves_by_exactly_one_also_where_the_scale_grows(seen, stage):
    for rank in seen:
        masters, scales, used = zip(*rank[stage]["growth"], strict=True)
        assert list(masters) == [[-float(step)] * 5 for step in range(1, 6)]
        assert list(scales) == [256.0, 512.0, 512.0, 1024.0, 1024.0]
        assert list(used) == [256.0, 256.0, 512.0, 512.0, 1024.0]


@pytest.mark.parametrize("stage", slow_except(QUICK, ["0", *STAGES]))
def test_gradients_are_averaged_in_fp32(seen, stage):
    for rank in seen:
        assert rank[stage]["smallest"] == [-1.0] * 5


@pytest.mark.parametrize("stage", slow_except(QUICK, ["0", *STAGES]))
def test_masters_are_the_exact_fp32_weights_of_the_first_rank(seen, stage):
    for rank in seen:
        assert rank[stage]["masters"]["masters"] == rank[stage]["masters"]["expected"]
    weights = seen[0][stage]["masters"]["weights"]
    assert list(weights.values()) != seen[0][stage]["masters"]["expected"]  # rounded: masters had to be kept
    assert weights == seen[0]["0"]["masters"]["weights"]
    assert seen[1][stage]["masters"]["weights"] == {}


@pytest.mark.parametrize("precision", slow_except({"fp16"}, PRECISIONS))
@pytest.mark.parametrize("stage", slow_except(QUICK, STAGES))
def test_an_overflow_on_one_rank_skips_the_step_on_both_as_at_stage_0(seen, stage, precision):
    expected = seen[0]["0"]["overflow"][precision]
    for rank in seen:
        steps = rank[stage]["overflow"][precision]["steps"]
        assert [step["was_applied"] for step in steps] == [True, True, *[False] * 4, True, True]
        assert [step["skipped"] for step in steps] == [0, 0, 1, 2, 3, 4, 4, 4]
        assert [step["has_moved"] for step in steps[2:]] == [*[False] * 4, True, True]
        for key in ("lr", "scale"):
            assert [step[key] for step in steps] == [step[key] for step in expected["steps"]]
        for step, wanted in zip(steps, expected["steps"], strict=True):
            assert step["norm"] == (wanted["norm"] and pytest.approx(wanted["norm"], rel=1e-6))
            assert step["report"][0] == wanted["report"][0]
            assert step["report"][1] == step["norm"]
            assert step["where"] == (None if wanted["was_applied"] else "body.3.weight")
    weights = seen[0][stage]["overflow"][precision]["weights"]
    for name, values in expected["weights"].items():
        assert largest_difference(weights[name], values) <= (1e-7 if precision == "fp32" else 0.0)


@pytest.mark.parametrize("stage", slow_except(QUICK, STAGES))
def test_hysteresis_and_the_minimum_scale_follow_our_settings(seen, stage):
    scales = [step["scale"] for step in seen[0][stage]["overflow"]["fp16"]["steps"]]
    assert scales == [4096.0, 4096.0, 4096.0, 2048.0, 1024.0, 1024.0, 1024.0, 1024.0]


@pytest.mark.parametrize("stage", slow_except(QUICK, ["0", *STAGES]))
def test_an_unused_weight_is_not_updated_by_an_older_gradient(seen, stage):
    for rank in seen:
        assert rank[stage]["unused"] == [[0.0] * 3, [0.0] * 3, [-0.5] * 3]


@pytest.mark.parametrize("name", ["norms", "max_value", "dropout", "lr_scale", "own optimizer"])
@pytest.mark.parametrize("stage", slow_except(QUICK, STAGES))
def test_features_of_stage_0_are_the_same_at_other_stages(seen, stage, name):
    expected = seen[0]["0"]["features"][name]
    for rank in seen:
        found, own = rank[stage]["features"][name], rank["0"]["features"][name]
        assert found["losses"] == own["losses"]
        assert found["scales"] == expected["scales"]
        assert found["lrs"] == expected["lrs"]
        assert largest_difference(found["reports"], expected["reports"]) < 1e-9
    assert seen[0][stage]["features"][name]["weights"] == expected["weights"]


def test_the_features_under_test_were_active(seen):
    found = seen[0]["0"]["features"]
    assert found["norms"]["reports"][0][2] == 6 * 16  # rows of the embedding that nobody looked up
    assert found["max_value"]["scales"][-1] != found["max_value"]["scales"][0]
    assert found["lr_scale"]["lrs"][0] != found["lr_scale"]["lrs"][-1]
    assert seen[0]["0"]["features"]["dropout"]["losses"] != seen[1]["0"]["features"]["dropout"]["losses"]


@pytest.mark.parametrize("stage", slow_except(QUICK, STAGES))
def test_low_bit_layers_with_regularizer_and_probe_train_as_at_stage_0(seen, stage):
    expected = seen[0]["0"]["layers"]
    for rank in seen:
        found = rank[stage]["layers"]
        assert found["losses"] == rank["0"]["layers"]["losses"]
        assert found["scales"] == expected["scales"]
        assert found["values"] == pytest.approx(expected["values"], rel=1e-12)
        assert largest_difference(found["reports"], expected["reports"]) < 1e-9
    assert seen[0][stage]["layers"]["weights"] == expected["weights"]
    assert expected["values"][0] != expected["values"][-1]


@pytest.mark.parametrize("stage", slow_except(QUICK, STAGES))
def test_padding_is_neither_counted_nor_regularised(seen, stage):
    expected = seen[0]["0"]["uneven"]
    for rank in seen:
        found = rank[stage]["uneven"]
        assert [report[2] for report in found["reports"]] == [0, 0, 0]
        # at stage 0, layers add their weight gradients in fp32; here they are fp16 first
        assert largest_difference(found["reports"], expected["reports"]) < 1e-4
        assert found["values"] == pytest.approx(expected["values"], rel=1e-4)
    for name, values in seen[0][stage]["uneven"]["weights"].items():
        assert largest_difference(values, expected["weights"][name]) < 1e-4


@pytest.mark.parametrize("name", ["checkpointing", "chunked"])
@pytest.mark.parametrize("stage", slow_except(QUICK, STAGES))
def test_recomputed_blocks_and_a_loss_in_chunks_train_as_at_stage_0(seen, stage, name):
    for rank in seen:
        found, expected = rank[stage][name], rank["0"][name]
        # at stage 0, layers add their weight gradients in fp32; here they are fp16 first
        assert found["losses"][:2] == expected["losses"][:2]  # before the first update
        assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        # after updates, some weights and gradients round to other FP4 numbers
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-2)
    expected = seen[0]["0"][name]["weights"]
    for parameter, values in seen[0][stage][name]["weights"].items():
        # three steps of AdamW at lr 0.01; a gradient near zero, as of keys' biases, may turn its sign
        differences = [abs(a - b) for a, b in zip(values, expected[parameter], strict=True)]
        assert sum(differences) / len(differences) < 4e-3, parameter


def test_a_loss_in_chunks_trains_like_a_whole_one(seen):
    for rank in seen:
        found, expected = (rank["0"][name]["losses"] for name in ("chunked", "checkpointing"))
        assert found[:2] == pytest.approx(expected[:2], rel=1e-5)  # before the first update
        assert found[2:] == pytest.approx(expected[2:], rel=3e-3)  # after it, signs differ as above


@pytest.mark.parametrize("precision", slow_except({"fp16"}, PRECISIONS))
@pytest.mark.parametrize("stage", slow_except(QUICK, ["0", *STAGES]))
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(seen, stage, precision):
    for rank in seen:
        resumed = rank[stage]["resume"][precision]
        assert resumed["found"] == resumed["expected"]
        assert resumed["are_masters_equal"]
        assert resumed["is_scaler_live"]


@pytest.mark.parametrize("stage", slow_except(QUICK, ["0", *STAGES]))
def test_a_retried_step_equals_a_step_at_the_lower_scale(seen, stage):
    for rank in seen:
        retried, lower = rank[stage]["retries"]
        assert retried["retries"][0] > 0
        assert lower["retries"] == [0, 0]
        assert (retried["skipped"], retried["steps"]) == (0, 2)
        assert retried["masters"] == lower["masters"]


def test_unsupported_optimizers_and_scalers_are_one_line_errors(seen):
    for rank in seen:
        refused = rank["refusals"]
        assert "already has state" in refused["state"]
        assert "is not elementwise" in refused["adagrad"]
        assert "another program (LossScaler)" in refused["stock"]
        assert refused["scale"] == 2.0**32  # the live one stays
