"""The pause of the garbage collector ends with the block, and leaves a collector alone that was off."""

import gc

import pytest

from megalowbit.collector import collector_paused


@pytest.fixture
def _collector():
    yield
    gc.enable()


def fail():
    with collector_paused():
        assert not gc.isenabled()
        raise KeyError("x")


@pytest.mark.usefixtures("_collector")
def test_the_collector_is_paused_and_runs_again_after_an_error():
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


@pytest.mark.usefixtures("_collector")
def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
