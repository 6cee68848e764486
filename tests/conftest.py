"""Settings for all tests: time limits, GPUs, the order of files, and what a file leaves behind."""

import functools
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# On a machine that is busy with other things an example takes longer than hypothesis allows.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Products of bf16 layers are bf16 in all tests and in the processes that they start, whatever is faster here.
os.environ["MEGALOWBIT_CPU_GEMM"] = "bf16"

# Folders and files whose tests start processes, longest first. Workers take files in this order; otherwise
# one of them would still run a long file when the others have finished.
LONGEST_FIRST = (
    "test_quality_bar.py",
    "speculation/test_controller_predictions.py",
    "slurm",
    "launch",
    "distributed",
    "benchmarks",
    "test_benchmark",
    "examples",
    "hf",
    "pretrain",
    "engine",
)
TESTS = Path(__file__).parent
SLOW_LIMIT = 1150  # seconds; pyproject.toml limits quick tests

# DeepSpeed's launcher shows the first GPUs to its processes; on a CPU accelerator they do not use them.
HIDING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def pytest_configure(config):
    """Hide the GPUs, unless only tests that need one are run: ranks of a test would share a GPU.

    NCCL rejects two ranks on one GPU. This comes before any test imports torch.
    """
    if config.option.markexpr != "gpu":
        os.environ.update(HIDING)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: run `make test-gpu` on a machine that has one")


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


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave modules and collected tests, which stay to the end, out of garbage collection.

    They are more than a million objects. The collector would search them several times while they are made,
    and at each `gc.collect()` of a test or a library afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries would take what is left over at the end for leaks


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_code():
    """Remove compiled code after each file: it counts against torch's limit of recompilations in the next."""
    yield
    if hasattr(sys.modules.get("torch._dynamo"), "reset"):
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True, scope="module")
def torch_multiplies_by_itself():
    """After each file: an engine on a CPU may have replaced torch's operators."""
    yield
    if "megalowbit.layers.cpu_gemm" in sys.modules:
        sys.modules["megalowbit.layers.cpu_gemm"]._of_process.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_profiled_afterwards():
    """A profiler that is left running records every operation of the next files, until memory is full."""
    yield
    torch = sys.modules.get("torch")
    assert torch is None or not torch.autograd._profiler_enabled(), "a test has left torch's profiler running"


@pytest.fixture(autouse=True, scope="module")
def restore_environment():
    """Restore the environment after each file: a rank's identity would change the next tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
