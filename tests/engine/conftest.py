"""One process, one group: engine tests leave the environment of the test session as they found it."""

import os

import pytest


@pytest.fixture(autouse=True)
def _environment_as_before():
    """Rank variables that an engine exports must not reach other tests, or programs they start."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)
