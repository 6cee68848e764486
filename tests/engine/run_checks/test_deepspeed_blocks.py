import pytest
from small_engines import config, model

from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError


def test_a_nested_key_is_named_with_its_block():
    with pytest.raises(UserError, match=r"DeepSpeed rejects csv_monitor\.enabledd = False .*: correct it"):
        initialize(model=model(), config=config(csv_monitor={"enabled": False, "enabledd": False}))
