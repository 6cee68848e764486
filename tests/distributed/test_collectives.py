import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalowbit.distributed import collectives
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError

HEADER = "include/torch/csrc/distributed/c10d/NCCLUtils.hpp"
C_NAMES = {
    "kChar": torch.int8, "kByte": torch.uint8, "kFloat": torch.float32, "kDouble": torch.float64,
    "kInt": torch.int32, "kLong": torch.int64, "kHalf": torch.float16, "kBool": torch.bool,
    "kBFloat16": torch.bfloat16,
}  # fmt: skip


def is_ordinary(dtype):
    """Whether torch makes tensors of this type; not of single bits, for example."""
    if str(dtype).startswith(("torch.q", "torch.complex32")):
        return False  # torch warns
    try:
        return isinstance(torch.zeros(4, dtype=dtype), torch.Tensor)
    except (RuntimeError, NotImplementedError):
        return False


TYPES = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def types_of_nccl():
    text = (Path(torch.__file__).parent / HEADER).read_text()
    table = re.search(r"ncclDataType = \{(.*?)\n\};", text, re.DOTALL)[1]
    names = re.findall(r"at::(k\w+), nccl", table)
    return {C_NAMES[name] for name in names if not name.startswith("kFloat8")}


def test_the_accepted_types_are_those_that_torch_maps_to_nccl():
    real = {each for each in collectives.SENT_DTYPES if not each.is_complex}
    assert real == types_of_nccl()
    assert real - {torch.bool} == collectives.REDUCED_DTYPES


@pytest.mark.parametrize("dtype", sorted(filter(is_ordinary, TYPES), key=str), ids=str)
def test_what_is_accepted_over_gloo_is_what_nccl_accepts(dtype):
    """Every type of torch as a broadcast and as a sum: our error, or a call that gloo completes."""
    start_process_group()
    tensor = torch.zeros(4, dtype=dtype)
    calls = {
        collectives.SENT_DTYPES: lambda: collectives.broadcast(tensor, 0),
        collectives.REDUCED_DTYPES: lambda: collectives.all_reduce(tensor),
    }
    for accepted, call in calls.items():
        if dtype in accepted:
            call()
            continue
        line = rf"over ranks 0 \(.*gloo.*shape \(4,\), {dtype}, on cpu: .*convert it"
        with pytest.raises(UserError, match=line):
            call()


def refused(call, tensor, **named):
    start_process_group()
    with pytest.raises(UserError) as error:
        call(tensor, **named)
    return str(error.value)


@pytest.mark.parametrize("name", ["BAND", "BOR", "BXOR", "AVG", "PREMUL_SUM"])
def test_operations_that_nccl_or_gloo_lacks_are_refused(name):
    operation = getattr(dist.ReduceOp, name)
    if name == "PREMUL_SUM":
        operation = dist._make_nccl_premul_sum(0.5)
    line = refused(collectives.all_reduce, torch.ones(2, dtype=torch.int32), op=operation)
    assert line.startswith("all_reduce over ranks 0 (")
    assert line.endswith("; use SUM, PRODUCT, MIN or MAX")
    for each in ("SUM", "PRODUCT", "MIN", "MAX"):
        collectives.all_reduce(torch.ones(2, dtype=torch.int32), op=getattr(dist.ReduceOp, each))


def test_memory_that_is_not_contiguous_is_refused():
    for call in (collectives.all_reduce, lambda tensor: collectives.broadcast(tensor, 0)):
        line = refused(call, torch.ones(2, 3).t())
        assert line.endswith("its strides (1, 3) are not contiguous; pass tensor.contiguous()")
    assert refused(collectives.all_reduce, torch.eye(2).to_sparse()).endswith("pass tensor.to_dense()")


def test_outputs_are_checked_too():
    tensor = torch.ones(2, 2)
    assert "not contiguous" in refused(lambda each: collectives.all_gather([tensor.t()], each), tensor)
    line = refused(lambda each: collectives.all_gather_single(torch.empty(2, 2).short(), each), tensor)
    assert line.startswith("all_gather_single over ranks 0 (")
    assert "torch.int16" in line


def test_a_device_without_a_backend_is_refused():
    line = refused(collectives.all_reduce, torch.ones(2, device="meta"))
    assert re.search(r"on meta: the group has no backend for that device; move the tensor to cpu", line)


@pytest.fixture(scope="module")
def on_gpus(launch_ranks):
    return launch_ranks("ranks_as_nccl.py", world_size=1).wait(timeout=90)[0]


CHECKED = {  # calls of each case
    "gradients_of_a_step": ["all_reduce"] * 2,
    "a_step_without_gradients": ["all_reduce"] * 2,
    "statistics_of_gradients": ["all_reduce"] * 3,
    "offloaded_pieces": ["all_reduce"],
    "facts_of_a_step": ["all_reduce"] * 2,
    "facts_of_a_step_on_the_host": ["all_reduce"] * 2,
    "the_end_of_a_counted_step": ["all_reduce"],
    "whether_tables_are_equal": ["all_reduce"],
    "tables_of_layers": ["all_reduce"],
    "tensor_parallel_layers": ["all_reduce"] * 3 + ["all_gather"] * 3,
    "initial_weights_of_shards": ["broadcast"],  # generators; weights on the meta device arrive later
    "initial_weights_of_shards_on_the_host": ["broadcast"],
    "flags": ["all_reduce"],
    "random_numbers": ["all_gather"] * 3,
    "states_of_generators": ["all_reduce"],
    "findings_of_a_precision_check": ["all_reduce"] * 2,
}


@pytest.mark.parametrize("name", CHECKED)
def test_no_tensor_of_the_cpu_reaches_a_group_of_nccl(on_gpus, name):
    found = on_gpus[name]
    assert found["error"] is None
    assert found["seen"] == [[call, "meta"] for call in CHECKED[name]]


def test_small_tensors_and_barriers_use_the_current_gpu(on_gpus):
    assert on_gpus["device"] == "cuda:3"
    assert on_gpus["barrier"] == [3]


def test_hosts_agree_in_a_group_of_their_own(on_gpus):
    assert on_gpus["hosts"] == {"seen": [["all_reduce", "cpu"]], "error": None, "asked": [[[0, 1], "gloo"]]}


def test_each_case_is_checked_and_a_tensor_of_the_cpu_found(on_gpus):
    assert on_gpus.keys() - CHECKED.keys() == {"host", "hosts", "device", "barrier"}
    assert on_gpus["host"]["error"] == (
        "UserError: all_reduce over ranks 0, 1 (meta:nccl) cannot take a tensor of shape (2,), "
        "torch.float32, on cpu: the group has no backend for that device; move the tensor to meta"
    )
