"""Settings for all tests: time limits of hypothesis, and the order in which files run."""

from pathlib import Path

from hypothesis import HealthCheck, settings

# On a machine that is busy with other things an example takes longer than hypothesis allows.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Folders and files whose tests start processes, longest first. Workers take files in this order; otherwise
# one of them would still run a long file when the others have finished.
LONGEST_FIRST = (
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


def pytest_collection_modifyitems(items):
    def place(item):
        top = item.path.relative_to(TESTS).parts[0]
        return LONGEST_FIRST.index(top) if top in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)  # a stable sort: tests of a file stay together and in order
