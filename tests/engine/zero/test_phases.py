import pytest

from megalowbit.engine.zero.phases import PhaseTimers, scaled_learning_rates


def test_a_phase_timer_passes_on_what_is_deepspeeds():
    class Theirs:
        def __call__(self, name):
            return f"timer {name}"

        def log(self, names):
            return f"log {names}"

    timers = PhaseTimers(Theirs())
    assert (timers("step"), timers.log(["a"])) == ("timer step", "log ['a']")


def test_rates_are_scaled_inside_only_also_after_an_error():
    groups = [{"lr": 1.0, "lr_scale": 0.5}, {"lr": 2.0}]
    seen = []

    def fail():
        with scaled_learning_rates(groups):
            seen.extend(group["lr"] for group in groups)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [0.5, 2.0]
    assert [group["lr"] for group in groups] == [1.0, 2.0]
