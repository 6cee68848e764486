"""The bias gradient is a sum in fp32, for which no fp32 copy of the output gradient is made."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from quick_cases import every_pair
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import megalowbit as mlb
from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.engine.process_start import start_process_group
from megalowbit.layers.matmul.gemms import column_sums
from megalowbit.layers.tensor_parallel.linear import parallel_linear
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.quantize.backends import BACKEND_VARIABLE

TOKENS, FEATURES, OUTPUTS = 2048, 32, 1024
KINDS = {"column-parallel": False, "row-parallel": True}
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def layer_of(kind, dtype):
    """A layer of which only the bias is trained: quantising the output gradient may need memory."""
    torch.manual_seed(0)
    name, _, recipe = kind.partition(" ")
    plain = torch.nn.Linear(FEATURES, OUTPUTS).to(dtype)
    if name in KINDS:
        start_process_group()
        group, is_row = TensorGroup(dist.group.WORLD), KINDS[name]
        parts = (FEATURES if is_row else OUTPUTS,)
        plain = parallel_linear(plain.weight, plain.bias, group, is_row=is_row, parts=parts)
    model = torch.nn.Sequential(plain)
    if recipe:
        mlb.convert(model, recipe)
    model[0].weight.requires_grad_(False)
    return model[0]


def most_bytes_allocated(work):
    """The largest sum of the memory that torch has allocated during `work` and not freed yet."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events = found.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@every_pair(
    kind=["BitLinear nvfp4", *KINDS, *(f"{name} nvfp4" for name in KINDS)],
    has_main_grad=[False, True],
    backend=["the fastest", "torch"],
)
@HALF
def test_no_memory_of_the_output_gradients_size_is_allocated(
    kind, dtype, has_main_grad, backend, monkeypatch
):
    if backend == "torch":
        monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    layer = layer_of(kind, dtype)
    if has_main_grad:
        GradBuffer([layer.bias])
    grad_output = torch.randn(TOKENS, OUTPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.randn(TOKENS, FEATURES).to(dtype)
    layer(x).backward(grad_output)  # compiles the C kernels

    output = layer(x)
    allocated = most_bytes_allocated(lambda: output.backward(grad_output))
    assert 0 < allocated < grad_output.nbytes / 2  # of an fp32 copy it is a quarter
    expected = 2 * grad_output.double().sum(0)  # two backwards
    got = layer.bias.main_grad if has_main_grad else layer.bias.grad
    assert torch.allclose(got.double(), expected, rtol=2.0**-7, atol=1e-3)


@HALF
def test_a_gpu_sums_without_a_wide_copy(dtype):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            made = function(*arguments, **(options or {}))
            if isinstance(made, torch.Tensor):
                results.append((function, made.dtype, made.shape))
            return made

    results = []
    with FakeTensorMode():
        grad_output = torch.empty(TOKENS, OUTPUTS, dtype=dtype, device="cuda")
        with Recorder():
            column_sums(grad_output, dtype)
    # CUDA's sum reads half precision and adds in the result's dtype; a CPU's makes the copy
    assert results[0] == (torch.ops.aten.sum.dim_IntList, torch.float32, (OUTPUTS,))
    assert all(shape == (OUTPUTS,) for _, _, shape in results)
