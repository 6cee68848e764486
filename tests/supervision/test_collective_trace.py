import importlib.util
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from megalowbit.distributed import collectives
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
from megalowbit.supervision.collective_trace import is_failed_collective, trace_of_error, trace_of_frame

HERE = "supervision/test_collective_trace.py"
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
SIZES = "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4"


def frame_of(work):
    """The frame of a thread that is in `work(event.wait)`, waiting for `event`."""
    event = threading.Event()
    thread = threading.Thread(target=work, args=(event.wait,), daemon=True)
    thread.start()
    while True:  # until it has come to wait
        frame = sys._current_frames()[thread.ident]
        innermost = frame
        while innermost is not None and innermost.f_code.co_name != "wait":
            innermost = innermost.f_back
        if innermost is not None:
            break
    return frame, lambda: (event.set(), thread.join())


def module_at(path, source):
    path.parent.mkdir(parents=True)
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_failed_collective_is_named_with_its_caller():
    start_process_group()

    def share():
        dist.broadcast(torch.ones(1), src=3)

    site = trace_of_error(raised(share))
    assert site.is_waiting
    assert site.text.startswith(f"broadcast ({HERE}:")
    assert site.text.endswith(" share)")


def test_collectives_of_objects_are_named_instead_of_their_parts():
    start_process_group()
    site = trace_of_error(raised(lambda: dist.all_gather_object([None], threading.Lock())))
    assert site.text.startswith(f"all_gather_object ({HERE}:")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: collectives.broadcast(torch.ones(1), src=3), "broadcast"),
        (lambda: collectives.all_gather_object([None], threading.Lock()), "all_gather_object"),
        (lambda: collectives.all_reduce(torch.ones(1, dtype=torch.int16)), None),
    ],
)
def test_our_own_wrappers_are_skipped(call, name):
    start_process_group()
    text = trace_of_error(raised(call)).text
    assert text.startswith(f"{HERE}:" if name is None else f"{name} ({HERE}:")


def test_deepspeed_wrappers_are_skipped(tmp_path):
    inner = module_at(tmp_path / "torch" / "distributed" / "c10d.py", "def all_reduce(wait):\n    wait()\n")
    outer = module_at(
        tmp_path / "deepspeed" / "comm" / "comm.py",
        "def log_wrapper(f, wait):\n    return f(wait)\n"
        "def inference_all_reduce(f, wait):\n    log_wrapper(f, wait)\n",
    )

    def average(wait):
        outer.inference_all_reduce(inner.all_reduce, wait)

    # a thread's own wait stands for the one in C, which has no frame
    frame, end = frame_of(average)
    while frame.f_code.co_name == "wait":
        frame = frame.f_back
    site = trace_of_frame(frame)
    end()
    assert site.is_waiting
    assert site.text.startswith(f"all_reduce ({HERE}:")
    assert site.text.endswith(" average)")


def test_waiting_for_an_operation_started_earlier_is_a_collective_too(tmp_path):
    module = module_at(
        tmp_path / "deepspeed" / "runtime" / "stage3.py",
        "class Handle:\n    def fetch(self, handle):\n        handle.wait()\n",
    )

    class Handle:
        def __init__(self, wait):
            self.wait = wait

    frame, end = frame_of(lambda wait: module.Handle().fetch(Handle(wait)))
    while frame.f_code.co_name != "fetch":
        frame = frame.f_back
    site = trace_of_frame(frame)
    end()
    assert site == ("wait (runtime/stage3.py:3 fetch)", True)


def test_a_thread_inside_a_library_names_its_caller():
    def read(wait):
        wait()

    frame, end = frame_of(read)
    site = trace_of_frame(frame)
    end()
    assert not site.is_waiting
    assert "/threading.py:" in site.text
    assert f" wait, from {HERE}:" in site.text
    assert site.text.endswith(" read")


def test_an_ended_thread_has_no_location():
    assert trace_of_frame(None) == ("no Python code", False)


def chained(message):
    try:
        try:
            raise RuntimeError(CLOSED)
        finally:
            raise OSError(message)
    except OSError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError(CLOSED), True),
        (RuntimeError("NCCL communicator was aborted on rank 0"), True),
        (dist.DistNetworkError("Broken pipe"), True),
        (dist.DistStoreError("wait timeout after 1000ms"), True),
        (UserError("rank 1: RuntimeError: " + CLOSED), False),  # already one of our messages
        (RuntimeError(f"rank 0 failed: RuntimeError: {CLOSED}"), True),
        (RuntimeError("ProcessGroupGloo::broadcast: invalid root rank: 3"), False),
        (RuntimeError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"), False),
        (RuntimeError(SIZES), False),
        (RuntimeError("Connection closed by peer"), False),  # of a download, for all we know
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (ValueError(CLOSED), False),
        (chained("clean-up failed"), True),
    ],
    ids=str,
)
def test_failed_collectives_are_recognised(error, is_one):
    assert is_failed_collective(error) is is_one


def test_connection_errors_count_only_if_raised_below_torch_distributed(tmp_path):
    source = "def all_reduce():\n    raise RuntimeError('Connection closed by peer')\n"
    module = module_at(tmp_path / "torch" / "distributed" / "c10d.py", source)
    assert is_failed_collective(raised(module.all_reduce))
