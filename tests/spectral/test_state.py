import copy
import io

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.quantize.philox import RandomKey
from megalowbit.spectral.settings import METHODS, OperandSplit
from megalowbit.spectral.split import split
from megalowbit.spectral.state import SplitState

ROWS, COLS, RANK = 48, 32, 4
SETTINGS = {
    **{method: OperandSplit(method=method) for method in METHODS},
    "qb, directions": OperandSplit(refresh_every=3),
    "qb, factors": OperandSplit(refresh_every=3, reuse="factors"),
    "svd, factors": OperandSplit(method="svd", refresh_every=3, reuse="factors"),
    "qb, power step": OperandSplit(power_every=2),
}
EVERY_SETTING = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def batch(step, rows=ROWS, cols=COLS):
    """A matrix whose directions drift from micro-batch to micro-batch."""
    left, turn_left = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(1))
    right, turn_right = torch.randn(2, cols, cols, generator=torch.Generator().manual_seed(2))
    left, right = left + 0.2 * step * turn_left, right + 0.2 * step * turn_right
    return (left / torch.arange(1, cols + 1) ** 2) @ right.t()


def run(settings, state, step, *, x=None, is_replay=False, use=0):
    x = batch(step) if x is None else x
    key = RandomKey(100 + use, step)
    return split(x, settings, state, rank=RANK, step=step, is_replay=is_replay, random_key=key)


def bits(done):
    return torch.cat(
        [
            done.residual.flatten(),
            done.values,
            done.left.dequantize().flatten(),
            done.right.dequantize().flatten(),
        ]
    )


def same(one, other):
    return torch.equal(bits(one), bits(other))


def counted(state):
    return {name: number for name, number in state.counts.items() if number}


@EVERY_SETTING
def test_a_replay_repeats_every_use_of_its_micro_batch_and_changes_nothing(settings):
    state = SplitState()
    for step in range(1, 6):
        inputs = [batch(step), batch(step + 0.5)]
        first = [run(settings, state, step, x=x, use=use) for use, x in enumerate(inputs)]
        before, counts = copy.deepcopy(state.state_dict()), state.counts
        for use in (1, 0, 0):
            replayed = run(settings, state, step, x=inputs[use], use=use, is_replay=True)
            assert same(replayed, first[use])
        after = state.state_dict()
        assert state.counts == counts
        assert before.keys() == after.keys()
        assert before.pop("counts") == after.pop("counts") == counts
        assert all(torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key])) for key in before)


@EVERY_SETTING
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_saved_state_continues_bit_for_bit(settings, cut):
    state = SplitState()
    for step in range(1, cut + 1):
        run(settings, state, step)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    resumed = SplitState()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(cut + 1, 8):
        assert same(run(settings, state, step), run(settings, resumed, step))
    assert resumed.counts["misfit"] == 0


def test_directions_are_warm_from_the_second_micro_batch_on():
    state = SplitState()
    for step in (1, 2, 3):
        run(OperandSplit(), state, step)
    assert counted(state) == {"cold": 1, "warm": 2}
    state = SplitState()
    for step in (1, 2):
        run(OperandSplit(method="svd"), state, step)
    assert counted(state) == {"cold": 2}
    assert state.state_dict() == {"refreshes": 1, "counts": state.counts}


def test_all_uses_of_a_micro_batch_start_from_the_same_point_and_the_last_one_remains():
    settings, once, twice = OperandSplit(), SplitState(), SplitState()
    for state in (once, twice):
        run(settings, state, 1)
    run(settings, twice, 2, x=batch(9))
    assert same(run(settings, once, 2, use=1), run(settings, twice, 2, use=1))
    assert same(run(settings, once, 3), run(settings, twice, 3))


def test_between_refreshes_directions_serve_the_new_matrix():
    settings, state = OperandSplit(refresh_every=3, q_factors="fp32"), SplitState()
    done = [run(settings, state, step) for step in range(1, 6)]
    assert counted(state) == {"cold": 1, "reused": 3, "warm": 1}
    for step in (2, 3):
        exact, right = batch(step).double(), done[0].right.values.double()
        expected = exact @ torch.linalg.pinv(right) @ right  # the projection on the span of the first V
        assert torch.allclose(exact - done[step - 1].residual.double(), expected, atol=1e-4)
    assert not torch.allclose(done[3].right.values.abs(), done[0].right.values.abs(), atol=1e-3)


def test_between_refreshes_whole_factors_serve_again_unless_rows_differ():
    settings, state = OperandSplit(refresh_every=3, reuse="factors"), SplitState()
    done = [run(settings, state, step) for step in (1, 2)]
    assert torch.equal(bits(done[0])[ROWS * COLS :], bits(done[1])[ROWS * COLS :])
    assert counted(state) == {"cold": 1, "reused": 1}
    other = run(settings, state, 3, x=batch(3, rows=20))
    assert other.left.shape == (RANK, 20)
    assert counted(state) == {"cold": 1, "reused": 1, "warm": 1, "misfit": 1}


@pytest.mark.parametrize(
    "x", [batch(2, cols=24), batch(2).bfloat16(), batch(2).double()], ids=["cols", "bf16", "fp64"]
)
def test_directions_of_another_shape_start_cold_and_are_counted(x):
    saved, state = SplitState(), SplitState()
    run(OperandSplit(), saved, 1)
    state.load_state_dict(saved.state_dict())
    got = run(OperandSplit(), state, 2, x=x)
    assert counted(state) == {"cold": 2, "misfit": 1}  # the first one was counted by `saved`
    assert same(got, run(OperandSplit(), SplitState(), 2, x=x))


