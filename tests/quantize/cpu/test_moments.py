import math
import re

import numpy as np
import pytest
import torch
from kernel_operands import HAS_COMPILER, gaussian, special, spoil
from quick_cases import slow_except

from megalowbit import c_library
from megalowbit.errors import UserError
from megalowbit.quantize import tensor_statistics
from megalowbit.quantize.tensor_statistics import moments_on_cpu as moments

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VIEWS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t(),
    "slice of columns": lambda x: x[:, 7:-11],
    "slice of rows, turned": lambda x: x[3:-5].t(),
    "every third": lambda x: x[:, ::3],
    "every second of both": lambda x: x[::2, ::2],
    "one row repeated": lambda x: x[:1].expand(40, -1),
    "one column repeated": lambda x: x[:, :1].expand(-1, 40),
    "one row": lambda x: x.reshape(1, -1),
    "negated": lambda x: torch._neg_view(x),
}


def check(x):
    wide = x.double().numpy()
    largest, squares = moments(x).tolist()
    assert largest == np.abs(wide).max()
    assert squares == pytest.approx(math.fsum((wide**2).ravel()), rel=1e-12, abs=0)
    assert squares == pytest.approx(np.sum(wide**2), rel=1e-12, abs=0)


def test_where_there_is_a_compiler_there_is_a_kernel():
    assert tensor_statistics.LIBRARY.why_unavailable() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_both_are_those_of_float64_whatever_the_strides(dtype, view):
    check(view(gaussian(70, 610, dtype=dtype) + 0.1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 16385), (33, 257), (513, 3), (2000, 1), (1, 300_000)], ids=str)
def test_no_element_is_left_out_and_none_counted_twice(dtype, shape):
    check(gaussian(*shape, seed=sum(shape), dtype=dtype))
    ones = torch.ones(shape, dtype=dtype)
    assert moments(ones).tolist() == [1.0, ones.numel()]
    assert moments(ones.t()).tolist() == [1.0, ones.numel()]


@pytest.mark.parametrize("kind", ["subnormal", "tiny", "huge", "many magnitudes", "zeros", "outliers"])
def test_squares_neither_vanish_nor_overflow(kind):
    for dtype in (torch.float32, torch.bfloat16):
        check(special(kind, 40, 300).to(dtype))


def test_the_largest_may_stand_anywhere():
    x = torch.zeros(3, 530)
    for place in range(x.numel()):
        x.view(-1)[place] = -2.5
        assert moments(x).tolist() == [2.5, 6.25]
        x.view(-1)[place] = 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", ["rows", "columns", "every third"])
def test_what_is_not_finite_shows_in_both(dtype, view):
    for spoiler, expected in ((math.inf, [math.inf] * 2), (-math.inf, [math.inf] * 2)):
        x = gaussian(50, 300, dtype=dtype)
        x[41, 297] = spoiler
        assert moments(VIEWS[view](x)).tolist() == expected
        x[2, 0] = math.nan
        assert moments(VIEWS[view](x)).isnan().all()
    x = gaussian(50, 300, dtype=dtype)
    x[41, 297] = -math.nan
    assert moments(VIEWS[view](x)).isnan().all()


def test_an_empty_matrix_has_zeros():
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert moments(torch.empty(shape)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("view", ["rows", "columns", "every third", "one row"])
def test_the_number_of_threads_changes_no_bit(view):
    x = VIEWS[view](gaussian(300, 1200, seed=7))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(moments(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flushing_subnormals_on_this_thread_changes_nothing(dtype):
    x = (gaussian(40, 300) * (1e-6 if dtype == torch.float16 else 1e-40)).to(dtype)
    expected = moments(x)
    assert expected[0] > 0
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this machine cannot flush")
        found = moments(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


def test_a_tensor_whose_storage_was_freed_is_refused():
    x = gaussian(40, 160)
    x.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="no memory"):
        moments(x)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("-march=x86-64",), marks=pytest.mark.slow),
        pytest.param(("-march=haswell", "-fopenmp"), marks=pytest.mark.slow),
        ("-O0",),
    ],
)
def test_machines_without_wide_vectors_get_the_same_bits(flags, monkeypatch, tmp_path):
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this machine has no AVX2")
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(c_library, "EXTRA_FLAGS", (flags,))
    library, reason = tensor_statistics.LIBRARY.load()
    assert reason is None
    for dtype in DTYPES:
        x = gaussian(90, 700, seed=3, dtype=dtype)
        for view in VIEWS.values():
            assert torch.equal(moments(view(x)), moments(view(x), library=library))


# Where a compiler might go wrong: what is changed, and the check that notices.
FAULTS = [
    ("moments.c", "sums[1] += high", "sums[1] = high", "by rows"),
    ("moments.c", "+= other.squares", "+= 0", "by rows"),
    ("moments.c", "other.largest > parts", "other.largest < parts", "with an infinity"),
    ("codes.h", "memset(v + i * PITCH + cols, 0", "memset(v + i * PITCH + cols, 64", "by rows"),
    ("lanes.h", "out + i * out_pitch, a + i,", "out + i * out_pitch, a + (i & 6),", "by columns"),
    ("lanes.h", "bits) * 0x1p112f", "bits) * 0x1p111f", "float16 by rows"),
]


@pytest.mark.parametrize(("name", "right", "wrong", "noticed"), slow_except(FAULTS[:1], FAULTS))
def test_a_library_that_computes_wrongly_is_not_used(monkeypatch, tmp_path, name, right, wrong, noticed):
    spoil(monkeypatch, tmp_path, tensor_statistics, name, right, wrong)
    library, reason = tensor_statistics.LIBRARY.load()
    assert library is None
    assert re.search(rf"fails its self-check \(.*{noticed}.*\): set CC", reason), reason
