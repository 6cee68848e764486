"""The torch internals that `timeouts`, `heartbeat_store` and `collective_trace` of supervision use."""

import importlib
import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalowbit.engine.process_start import start_process_group
from megalowbit.supervision.heartbeat_store import ATTEMPT, IS_STORE_OF_LAUNCHER


@pytest.fixture(autouse=True)
def _group():
    start_process_group()


def test_all_groups_of_a_process_are_in_one_table():
    made = dist.new_group([0])
    assert made in distributed_c10d._world.pg_map, "groups that DeepSpeed makes would keep waiting for ever"


def test_the_timeout_of_a_group_can_be_set():
    group = dist.new_group([0])
    assert torch.device("cpu") in group._device_types, "no group's timeout would be set"
    backend = group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=7))
    assert backend.options._timeout == timedelta(seconds=7), "a cut network would not end a run any more"


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_the_timeout_of_nccl_can_be_set():
    assert callable(dist.ProcessGroupNCCL._set_default_timeout), "torch would end runs before the diagnosis"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=7)
    assert options._timeout == timedelta(seconds=7)


def test_the_wrapper_of_detailed_debugging_exposes_its_group():
    wrapper = importlib.import_module("torch._C._distributed_c10d")._ProcessGroupWrapper
    assert isinstance(wrapper.wrapped_pg, property), (
        "with TORCH_DISTRIBUTED_DEBUG=DETAIL a run would not start"
    )


def test_the_backends_of_a_group_can_be_read():
    config = dist.get_backend_config(dist.group.WORLD)
    assert "cpu:gloo" in config.split(","), "no group's timeout would be set"
    assert all(part.count(":") == 1 for part in config.split(","))


def test_the_store_of_the_group_supports_the_operations_of_the_heartbeat_store():
    store = distributed_c10d._get_default_store()
    notes = dist.PrefixStore("contract", store.clone())
    assert notes.add("count", 2) == 2
    assert notes.compare_set("claim", "", "me") == b"me"
    assert notes.compare_set("claim", "", "you") == b"me", "every rank would look, and every rank would speak"
    notes.set("note", "text")
    assert notes.check(["note", "claim"])
    assert not notes.check(["note", "nothing"])
    assert notes.multi_get(["note", "claim"]) == [b"text", b"me"]


def test_the_server_behind_a_store_is_found():
    store = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore), "a lost main process would look like a lost machine"
    assert store.host
    assert store.port


def test_torchrun_exports_that_it_serves_the_store_and_the_number_of_the_attempt():
    rendezvous = importlib.import_module(
        "torch.distributed.rendezvous"
    )  # import_module, because a function has the same name
    agent = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    assert IS_STORE_OF_LAUNCHER in inspect.getsource(rendezvous)
    assert ATTEMPT in inspect.getsource(agent), "notes of a failed attempt would alarm the next"


def test_collectives_run_through_functions_of_torch_distributed():
    file = inspect.getsourcefile(distributed_c10d.all_reduce).replace("\\", "/")
    assert "/torch/distributed/" in file, "the place where ranks wait would be unknown"
    with pytest.raises(RuntimeError) as seen:
        dist.broadcast(torch.ones(1), src=3)
    names = []
    trace = seen.value.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[1:3] == ["wrapper", "broadcast"], (
        "an error would name torch's wrapper instead of the collective"
    )


def test_network_errors_have_a_separate_class():
    for name in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        assert issubclass(getattr(dist, name), dist.DistError)
        assert issubclass(dist.DistError, RuntimeError)
