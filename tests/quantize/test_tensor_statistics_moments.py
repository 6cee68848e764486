import logging
import math

import numpy as np
import pytest
import torch
from kernel_operands import HAS_COMPILER, gaussian
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from megalowbit.errors import UserError
from megalowbit.quantize import backends, tensor_statistics
from megalowbit.quantize.tensor_statistics import CPU_PIECE, in_memory_order

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
VIEWS = {  # of 24 × 40 × 96
    "all": lambda x: x,
    "turned": lambda x: x.permute(2, 0, 1),
    "flat": lambda x: x.flatten(),
    "slice of the last axis": lambda x: x[..., 7:90],
    "slice of the first axis": lambda x: x[5:9],
    "slice of the middle axis": lambda x: x[:, 3:30],
    "slice of two axes": lambda x: x[:, 3:30, 5:7],
    "every third": lambda x: x[..., ::3],
    "one element": lambda x: x[3, 4, 5],
    "one column": lambda x: x[:, :, 5],
    "repeated": lambda x: x[:1].expand(7, 40, 96),
    "repeated alone": lambda x: x[:1, :1, :1].expand(7, 40, 96),
    "an axis of one": lambda x: x[:, 3:4, 2:50],
}
COPIED = {"slice of two axes"}


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch):
    monkeypatch.delenv(backends.BACKEND_VARIABLE, raising=False)
    yield
    backends._backend_for.cache_clear()
    tensor_statistics._has_kernel.cache_clear()


def calls_of_the_kernel(monkeypatch):
    calls, inner = [], tensor_statistics.moments_on_cpu
    monkeypatch.setattr(tensor_statistics, "moments_on_cpu", lambda x: calls.append(x) or inner(x))
    return calls


def check(x):
    wide = x.double().numpy()
    found = tensor_statistics.tensor_moments(x)
    assert found.largest.dtype == found.squares.dtype == torch.float64
    assert found.largest.item() == np.abs(wide).max()
    assert found.squares.item() == pytest.approx(np.sum(wide**2), rel=1e-12, abs=0)


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_both_are_those_of_float64(backend, dtype, view, monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, backend)
    x = view(gaussian(24, 40, 96, dtype=dtype) + 0.1)
    check(x)
    check(torch.nn.Parameter(x).detach())


@pytest.mark.parametrize("backend", ["", "torch"])
def test_what_is_not_finite_shows_and_what_is_empty_is_zero(backend, monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, backend)
    for spoiler in (math.inf, -math.inf):
        x = gaussian(30, 50)
        x[7, 9] = spoiler
        assert [each.item() for each in tensor_statistics.tensor_moments(x)] == [math.inf, math.inf]
        x[20, 3] = math.nan
        assert all(each.isnan() for each in tensor_statistics.tensor_moments(x))
    for shape in ((0,), (0, 5), (3, 0, 2)):
        for dtype in DTYPES:
            assert [
                each.item() for each in tensor_statistics.tensor_moments(torch.empty(shape, dtype=dtype))
            ] == [
                0,
                0,
            ]


def test_plain_torch_sums_pieces(monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "torch")
    x = gaussian(3, CPU_PIECE - 5)
    assert x.numel() % CPU_PIECE
    check(x)


@pytest.mark.parametrize("name", VIEWS)
def test_the_order_of_memory_is_a_view_wherever_two_axes_describe_it(name):
    base = gaussian(24, 40, 96)
    x = VIEWS[name](base)
    matrix = in_memory_order(x)
    assert matrix.ndim == 2
    assert (matrix.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()) == (name not in COPIED)
    assert torch.equal(matrix.flatten().sort().values, x.flatten().sort().values)
    assert matrix.stride(1) <= matrix.stride(0) or matrix.stride(0) == 0 or len(matrix) == 1
    if name in ("all", "turned", "flat", "slice of the first axis"):
        assert torch.equal(matrix[0], base.flatten() if len(x) != 4 else x.flatten())


@needs_compiler
def test_on_a_cpu_the_kernel_reads_a_slice_where_it_lies(monkeypatch):
    calls = calls_of_the_kernel(monkeypatch)
    base = gaussian(64, 300, dtype=torch.bfloat16)
    for x in (base, base.t(), base[:, 100:200]):
        check(x)
        assert calls.pop().data_ptr() == x.data_ptr()
    check(base.double())
    assert not calls


@needs_compiler
def test_tensors_that_are_not_plain_use_plain_torch(monkeypatch):
    calls = calls_of_the_kernel(monkeypatch)
    x = gaussian(8, 32)
    with create_selective_checkpoint_contexts([torch.ops.aten.mm.default])[0]:
        check(x)
    with FakeTensorMode() as mode:
        assert tensor_statistics.tensor_moments(mode.from_tensor(x)).largest.shape == ()
    assert not calls


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setattr(tensor_statistics.LIBRARY, "_loaded", (None, "it fails its self-check: set CC"))
    tensor_statistics._has_kernel.cache_clear()


@needs_compiler
def test_without_the_library_plain_torch_is_used_and_logged_once(no_library, caplog):
    with caplog.at_level(logging.WARNING, logger="megalowbit"):
        for _ in range(3):
            check(gaussian(30, 40))
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "plain torch operations, which is slower: it fails its self-check: set CC"
    )


@needs_compiler
def test_without_the_library_a_forced_backend_is_an_error(no_library, monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "c")
    with pytest.raises(
        UserError, match="MEGALOWBIT_BACKEND=c cannot be used for operand statistics: it fails"
    ):
        tensor_statistics.tensor_moments(gaussian(30, 40))


@needs_compiler
def test_a_dtype_without_a_kernel_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="megalowbit"):
        for _ in range(3):
            check(gaussian(30, 40, dtype=torch.float64))
    said = [
        record.getMessage() for record in caplog.records if "no kernel supports it" in record.getMessage()
    ]
    assert said == ["statistics of torch.float64 on cpu use plain torch operations: no kernel supports it"]
