"""Property tests pass on a busy machine too: they have no deadline unless a test sets one."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.just(0))
def test_an_example_may_take_longer_than_hypothesis_would_allow(number):
    time.sleep(0.25 + number)


@settings(max_examples=1)
@given(st.just(0))
def test_settings_of_a_test_keep_the_disabled_deadline(number):
    time.sleep(0.25 + number)
