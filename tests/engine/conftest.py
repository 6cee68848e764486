"""One process, one group: engine tests leave the environment of the test session as they found it."""

import gc
import os
import sys

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _modules_are_not_searched():
    """What imports have made stays to the end: `_engines_are_let_go` need not look at millions of objects."""
    import deepspeed  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _environment_as_before():
    """Rank variables that an engine exports must not reach other tests, or programs they start."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _linear_as_before():
    """DeepSpeed puts a function of its own into torch at stage 3 and leaves it there."""
    before = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = before


@pytest.fixture(autouse=True, scope="module")
def _engines_are_let_go():
    """A ZeRO engine reserves gigabytes of addresses for its buckets, until no process can fork.

    At stage 3 DeepSpeed puts a function of its own in the place of torch's `linear`, for the whole process.
    """
    torch.nn.functional.linear = torch._C._nn.linear
    yield
    torch.nn.functional.linear = torch._C._nn.linear
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None:
        for each in gc.get_objects():
            # not isinstance, which asks a weak proxy for what may be gone
            if issubclass(type(each), deepspeed.DeepSpeedEngine):
                each.destroy()
        gc.collect()
