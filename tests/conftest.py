"""Settings for all tests: time limits, the order of files, and what a file leaves behind."""

import functools
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# On a machine that is busy with other things an example takes longer than hypothesis allows.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Folders and files whose tests start processes, longest first. Workers take files in this order; otherwise
# one of them would still run a long file when the others have finished.
LONGEST_FIRST = (
    "test_quality_bar.py",
    "speculation/test_controller_predictions.py",
    "slurm",
    "launch",
    "distributed",
    "test_benchmarks.py",
    "examples",
    "hf",
    "pretrain",
    "engine",
)
TESTS = Path(__file__).parent
SLOW_LIMIT = (
    1800  # seconds; on a busy machine a quality bar takes half of it. pyproject.toml limits quick tests
)


def pytest_configure():
    """Let SIGINT stop the processes of tests in a shell's background job too, where it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    @functools.cache
    def place(path):
        name = path.relative_to(TESTS).as_posix()
        places = [place for place, start in enumerate(LONGEST_FIRST) if name.startswith(start)]
        return places[0] if places else len(LONGEST_FIRST)

    items.sort(key=lambda item: place(item.path))  # a stable sort: tests of a file stay together and in order
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_code():
    """Remove compiled code after each file: it counts against torch's limit of recompilations in the next."""
    yield
    if hasattr(sys.modules.get("torch._dynamo"), "reset"):
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True, scope="module")
def restore_environment():
    """Restore the environment after each file: a rank's identity would change the next tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
