import pytest
import torch

from megalowbit.telemetry.overflow.reduction import ROW_LENGTH, sum_over_ranks


def counts(**values):
    names = ("elements", "saturated", "upper_half", "underflow", "nonfinite", "blocks", "saturated_scales")
    names += ("zero_blocks", "quantizations", "quantizations_with_overflow", "nonfinite_quantizations")
    return {**dict.fromkeys(names, 0), "squared_error": 0.0, "squared_norm": 0.0, **values}


def test_ranks_with_unlike_layers_agree_on_one_table(run_two_ranks):
    first, second = run_two_ranks("unlike_layers")
    assert first["table"] == second["table"]
    both = {"elements": 64, "saturated": 10, "upper_half": 8, "underflow": 10, "blocks": 4}
    a = {
        "elements": 16,
        "upper_half": 2,
        "underflow": 3,
        "blocks": 1,
        "squared_error": 1.0,
        "squared_norm": 100.0,
    }
    batch = {"quantizations": 1, "quantizations_with_overflow": 1}
    weight = {"elements": 64, "blocks": 4, "zero_blocks": 1, "squared_error": 1.0, "squared_norm": 100.0}
    assert first["table"] == [
        ["a", "grad_output", counts(**a, **batch, saturated=1)],
        ["b", "weight", counts(**weight, quantizations=1)],
        [
            "b",
            "grad_output",
            counts(
                **both, quantizations=2, quantizations_with_overflow=1, squared_error=1.0, squared_norm=16.0
            ),
        ],
        ["c", "grad_output", counts(**a, **batch, saturated=2)],
    ]
    assert first["again"] == first["table"], "reducing twice must not count twice"
    for facts in (first["facts"], second["facts"]):
        assert facts["gradient_overflow/total_elements"] == 2 * (16 + 32)
        assert facts["gradient_overflow/total_overflow_elements"] == 1 + 2 + 10
        assert facts["gradient_overflow/element_overflow_rate"] == 13 / 96
        assert facts["gradient_overflow/batch_overflow_rate"] == 3 / 4
    # figures by role stay each rank's own
    assert first["facts"]["quantization/grad_output/saturation_rate"] == 1 / 48
    assert second["facts"]["quantization/grad_output/saturation_rate"] == 12 / 48


@pytest.mark.slow
def test_a_rank_that_saw_nothing_takes_part(run_two_ranks):
    first, second = run_two_ranks("nothing_seen_on_one_rank")
    assert first == second
    assert [row[:2] for row in first["table"]] == [["late stage", "input"]]


@pytest.mark.slow
def test_resumed_totals_do_not_multiply_by_the_number_of_ranks(run_two_ranks):
    first, second = run_two_ranks("resume_on_two_ranks")
    assert first == second
    assert first["state"]["run"]["elements"] == 32
    assert first["run"]["elements"] == 64
    assert first["run"]["saturated"] == 2 * 1 + 2 * 2
    ((_, _, row),) = first["table"]
    assert (row["elements"], row["saturated"], row["quantizations"]) == (64, 6, 4)


def test_one_process_needs_no_group():
    rows = {("a", "input"): [2**60, *range(1, ROW_LENGTH)]}
    assert dict(sum_over_ranks(rows, None, torch.device("cpu"))) == rows
