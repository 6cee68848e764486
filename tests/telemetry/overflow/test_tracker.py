import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.quantize.encoding import COUNT_NAMES
from megalowbit.telemetry.overflow.counters import ROLES, OperandCounts
from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker

HEADLINE = (
    "element_overflow_rate",
    "batch_overflow_rate",
    "total_overflow_elements",
    "total_elements",
)


def observe(tracker, layer, role, counts, error=(1.0, 100.0)):
    tracker.observe(layer, role, torch.tensor(counts), torch.tensor(error, dtype=torch.float64))


def headline(step):
    facts = step.facts()
    return [facts[f"gradient_overflow/{name}"] for name in HEADLINE]


def made_up(saturated=0, elements=16, nonfinite=0):
    return [elements, saturated, 0, 0, nonfinite, 1, 0, 0]


def test_counts_per_layer_role_step_and_run_equal_a_count_by_hand(count_by_hand):
    generator = torch.Generator().manual_seed(0)
    tracker = GradientOverflowTracker()
    seen = {}  # (layer, role) -> raw tensors of the whole run
    run_elements = run_saturated = 0
    for scale in (1e-3, 1.0, 5000.0):  # the last one saturates block scales as well
        tracker.begin_step()
        step_tensors = []
        for layer in ("h.0.mlp", "h.1.mlp", "h.0.mlp"):  # a second micro-batch of the first layer
            for role in ROLES:
                x = torch.randn(4, 32, generator=generator) * scale
                x[0, :16] = 0  # a zero block
                x[1, :16] *= torch.tensor([1.0] + [1e-3] * 15)  # a block that underflows
                counts, error = count_by_hand(x)
                observe(tracker, layer, role, counts, error)
                seen.setdefault((layer, role), []).append(x)
                if role == "grad_output":
                    step_tensors.append(x)
        step = tracker.end_step()
        by_hand = [count_by_hand(x)[0] for x in step_tensors]
        saturated, elements = sum(c[1] for c in by_hand), sum(c[0] for c in by_hand)
        run_saturated, run_elements = run_saturated + saturated, run_elements + elements
        batches = sum(c[1] > 0 for c in by_hand) / len(by_hand)
        assert headline(step) == [saturated / elements, batches, run_saturated, run_elements]
        assert step.roles["grad_output"].saturated == saturated
    assert run_saturated > 0

    rows = {(row.layer, row.role): row.counts for row in tracker.reduce_layers()}
    assert set(rows) == set(seen)
    for key, tensors in seen.items():
        counts, (squared_error, squared_norm) = count_by_hand(torch.cat(tensors))
        assert [getattr(rows[key], name) for name in COUNT_NAMES] == counts
        assert rows[key].quantizations == len(tensors)
        assert rows[key].squared_error == pytest.approx(squared_error, rel=1e-12)
        assert rows[key].squared_norm == pytest.approx(squared_norm, rel=1e-12)
        assert rows[key].snr_db == pytest.approx(10 * math.log10(squared_norm / squared_error), rel=1e-9)


def test_counts_beyond_the_precision_of_float32_stay_exact():
    tracker = GradientOverflowTracker()
    for _ in range(3):
        observe(tracker, "a", "grad_output", made_up(2**45 + 1, 2**50 + 1))
        step = tracker.end_step()
    assert step.run.saturated == 3 * (2**45 + 1)
    assert step.run.elements == 3 * (2**50 + 1)


def test_a_tensor_with_inf_is_reported_and_spoils_no_rate():
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "grad_output", made_up(4))
    observe(tracker, "a", "grad_output", [16, 9, 9, 9, 3, 1, 1, 1], error=(math.nan, math.inf))
    step = tracker.end_step()
    assert headline(step) == [4 / 16, 1.0, 4, 16]
    assert step.facts()["gradient_overflow/nonfinite_elements"] == 3
    assert step.roles["grad_output"].nonfinite_quantizations == 1
    (row,) = tracker.reduce_layers()
    assert (row.counts.squared_error, row.counts.squared_norm) == (1.0, 100.0)
    assert (row.counts.saturated_scales, row.counts.zero_blocks, row.counts.quantizations) == (0, 0, 1)


def test_a_step_of_only_nonfinite_gradients_has_no_rate():
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "grad_output", made_up(nonfinite=16))
    assert headline(tracker.end_step()) == [None, None, 0, 0]


def test_headline_is_of_output_gradients_alone():
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "input", made_up(16))
    observe(tracker, "a", "grad_output", made_up(1))
    step = tracker.end_step()
    assert headline(step) == [1 / 16, 1.0, 1, 16]
    assert step.facts()["quantization/input/saturation_rate"] == 1.0
    assert step.facts()["quantization/weight/saturation_rate"] is None


def test_begin_step_forgets_what_was_seen_between_steps():
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "grad_output", made_up(16))
    tracker.pack_step()  # folded already
    observe(tracker, "a", "grad_output", made_up(16))  # not yet folded
    tracker.begin_step()
    observe(tracker, "a", "grad_output", made_up(1))
    assert headline(tracker.end_step()) == [1 / 16, 1.0, 1, 16]
    (row,) = tracker.reduce_layers()
    assert row.counts.elements == 16


def test_observing_does_no_device_work():
    tracker = GradientOverflowTracker()
    counts, error = torch.tensor(made_up(1)), torch.zeros(2, dtype=torch.float64)
    tracker.observe("a", "grad_output", counts, error)  # the first on a device makes its table
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(100):
            tracker.observe("a", "grad_output", counts, error)
    assert [event.key for event in profile.key_averages() if event.key.startswith("aten::")] == []


