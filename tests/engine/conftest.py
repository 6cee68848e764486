"""Fixtures that restore the process after each engine test: environment, torch functions, engines."""

import gc
import os
import sys

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _imports_are_excluded_from_collection():
    """Imported objects stay to the end, so `_engines_are_destroyed` need not search millions of them."""
    import deepspeed  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _rank_variables_restored():
    """Rank variables that an engine exports must not reach other tests, or programs they start."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _linear_restored():
    """At stage 3 DeepSpeed replaces torch's `linear` and does not restore it."""
    before = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = before


@pytest.fixture(autouse=True, scope="module")
def _engines_are_destroyed():
    """A ZeRO engine reserves gigabytes of addresses for its buckets; too many engines make `fork` fail.

    At stage 3 DeepSpeed replaces torch's `linear` for the whole process.
    """
    torch.nn.functional.linear = torch._C._nn.linear
    yield
    torch.nn.functional.linear = torch._C._nn.linear
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None:
        for each in gc.get_objects():
            # not isinstance: it would dereference weak proxies whose object may be gone
            if issubclass(type(each), deepspeed.DeepSpeedEngine):
                each.destroy()
        gc.collect()
