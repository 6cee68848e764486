import pytest

from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.errors import UserError
from megalowbit.supervision.settings import WatchdogSettings


def read(watchdog):
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "megalowbit": {"watchdog": watchdog},
    }
    return read_deepspeed_config(raw).settings.watchdog


def test_a_configuration_without_the_block_waits_ten_minutes():
    expected = WatchdogSettings(timeout=600.0, silence=15.0, slow_step=10.0, termination_seconds=20.0)
    assert read({}) == expected


def test_null_turns_both_off():
    assert read({"timeout": None, "slow_step": None}) == WatchdogSettings(timeout=None, slow_step=None)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("timeout", 4.9, "greater than or equal to 5"),
        ("timeout", 1e308, "less than or equal to 604800"),
        ("timeout", "60", "without quotes"),
        ("timeout", True, "not true or false"),
        ("timeout", float("inf"), "finite number"),
        ("silence", 2.9, "greater than or equal to 3"),
        ("slow_step", 1, "greater than 1"),
        ("termination_seconds", 0.5, "greater than or equal to 1"),
        ("termination_seconds", None, "valid number"),
    ],
)
def test_impossible_values_are_rejected_by_name(key, value, reason):
    with pytest.raises(UserError, match=rf"megalowbit\.watchdog\.{key} = .*{reason}"):
        read({key: value})


def test_an_unknown_key_names_its_nearest():
    with pytest.raises(UserError, match=r"megalowbit\.watchdog\.time_out.* did you mean .*watchdog\.timeout"):
        read({"time_out": 60})


@pytest.mark.parametrize(("timeout", "interval"), [(5, 0.5), (6, 0.5), (12, 1.0), (60, 5.0), (600, 5.0)])
def test_there_are_twelve_heartbeats_per_timeout_within_bounds(timeout, interval):
    assert WatchdogSettings(timeout=timeout, silence=None).interval == interval


@pytest.mark.parametrize(("timeout", "seconds"), [(5, 1.0), (12, 2.0), (600, 10.0), (None, 10.0)])
def test_the_time_to_answer_does_not_depend_on_the_silence(timeout, seconds):
    for silence in (None, 3.0, 600.0):
        settings = WatchdogSettings(timeout=timeout, silence=silence)
        assert settings.seconds_to_answer == seconds
        assert timeout is None or settings.seconds_to_answer >= 2 * settings.interval


@pytest.mark.parametrize(("silence", "interval"), [(3.0, 0.5), (15.0, 2.5), (600.0, 5.0)])
def test_a_silent_rank_misses_several_heartbeats(silence, interval):
    assert WatchdogSettings(silence=silence).interval == interval