def test_a_step_is_read_once(monkeypatch):
    tracker = GradientOverflowTracker()
    for layer in range(20):
        observe(tracker, f"layer{layer}", "grad_output", made_up(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        reads = []
        to_list = torch.Tensor.tolist
        monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or to_list(tensor))
        tracker.end_step()
    assert len(reads) == 1
    scalar_reads = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}
    assert scalar_reads.isdisjoint(event.key for event in profile.key_averages())


def test_memory_is_bounded_where_nobody_ends_a_step():
    tracker = GradientOverflowTracker()
    counts, error = torch.tensor(made_up(1)), torch.ones(2, dtype=torch.float64)
    for _ in range(10_000):
        tracker.observe("a", "grad_output", counts, error)
    (table,) = tracker._tables.values()
    assert len(table._pending) < 4096
    assert tracker.end_step().step.saturated == 10_000


def test_layers_come_in_the_order_first_met_and_roles_in_theirs():
    tracker = GradientOverflowTracker()
    for layer in ("z", "a"):
        observe(tracker, layer, "input", made_up())
    for layer in ("a", "z"):
        observe(tracker, layer, "grad_output", made_up())
        observe(tracker, layer, "weight", made_up())
    tracker.end_step()
    rows = [(row.layer, row.role) for row in tracker.reduce_layers()]
    assert rows == [(layer, role) for layer in ("z", "a") for role in ROLES]


def test_a_layer_met_in_the_running_step_is_not_yet_in_the_table():
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "input", made_up())
    tracker.end_step()
    observe(tracker, "b", "input", made_up())
    assert [row.layer for row in tracker.reduce_layers()] == ["a"]
    tracker.end_step()
    assert [row.layer for row in tracker.reduce_layers()] == ["a", "b"]


def test_reset_forgets_the_run():
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "grad_output", made_up(1))
    tracker.end_step()
    tracker.reset()
    assert headline(tracker.end_step()) == [None, None, 0, 0]
    assert tracker.reduce_layers() == ()


@pytest.mark.parametrize("is_planned", [True, False])
def test_an_interrupted_run_ends_with_the_totals_of_an_undisturbed_one(is_planned):
    def one_step(tracker, step):
        observe(tracker, f"layer{step % 3}", "grad_output", made_up(step), error=(0.1 * step, 0.7 * step))
        return tracker.end_step()

    undisturbed, interrupted = GradientOverflowTracker(), GradientOverflowTracker()
    for step in range(4):
        one_step(undisturbed, step)
        one_step(interrupted, step)
    if is_planned:
        undisturbed.state_dict()  # it saved a checkpoint, too
    stored = json.loads(json.dumps(interrupted.state_dict()))
    observe(interrupted, "lost", "weight", made_up(9))  # after the checkpoint, lost with the process
    interrupted.end_step()
    resumed = GradientOverflowTracker()
    resumed.load_state_dict(stored)
    for step in range(4, 8):
        assert one_step(resumed, step) == one_step(undisturbed, step)
    assert resumed.reduce_layers() == undisturbed.reduce_layers()
    assert resumed.state_dict() == undisturbed.state_dict()


def test_a_state_of_an_earlier_version_has_rounded_sums_only():
    tracker, resumed = GradientOverflowTracker(), GradientOverflowTracker()
    observe(tracker, "a", "grad_output", made_up(1), error=(0.1, 0.7))
    tracker.end_step()
    state = tracker.state_dict()
    del state["layers"][0]["exact_errors"]
    resumed.load_state_dict(state)
    assert resumed.reduce_layers() == tracker.reduce_layers()


@pytest.mark.parametrize("state", [{}, {"run": {}, "layers": [{}]}, {"run": {"colour": 1}, "layers": []}])
def test_a_state_that_is_none_is_refused_and_changes_nothing(state):
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "grad_output", made_up(1))
    tracker.end_step()
    with pytest.raises(UserError, match="saturation counts of the checkpoint"):
        tracker.load_state_dict(state)
    assert tracker.run.saturated == 1


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match="role must be one of input, weight, grad_output, not 'bias'"):
        observe(GradientOverflowTracker(), "a", "bias", made_up())


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=8, max_size=8), min_size=1, max_size=12), st.data())
@settings(max_examples=40, deadline=None)
def test_run_totals_do_not_depend_on_where_steps_end(all_counts, data):
    tracker = GradientOverflowTracker()
    for counts in all_counts:
        counts[COUNT_NAMES.index("nonfinite")] = 0
        observe(tracker, data.draw(st.sampled_from("abc")), "grad_output", counts)
        if data.draw(st.booleans()):
            tracker.end_step()
        if data.draw(st.booleans()):
            tracker.reduce_layers()
    tracker.end_step()
    together = sum((row.counts for row in tracker.reduce_layers()), OperandCounts())
    assert [asdict(together)[name] for name in COUNT_NAMES] == [
        sum(column) for column in zip(*all_counts, strict=True)
    ]
    assert together.quantizations == len(all_counts)
    assert tracker.run.elements == together.elements
    assert tracker.run.quantizations_with_overflow == sum(counts[1] > 0 for counts in all_counts)


def test_tracker_counts_a_real_layer_in_a_plain_loop():
    import megalowbit as mlb

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.GELU(), torch.nn.Linear(32, 48))
    mlb.convert(model, recipe="nvfp4")
    tracker = mlb.GradientOverflowTracker()
    mlb.set_observer(model, tracker)
    tracker.begin_step()
    model(torch.randn(5, 48)).square().mean().backward()
    step = tracker.end_step()
    assert step.step.elements == 5 * 32 + 5 * 48
    assert step.step.quantizations == 2
    assert step.roles["weight"].elements == 2 * 48 * 32
    assert 10 < step.roles["weight"].snr_db < 30
    assert {row.layer for row in tracker.reduce_layers()} == {"0", "2"}
