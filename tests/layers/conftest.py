import fp4_reference
import pytest


@pytest.fixture(scope="session")
def reference():
    """The independent block formats of `tests/quantize/fp4_reference.py`."""
    return fp4_reference
