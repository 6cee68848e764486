"""The collectives and transfers of this package; under every backend they accept only what NCCL accepts.

gloo, which exchanges between CPUs, accepts more, so a mistake would first show on GPUs. The functions have
the names and arguments of torch.distributed's. Before they call these, they check:

- the device: the group needs a backend for it. A group of NCCL has none for the CPU; `exchange_device` has
  the device to use.
- the dtype: NCCL has no 16-bit integers, for example. Booleans can be sent but not reduced, because NCCL
  takes their sum as a logical or, and gloo adds bytes.
- the operation: NCCL has no bitwise ones, gloo no average and no premultiplied sum.
- the memory: dense and contiguous. gloo reduces any dense tensor in the order of its memory, which ranks with
  other strides do not share.

Python objects are sent as bytes, under NCCL on the current GPU, which `start_process_group` chooses before
the first of them. Ranks must issue collectives in the same order. That is not checked here: torch's flight
recorder keeps it, and the tests compare it over the ranks, including DeepSpeed's own calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.errors import UserError

# The types of torch's NCCLUtils.hpp but FP8, which NCCL has from compute capability 9.0 on.
REDUCED_DTYPES = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
# torch sends complex numbers as pairs of real ones
SENT_DTYPES = REDUCED_DTYPES | {torch.bool, torch.complex64, torch.complex128}
OPERATIONS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
MOST_RANKS_SHOWN = 8


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> Any:
    """Reduce `tensor` in place; with `async_op`, returns an object to `wait()` for."""
    check("all_reduce", tensor, group, op)
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def broadcast(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensor` by that of the world's rank `src`."""
    check("broadcast", tensor, group)
    dist.broadcast(tensor, src, group=group)


def all_gather(tensors: Sequence[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write the tensors of all ranks into `tensors`, in rank order; all have the same shape."""
    for each in (tensor, *tensors):
        check("all_gather", each, group)
    dist.all_gather(list(tensors), tensor, group=group)


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write the tensors of all ranks into one `output`, in rank order; all have the same shape."""
    for each in (input, output):
        check("all_gather_single", each, group)
    dist.all_gather_single(output, input, group=group)


def send(tensor: Tensor, dst: int) -> None:
    """Send `tensor` to the world's rank `dst`, which must call `recv`."""
    check("send", tensor)
    dist.send(tensor, dst=dst)


def recv(tensor: Tensor, src: int) -> None:
    """Overwrite `tensor` by what the world's rank `src` sends."""
    check("recv", tensor)
    dist.recv(tensor, src=src)


def all_gather_object(found: list[Any], value: object, group: dist.ProcessGroup | None = None) -> None:
    """Write the picklable values of all ranks into the list `found`, in rank order."""
    gather = dist.all_gather_object
    if torch.compiler.is_compiling():  # it reads attributes of the group that Dynamo cannot trace
        gather = torch.compiler.disable(gather)
    gather(found, value, group=group)


def broadcast_object_list(values: list[Any], src: int) -> None:
    """Overwrite the picklable `values` by those of the world's rank `src`."""
    dist.broadcast_object_list(values, src=src)


def barrier(*, async_op: bool = False) -> Any:
    """Wait for all ranks; with `async_op`, returns an object to `wait()` for."""
    # NCCL reduces a number for it, and would choose the GPU by the rank
    devices = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
    return dist.barrier(async_op=async_op, device_ids=devices)


def new_group(ranks: Sequence[int], backend: str | None = None) -> Any:
    """A group of some ranks; all ranks of the world must call it, in the same order.

    `backend`: torch's name, such as `"gloo"`; None: that of the world.
    """
    return dist.new_group(ranks=list(ranks), backend=backend)


def check(call: str, tensor: Tensor, group: dist.ProcessGroup | None = None, op: Any = None) -> None:
    """Check that NCCL could run a collective.

    Args:
        call: its name, for the error.
        tensor: an input or output of it.
        group: None: all ranks.
        op: the operation of a reduction; None: the tensor is only sent.

    Raises:
        UserError: NCCL, or gloo, would refuse the tensor or the operation.
    """
    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    problem = _problem(tensor, backends, op)
    if problem is None:
        return
    ranks = dist.get_process_group_ranks(group)
    shown = ", ".join(map(str, ranks[:MOST_RANKS_SHOWN])) + (" …" if len(ranks) > MOST_RANKS_SHOWN else "")
    raise UserError(
        f"{call} over ranks {shown} ({backends}) cannot take a tensor of shape {tuple(tensor.shape)}, "
        f"{tensor.dtype}, on {tensor.device}: {problem}"
    )


def _problem(tensor: Tensor, backends: str, op: Any) -> str | None:
    """What NCCL or gloo would refuse, and the remedy."""
    if op is not None and not any(op == each for each in OPERATIONS):
        name = getattr(op, "name", str(op))
        return f"NCCL and gloo do not both have the operation {name}; use SUM, PRODUCT, MIN or MAX"
    if f"{tensor.device.type}:" not in backends:
        devices = ", ".join(part.partition(":")[0] for part in backends.split(","))
        return f"the group has no backend for that device; move the tensor to {devices}"
    if tensor.dtype not in (SENT_DTYPES if op is None else REDUCED_DTYPES):
        if op is None:
            return "NCCL does not have that type; send its bytes (tensor.view(torch.uint8)), or convert it"
        return "NCCL or gloo cannot reduce that type; convert it, for example to torch.int32 or torch.float32"
    if tensor.layout is not torch.strided:
        return "it is sparse; pass tensor.to_dense()"
    if not tensor.is_contiguous():
        return f"its strides {tensor.stride()} are not contiguous; pass tensor.contiguous()"
    return None