@pytest.mark.parametrize(
    ("every", "used", "refreshed"),
    [
        (3, range(1, 10), [1, 4, 7]),
        (3, range(1, 22, 4), [1, 5, 9, 13, 17, 21]),  # one use in each step of four micro-batches
        (6, range(1, 22, 4), [1, 9, 17]),
        (4, range(1, 22, 4), [1, 5, 9, 13, 17, 21]),
        (3, [2, 3, 5, 6, 8], [2, 5, 8]),  # counted from the first use, whenever it comes
    ],
)
def test_factors_are_renewed_at_the_first_use_so_long_after_the_last_time(every, used, refreshed):
    settings, state = OperandSplit(refresh_every=every), SplitState()
    seen, found = [], 0
    for step in used:
        run(settings, state, step)
        run(settings, state, step, x=batch(step + 0.5), use=1)
        if state.counts["cold"] + state.counts["warm"] > found:
            # both uses of a micro-batch decide alike
            assert state.counts["cold"] + state.counts["warm"] == found + 2
            found += 2
            seen.append(step)
    assert seen == refreshed


def test_a_resumed_period_continues_and_without_its_start_begins_again():
    settings, state = OperandSplit(refresh_every=4), SplitState()
    for step in (1, 2, 3):
        run(settings, state, step)
    saved = state.state_dict()
    assert saved["refreshed_at"] == 1

    def kinds(saved, first):
        resumed = SplitState()
        resumed.load_state_dict({name: value for name, value in saved.items() if name != "counts"})
        for step in (first, first + 1):
            run(settings, resumed, step)
        return counted(resumed)

    assert kinds(saved, 4) == {"reused": 1, "warm": 1}
    old = {name: value for name, value in saved.items() if name != "refreshed_at"}
    assert kinds(old, 4) == {"warm": 1, "reused": 1}
    assert kinds({**saved, "refreshed_at": 90}, 2) == {"warm": 1, "reused": 1}  # numbered anew


def test_power_steps_run_at_their_interval():
    state, plain = SplitState(), SplitState()
    equal = []
    for step in range(1, 7):
        plain.load_state_dict(state.state_dict())
        equal.append(
            same(
                run(OperandSplit(power_every=2), state, step),
                run(OperandSplit(power_every=0), plain, step),
            )
        )
    assert equal == [True, True, False, True, False, True]


def test_tensors_counted_on_a_device_add_up_when_asked():
    state = SplitState()
    state.count("qr_fallback", 2)
    for number in range(70):  # some are added on the device before
        state.count("qr_fallback", torch.tensor(number))
        assert len(state._device_fallbacks) <= 32  # or memory would grow until somebody asks
        copy = state.copy()
        if number in (3, 31, 32, 69):
            assert copy.counts["qr_fallback"] == 2 + sum(range(number + 1))
    assert state.counts["qr_fallback"] == 2 + sum(range(70))


def test_counts_go_on_from_those_of_the_loaded_state():
    state, whole, resumed = SplitState(), SplitState(), SplitState()
    for step in (1, 2):
        run(OperandSplit(), state, step)
    state.count("qr_fallback", torch.tensor(3))
    resumed.count("qr_fallback", torch.tensor(9))
    resumed.load_state_dict(state.state_dict())
    run(OperandSplit(), resumed, 3)
    assert counted(resumed) == {"cold": 1, "warm": 2, "qr_fallback": 3}
    without = {name: value for name, value in state.state_dict().items() if name != "counts"}
    whole.load_state_dict(without)  # as earlier versions wrote it
    assert counted(whole) == {}


def test_a_state_shares_no_memory_with_what_it_was_loaded_from():
    state = SplitState()
    run(OperandSplit(), state, 1)
    saved = state.state_dict()
    saved["directions"].zero_()
    assert state.state_dict()["directions"].any()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], r"split state is \[1\]: expected a mapping"),
        ({}, "refreshes = None"),
        ({"refreshes": -1}, "refreshes = -1"),
        ({"refreshes": True}, "refreshes = True"),
        ({"refreshes": 1, "refreshed_at": -1}, "refreshed_at = -1"),
        ({"refreshes": 1, "refreshed_at": None}, "refreshed_at = None"),
        ({"refreshes": 1, "direction": 1}, "unknown key 'direction'"),
        ({"refreshes": 1, "counts": 3}, "counts = 3"),
        ({"refreshes": 1, "counts": {"cold": -1}}, "counts = {'cold': -1}"),
        ({"refreshes": 1, "counts": {"hot": 1}}, "counts = {'hot': 1}"),
        ({"refreshes": 1, "directions": [1.0]}, r"directions = \[1.0\]"),
        ({"refreshes": 1, "directions": torch.ones(3)}, r"directions = \(3,\)"),
        ({"refreshes": 1, "directions": torch.ones(3, 3, dtype=torch.int64)}, "torch.int64"),
        ({"refreshes": 1, "left": torch.ones(3, 3)}, "lacks directions, values, right"),
        (
            {
                "refreshes": 1,
                "directions": torch.ones(2, 3),
                "left": torch.ones(4, 2),
                "values": torch.ones(3),
                "right": torch.ones(3, 2),
            },
            "different ranks",
        ),
    ],
)
def test_malformed_states_are_refused_in_one_line(state, message):
    with pytest.raises(UserError, match=message) as caught:
        SplitState().load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert "use a state written by SplitState.state_dict" in str(caught.value)
