"""One process; that several ranks return and raise together is shown in tests/distributed."""

import pytest

from megalowbit.distributed.agreement import agree, failing_together, gather_bytes, share, succeed_together
from megalowbit.errors import UserError


def test_the_result_is_returned():
    assert agree(lambda: {"folder": "x"}) == {"folder": "x"}
    assert agree(lambda: None) is None


@pytest.mark.parametrize("error", [UserError("wrong"), KeyError("odd")])
def test_an_error_is_raised_unchanged(error):
    def decide():
        raise error

    with pytest.raises(type(error)) as caught:
        agree(decide)
    assert caught.value is error


def test_arguments_are_passed_on():
    assert agree(divmod, 7, 2) == succeed_together(divmod, 7, 2) == (3, 1)
    assert agree(int, "11", base=2) == succeed_together(int, "11", base=2) == 3


@pytest.mark.parametrize("error", [UserError("wrong"), KeyError("odd"), StopIteration(), KeyboardInterrupt()])
def test_an_error_of_one_process_is_raised_unchanged_by_the_block(error):
    error.__context__ = cause = ValueError("before")
    with pytest.raises(type(error)) as caught, failing_together():
        raise error
    assert caught.value is error
    assert error.__context__ is cause
    assert not error.__suppress_context__


def test_one_process_shares_and_gathers_its_own():
    assert share({"a": 1}, 0) == {"a": 1}
    assert gather_bytes(b"ab").tolist() == [[97, 98]]
