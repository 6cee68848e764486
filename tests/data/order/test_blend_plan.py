"""Plans of blends: from weights, tokens and epochs to shares; what is refused; what begins a new part."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.data.order.blend_plan import (
    PlanPart,
    Progress,
    check_history,
    describe_settings,
    describe_shares,
    next_part,
)
from megalowbit.data.order.quota import QuotaOrder, Segment
from megalowbit.data.settings import DataSettings
from megalowbit.errors import UserError

LENGTH = 100
SIZES = {"a": 1000, "b": 500}


def blend(phases=(), **sources):
    return DataSettings(
        sources={name: {"corpus": name, **each} for name, each in sources.items()},
        phases=list(phases),
        sequence_length=LENGTH,
    )


def progress(step=0, *, steps=100, per_step=10, position=None, counts=(0, 0)):
    return Progress(
        step=step,
        steps=steps,
        samples_per_step=per_step,
        position=step * per_step if position is None else position,
        counts=counts,
    )


def plan(chosen, now=None, last=None):
    return next_part(chosen, list(SIZES.values()), now or progress(), last)


def shares(part):
    return [(each.start, [weight / sum(each.weights) for weight in each.weights]) for each in part.segments]


def given_at_the_end(part, now):
    """Samples of each source over the whole run, when the order is carried out."""
    given = [each - before for each, before in zip(now.counts, part.counts, strict=True)]
    order = QuotaOrder(part.segments, now.position, given)
    order.take(now.left)
    return [before + count for before, count in zip(part.counts, order.counts, strict=True)]


def test_weights_are_the_numbers_that_were_written():
    (segment,) = plan(blend(a={"weight": 0.1}, b={"weight": 0.2})).segments
    assert segment == Segment(start=0, weights=(1, 2))
    (segment,) = plan(blend(a={"weight": 1e-05}, b={"weight": 3})).segments
    assert segment.weights == (1, 300_000)


def test_shares_are_described_with_all_phases_to_come():
    phases = [{"from_step": step, "weights": weights} for step, weights in (
        (10, {"a": 9, "b": 1}), (60, {"a": 0, "b": 1}), (200, {"a": 1, "b": 0})
    )]  # fmt: skip
    chosen = blend(phases, a={"weight": 1}, b={"weight": 1})
    first = plan(chosen)
    # (10 · 0.5 + 50 · 0.1 + 40) / 100
    expected = (
        "50.0000% of the samples until step 10, then 10.0000% until step 60, then 100.0000%; "
        "50.0000% of the whole run"
    )
    assert describe_shares(first, progress())[1] == expected
    assert describe_settings(chosen, steps=100, samples_per_step=10)["b"] == expected
    later = progress(50, counts=(410, 90))
    assert describe_shares(plan(chosen, later, first), later) == [
        "90.0000% of the samples until step 60, then 0.0000%; 50.0000% of the whole run",
        "10.0000% of the samples until step 60, then 100.0000%; 50.0000% of the whole run",
    ]
    last = progress(70, counts=(500, 200))
    assert describe_shares(plan(chosen, last, first), last)[1] == "100.0000% of the samples to come"


def test_amounts_are_described_without_the_sizes_of_sources():
    chosen = blend(a={"tokens": 12000}, b={"weight": 1}, c={"weight": 3}, d={"epochs": 1.5})
    assert describe_settings(chosen, steps=100, samples_per_step=10) == {
        "a": "12,000 tokens",
        "b": "25.0000% of the samples that tokens and epochs leave",
        "c": "75.0000% of the samples that tokens and epochs leave",
        "d": "1.5 epochs",
    }


def test_phases_begin_at_their_steps():
    phases = [{"from_step": 3, "weights": {"a": 1, "b": 0}}, {"from_step": 50, "weights": {"a": 1, "b": 3}}]
    chosen = blend(phases, a={"weight": 1}, b={"weight": 1})
    part = plan(chosen)
    assert shares(part) == [(0, [0.5, 0.5]), (30, [1, 0]), (500, [0.25, 0.75])]
    later = progress(10, counts=(60, 40))
    assert plan(chosen, later, part).segments == part.segments  # the last part goes on
    larger = progress(10, position=100, counts=(60, 40), per_step=20)  # the last phase moves
    moved = plan(chosen, larger, part)
    assert (shares(moved), moved.counts) == ([(100, [1, 0]), (900, [0.25, 0.75])], (60, 40))
    last = progress(60, counts=(100, 500))
    assert plan(chosen, last, part).start == 0  # nothing changes any more


def test_a_rollback_moves_phases_and_no_amounts():
    phases = [{"from_step": 50, "weights": {"a": 1, "b": 0}}]
    weights, amounts = (
        blend(phases, a={"weight": 1}, b={"weight": 1}),
        blend(a={"weight": 1}, b={"tokens": 20000}),
    )
    now = progress(20, position=300, counts=(150, 150))  # ten steps' samples were taken and are not trained
    assert shares(plan(weights, now, plan(weights))) == [(300, [0.5, 0.5]), (600, [1, 0])]
    assert plan(amounts, now, plan(amounts)) == plan(amounts)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": {"tokens": 70_000}, "b": {"tokens": 30_000}}, [700, 300]),
        ({"a": {"weight": 5}, "b": {"epochs": 1.5}}, [250, 750]),
        ({"a": {"epochs": 0.3}, "b": {"tokens": 70_049}}, [300, 700]),
        ({"a": {"tokens": 99_500}, "b": {"weight": 1}}, [995, 5]),
        ({"a": {"tokens": 100_500}, "b": {"weight": 1}}, [1000, 0]),  # within a step: rounding
    ],
)
def test_amounts_are_given_in_the_whole_run(sources, expected):
    part = plan(blend(**sources))
    assert given_at_the_end(part, progress()) == expected


def test_weights_share_what_amounts_leave():
    chosen = DataSettings(
        sources={name: {"corpus": name, "weight": weight} for name, weight in (("a", 1), ("b", 3))}
        | {"c": {"corpus": "c", "tokens": 20_000}},
        sequence_length=LENGTH,
    )
    part = next_part(chosen, [10, 10, 10], progress(counts=(0, 0, 0)), None)
    assert given_at_the_end(part, progress(counts=(0, 0, 0))) == [200, 600, 200]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_amounts_hold_over_resumes_with_other_amounts(data):
    """The source with a weight gives the rest; the other one ends with what was asked of it last."""
    part, now, asked = None, progress(), 0
    for _ in range(data.draw(st.integers(1, 4))):
        asked = data.draw(st.integers(max(1, now.counts[1]), now.counts[1] + now.left))
        part = plan(blend(a={"weight": 1}, b={"tokens": asked * LENGTH}), now, part)
        given = [each - before for each, before in zip(now.counts, part.counts, strict=True)]
        order = QuotaOrder(part.segments, now.position, given)
        steps = data.draw(st.integers(0, 100 - now.step))
        order.take(steps * 10)
        counts = tuple(before + each for before, each in zip(part.counts, order.counts, strict=True))
        now = progress(now.step + steps, counts=counts)
    assert given_at_the_end(part, now) == [1000 - asked, asked]


def test_nothing_left_to_give_keeps_the_shares():
    amounts = {"a": {"tokens": 70_000}, "b": {"tokens": 30_000}}
    part = plan(blend(**amounts))
    ended = progress(100, counts=(700, 300))
    assert plan(blend(**amounts), ended, part) == part
    assert plan(blend(a={"epochs": 0.7}, b={"epochs": 0.6}), ended, part).segments == part.segments


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            {"a": {"tokens": 70_000}, "b": {"tokens": 50_000}},
            r"are 120,000 tokens, and the run reads 100,000: lower them, or set run.steps to 120",
        ),
        (
            {"a": {"tokens": 70_000}, "b": {"tokens": 10_000}},
            r"are 80,000 tokens, and the run reads 100,000: raise them, give one source a weight instead \("
            "it gives the rest\\), or set run.steps to 80",
        ),
        (
            {"a": {"weight": 1}, "b": {"epochs": 4}},
            r"are 200,000 tokens, and the run reads 100,000: lower them, or set run.steps to 200",
        ),
        ({"a": {"weight": 1}, "b": {"tokens": 49}}, "sources.b gives less than half a sample of 100 tokens"),
        ({"a": {"weight": 1}, "b": {"epochs": 0.0009}}, r"sources.b gives less than half .*\(500 samples in"),
        (
            {"a": {"weight": 1}, "b": {"weight": 3, "max_epochs": 1}},
            r"sources.b has 500 samples, and the run would read them 1.5 times, more than max_epochs = 1",
        ),
        (
            {"a": {"weight": 1}, "b": {"epochs": 1.5, "max_epochs": 1.4}},
            "read them 1.5 times, more than max_",
        ),
    ],
)
def test_what_sources_cannot_give_is_refused(sources, message):
    with pytest.raises(UserError, match=message):
        plan(blend(**sources))


def test_max_epochs_looks_at_phases_and_at_the_past():
    limited = {"a": {"weight": 1}, "b": {"weight": 0, "max_epochs": 1}}
    phases = [{"from_step": 49, "weights": {"a": 0, "b": 1}}]
    with pytest.raises(UserError, match=r"read them 1.02 times"):
        plan(blend(phases, **limited))
    part = plan(blend([{**phases[0], "from_step": 50}], **limited))
    now = progress(60, counts=(500, 100))
    with pytest.raises(UserError, match=r"read them 1.2 times"):  # the run is longer now
        plan(
            blend([{**phases[0], "from_step": 50}], **limited),
            progress(60, counts=(500, 100), steps=110),
            part,
        )
    lower = {**limited, "b": {"weight": 0, "max_epochs": 0.9}}
    with pytest.raises(UserError, match=r"read them 1 times, more than max_epochs = 0.9"):
        plan(blend([{**phases[0], "from_step": 50}], **lower), now, part)
    # a rollback takes samples beside the plan, and does not end the run
    moved = progress(60, position=1000, counts=(500, 500))
    assert plan(blend([{**phases[0], "from_step": 50}], **limited), moved, part) == part


def test_less_than_the_run_has_read_is_refused_on_resume():
    part = plan(blend(a={"weight": 1}, b={"weight": 1}))
    now = progress(40, counts=(200, 200))
    for measure, shown in (({"tokens": 19_900}, "tokens = 19900"), ({"epochs": 0.25}, "epochs = 0.25")):
        with pytest.raises(
            UserError, match=rf"b.{shown} is less than the run has read: 20,000 tokens, 0.4 ep"
        ):
            plan(blend(a={"weight": 1}, b=measure), now, part)


def test_states_are_plain_and_come_back():
    chosen = blend([{"from_step": 5, "weights": {"a": 1, "b": 2}}], a={"weight": 1}, b={"weight": 0.1})
    part = plan(chosen)
    assert PlanPart.of_state(part.state_dict()) == part
    assert plan(chosen, progress(2, counts=(19, 1)), PlanPart.of_state(part.state_dict())) == part
    assert part.planned(60) == [Fraction(500, 11) + Fraction(10, 3), Fraction(50, 11) + Fraction(20, 3)]


def test_a_history_is_checked_part_by_part():
    first = plan(blend(a={"weight": 1}, b={"weight": 1}))
    second = plan(blend(a={"weight": 1}, b={"weight": 3}), progress(4, counts=(20, 20)), first)
    check_history([first, second], 80, [30, 50])
    wrong = PlanPart(counts=(19, 21), segments=second.segments, asked={})
    for parts, counts in (
        ([first, second], (31, 49)),
        ([first, wrong], (29, 51)),
        ([second], (30, 50)),
        ([], (0, 0)),
    ):
        with pytest.raises(ValueError, match=r"shares|first sample"):
            check_history(parts, 80, counts)


def test_no_order_is_within_a_sample_of_targets_whose_changes_surprise_it():
    """Why a new part counts from its beginning: with four sources, the shares can always go to the others."""
    due, served = np.zeros(4), set()
    for number in range(3):
        unserved = [source for source in range(4) if source not in served]
        due[unserved] += 1 / len(unserved)
        served.add(unserved[number % len(unserved)])  # whatever an order does, one of these stays behind
    (behind,) = set(range(4)) - served
    assert due[behind] > 1.08
