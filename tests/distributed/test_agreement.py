"""One process; that several ranks return and raise together is shown in tests/distributed."""

import pytest

from megalowbit.distributed.agreement import agree, gather_bytes, share
from megalowbit.errors import UserError


def test_the_result_is_returned():
    assert agree(lambda: {"folder": "x"}) == {"folder": "x"}
    assert agree(lambda: None) is None


@pytest.mark.parametrize("error", [UserError("wrong"), KeyError("odd")])
def test_an_error_is_raised_as_it_is(error):
    def decide():
        raise error

    with pytest.raises(type(error)) as caught:
        agree(decide)
    assert caught.value is error


def test_one_process_shares_and_gathers_its_own():
    assert share({"a": 1}, 0) == {"a": 1}
    assert gather_bytes(b"ab").tolist() == [[97, 98]]
