import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker
from megalowbit.telemetry.step_facts import PendingFacts, reduce_step_facts


class CountedReads(TorchFunctionMode):
    """Counts what reads a tensor's values to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__)
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_step_costs_one_all_reduce_of_64_bytes(run_two_ranks):
    first, second = run_two_ranks("one_small_all_reduce")
    assert first["sizes"] == second["sizes"] == [64]


def test_loss_is_the_mean_by_weight_and_counts_are_exact(run_two_ranks):
    first, second = run_two_ranks("one_small_all_reduce")
    assert first["loss"] == second["loss"] == (3 * 2.0 + 1 * 5.0) / 4
    assert first["facts"]["gradient_overflow/total_elements"] == 2 * 50 * 2**40
    assert first["facts"]["gradient_overflow/total_overflow_elements"] == 50 * 1 + 50 * 2
    assert first["facts"]["gradient_overflow/batch_overflow_rate"] == 1.0


@pytest.mark.slow
def test_a_nan_loss_on_one_rank_is_seen_by_all(run_two_ranks):
    assert run_two_ranks("nan_loss_on_one_rank") == [{"loss": "nan"}, {"loss": "nan"}]


def test_a_rank_without_a_loss_takes_part_with_weight_0(run_two_ranks):
    assert run_two_ranks("one_rank_has_no_loss") == [["5.0", "nan"]] * 2


def test_all_ranks_learn_that_one_is_asked_to_stop_and_counts_stay_exact(run_two_ranks):
    expected = [[False, 2.0, 2], [False, 2.0, None], [True, 2.0, 2], [True, 2.0, None]]
    assert run_two_ranks("one_rank_is_asked_to_stop") == [expected, expected]


@pytest.mark.parametrize("weight", [1.0, 3, 4095, 1_000_003])
def test_one_process_gets_its_own_loss_back_to_the_bit(weight):
    for loss in torch.randn(50, generator=torch.Generator().manual_seed(3)):
        facts = reduce_step_facts(loss, weight=weight)
        assert facts.loss == loss.item()
        assert facts.overflow is None
        assert facts.facts() == {"loss": loss.item()}


def test_the_loss_is_reported_in_a_backward_graph_without_keeping_it():
    weight = torch.tensor(2.0, requires_grad=True)
    assert reduce_step_facts(weight * 3).loss == 6.0


def test_step_facts_end_the_trackers_step():
    tracker = GradientOverflowTracker()
    counts, error = torch.tensor([16, 2, 5, 1, 0, 1, 0, 0]), torch.tensor([1.0, 10.0], dtype=torch.float64)
    for step in (1, 2):
        tracker.observe("a", "grad_output", counts, error)
        facts = reduce_step_facts(torch.tensor(1.5), tracker=tracker).facts()
        assert facts["loss"] == 1.5
        assert facts["gradient_overflow/element_overflow_rate"] == 2 / 16
        assert facts["gradient_overflow/total_elements"] == 16 * step
        assert facts["quantization/grad_output/snr_db"] == pytest.approx(10)
    assert math.isnan(reduce_step_facts(torch.tensor(float("nan")), tracker=tracker).loss)


@pytest.mark.parametrize("is_tracked", [False, True])
def test_a_regularizers_value_comes_with_the_same_host_read(is_tracked):
    tracker = GradientOverflowTracker() if is_tracked else None
    if tracker is not None:
        error = torch.tensor([1.0, 10.0], dtype=torch.float64)
        tracker.observe("a", "grad_output", torch.tensor([16, 2, 5, 1, 0, 1, 0, 0]), error)
    value = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    with CountedReads() as reads:
        seen = reduce_step_facts(torch.tensor(1.5), weight=3, tracker=tracker, regularization=value)
    assert reads.count == 1
    assert (seen.loss, seen.regularization, seen.facts()["regularization"]) == (1.5, 0.1, 0.1)
    if is_tracked:
        assert seen.overflow.facts()["gradient_overflow/element_overflow_rate"] == 2 / 16


def test_weights_below_nothing_and_of_nothing_on_all_ranks_are_refused():
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="weight must not be negative"):
            reduce_step_facts(torch.tensor(1.0), weight=weight)
    with pytest.raises(ValueError, match="weights of all ranks are 0"):
        reduce_step_facts(torch.tensor(1.0), weight=0)


def test_a_tracker_of_another_group_is_refused():
    with pytest.raises(ValueError, match="another group"):
        reduce_step_facts(torch.tensor(1.0), tracker=GradientOverflowTracker(group=object()))


@pytest.mark.parametrize("is_tracked", [True, False])
def test_further_sums_come_with_the_same_host_read(is_tracked):
    tracker = GradientOverflowTracker() if is_tracked else None
    sums, value = torch.tensor([3.5, math.nan, 2.0**60], dtype=torch.float64), torch.tensor(0.25)
    pending = PendingFacts(
        torch.tensor(2.0), tracker=tracker, regularization=value, is_stop_asked=True, sums=sums
    )
    facts = pending.interpret(pending.numbers.tolist())
    assert (facts.loss, facts.regularization, facts.is_stop_asked) == (2.0, 0.25, True)
    assert facts.sums[0] == 3.5
    assert math.isnan(facts.sums[1])
    assert facts.sums[2] == 2.0**60
