import logging
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from megalowbit.errors import UserError
from megalowbit.formats.block_format import MIXED_INT8, MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.formats.element import INT8, TERNARY
from megalowbit.quantize import backends, reference
from megalowbit.quantize.cpu import fp32_scales as kernels_cpu_8bit
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest, Encoding
from megalowbit.quantize.names import quantizer, quantizer_names
from megalowbit.quantize.philox import RandomKey

ENCODINGS = [
    Encoding(format=NVFP4),
    Encoding(format=NVFP4, is_stochastic=True, scale_rounding="up", q_scalar=1.25),
    Encoding(format=NVFP4_TILED, is_stochastic=True),
    Encoding(format=MXFP4, scale_rounding="down"),
    Encoding(format=NVFP4, four_over_six=True),
    Encoding(format=BlockFormat(element=INT8, block=None, scale="fp32"), is_stochastic=True),
    Encoding(format=MIXED_INT8),
]
ENCODING_NAMES = ["nearest", "stochastic", "tiled", "mxfp4", "four_over_six", "int8", "int8 or e5m2"]
TERNARY_BLOCKS = BlockFormat(element=TERNARY, block=(1, 16), scale="fp32")


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch):
    monkeypatch.delenv(backends.BACKEND_VARIABLE, raising=False)
    backends._backend_for.cache_clear()
    yield
    backends._backend_for.cache_clear()


def matrix(rows=37, cols=75):
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    x = torch.randn(rows, cols, generator=generator)
    x[0, 0], x[-1, -1], x[rows // 2, 3] = float("nan"), -0.0, 1e-41
    return x


def bits(tensor):
    """All bits, signs of zeros too; but one NaN is as good as another."""
    if tensor.dtype.itemsize > 1 and tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=ENCODING_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_device_s_backend_gives_the_bits_of_the_reference(encoding, dtype):
    x = matrix().to(dtype)
    arguments = {
        "random_key": RandomKey(2**63 + 11, 2**40 + 3),
        "operand_dtype": torch.bfloat16,
        "with_counts": True,
    }
    ours, theirs = (
        backends.encode(EncodeRequest(x, encoding, **arguments)),
        reference.encode(EncodeRequest(x, encoding, **arguments)),
    )
    for name in ("codes", "scales", "operand", "tensor_scale", "counts"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype
            assert bits(a) == bits(b), name
    torch.testing.assert_close(ours.error, theirs.error, rtol=1e-6, atol=0)
    for transpose in (False, True):
        packed = (ours.codes, ours.scales, encoding.format, *x.shape)
        decoded = [
            path.decode(DecodeRequest(*packed, torch.bfloat16, transpose=transpose))
            for path in (backends, reference)
        ]
        assert bits(decoded[0]) == bits(decoded[1])


def test_a_format_without_a_fast_path_goes_through_plain_torch():
    encoding = Encoding(format=TERNARY_BLOCKS)
    x = matrix()
    assert torch.equal(
        backends.encode(EncodeRequest(x, encoding)).codes, reference.encode(EncodeRequest(x, encoding)).codes
    )


def test_a_missing_kernel_is_logged_once_for_each_format_and_dtype(caplog):
    if backends.backend_of(matrix()) == "torch":
        pytest.skip("no kernel here")
    backends._say_uncovered.cache_clear()
    with caplog.at_level(logging.INFO, logger="megalowbit"):
        for _ in range(3):
            encoded = backends.encode(EncodeRequest(matrix(), Encoding(format=TERNARY_BLOCKS)))
            backends.decode(
                DecodeRequest(encoded.codes, encoded.scales, TERNARY_BLOCKS, 37, 75, torch.float32)
            )
            backends.encode(EncodeRequest(matrix().double(), Encoding(format=NVFP4)))
            backends.encode(EncodeRequest(matrix(), Encoding(format=NVFP4)))
    said = [record for record in caplog.records if "no kernel covers it" in record.getMessage()]
    assert {record.levelname for record in said} == {"INFO"}
    assert [record.getMessage().partition(" on cpu")[0] for record in said] == [
        "quantising ternary under fp32 scales for 1 × 16, torch.float32",
        "decoding ternary under fp32 scales for 1 × 16, torch.float32",
        "quantising e2m1 under e4m3 scales for 1 × 16, torch.float64",
    ]


def test_fake_tensors_go_through_plain_torch():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(5, 40)
        assert backends.backend_of(x) == "torch"
        assert backends.encode(EncodeRequest(x, Encoding(format=NVFP4))).codes.shape == (5, 24)


@pytest.mark.parametrize("name", quantizer_names())
def test_fake_tensors_get_results_of_the_same_sizes(name, monkeypatch):
    """Estimates of memory count storages, so these must be as large as those of the operations."""

    def sizes():
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            made = quantizer(name).quantize(
                torch.randn(5, 43, dtype=torch.bfloat16), with_counts=True, operand_dtype=torch.bfloat16
            )
        tensors = [*made.to_parts()[0], made.counts, made.error, getattr(made, "ready_operand", None)]
        return [
            None if each is None else (each.shape, each.dtype, each.stride(), each.untyped_storage().nbytes())
            for each in tensors
        ]

    quick = sizes()
    monkeypatch.setattr(backends, "_has_no_values", lambda x: False)
    assert quick == sizes()


def test_traced_fake_tensors_keep_their_operations():
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = make_fx(lambda x: backends.encode(EncodeRequest(x, Encoding(format=NVFP4))).codes)(
            torch.randn(5, 40)
        )
    assert len(traced.graph.nodes) > 20


def test_fake_tensors_outside_their_mode_make_no_real_ones():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(5, 40)
    assert type(backends.encode(EncodeRequest(x, Encoding(format=NVFP4))).codes) is FakeTensor


def test_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="megalowbit"):
        for _ in range(3):
            backends.encode(EncodeRequest(matrix(), Encoding(format=NVFP4)))
    said = [record.getMessage() for record in caplog.records if "quantising on cpu" in record.getMessage()]
    assert len(said) == 1
    assert "C kernel" in said[0] or "plain torch" in said[0]


def test_a_backend_can_be_forced(monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "torch")
    assert backends.backend_of(matrix()) == "torch"


def test_an_unknown_backend_is_an_error_that_names_the_nearest(monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "tritn")
    with pytest.raises(UserError, match=r"unknown MEGALOWBIT_BACKEND 'tritn': did you mean 'triton'"):
        backends.backend_of(matrix())


def test_a_forced_backend_that_is_unavailable_is_an_error(monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="MEGALOWBIT_BACKEND=triton cannot be used on cpu: it runs on CUDA"):
        backends.backend_of(matrix())


@pytest.fixture
def no_8bit_library(monkeypatch):
    backends._kernels_8bit.cache_clear()
    monkeypatch.setattr(kernels_cpu_8bit.LIBRARY, "_loaded", (None, "it fails its self-check: set CC"))
    yield
    backends._kernels_8bit.cache_clear()


def test_formats_without_their_library_use_plain_torch_and_log_it_once(no_8bit_library, caplog):
    if backends.backend_of(matrix()) != "c":
        pytest.skip("no C compiler")
    encoding = ENCODINGS[ENCODING_NAMES.index("int8")]
    with caplog.at_level(logging.WARNING, logger="megalowbit"):
        for _ in range(2):
            codes = backends.encode(EncodeRequest(matrix(), encoding)).codes
    assert torch.equal(codes, reference.encode(EncodeRequest(matrix(), encoding)).codes)
    (record,) = caplog.records
    assert record.getMessage().endswith("which is slow: it fails its self-check: set CC")


def test_formats_without_their_library_are_an_error_if_the_backend_is_forced(no_8bit_library, monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "c")
    with pytest.raises(UserError, match="MEGALOWBIT_BACKEND=c cannot be used for 8-bit formats: it fails"):
        backends.encode(EncodeRequest(matrix(), ENCODINGS[ENCODING_NAMES.index("int8")]))


SCRIPT = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
from megalowbit.quantize import backends, reference
from megalowbit.quantize.encoding import EncodeRequest, Encoding
from megalowbit.formats.block_format import NVFP4
x = torch.linspace(-3, 5, 640).view(8, 80)
assert backends.backend_of(x) == "torch"
request = EncodeRequest(x, Encoding(format=NVFP4))
assert torch.equal(backends.encode(request).codes, reference.encode(request).codes)
"""


def test_without_a_compiler_plain_torch_is_used_and_logged_once(tmp_path):
    environment = {"CC": "/nonexistent/cc", "MEGALOWBIT_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "plain torch" in line]
    assert len(lines) == 1, done.stdout
    assert "/nonexistent/cc" in lines[0]


NVFP4_NEAREST = Encoding(format=NVFP4)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrapped = torch.utils._pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return function(*unwrapped[0], **unwrapped[1])


class Recording(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_ordinary_tensors_and_none_are_plain():
    assert backends.is_plain(torch.ones(2), torch.nn.Parameter(torch.ones(2)), None, torch.ones(2, 2).t())


@pytest.mark.parametrize(
    "tensor",
    [
        Wrapper(torch.ones(2, 16)),
        torch._efficientzerotensor((2, 16)),
        torch.ones(2, 16).to_sparse(),
        torch._to_functional_tensor(torch.ones(2, 16)),
    ],
    ids=["wrapper", "zeros", "sparse", "functional"],
)
def test_tensors_without_memory_of_their_own_are_not_plain(tensor):
    assert not backends.is_plain(torch.ones(2), tensor)
    assert backends.backend_of(torch.ones(2), tensor) == "torch"


def test_nothing_is_plain_where_operations_are_recorded():
    x, seen = torch.ones(2, 16), []

    def record_is_plain(y):
        seen.append(backends.is_plain(y) or backends.is_plain(x))
        return y

    contexts = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    for context in contexts:
        with context, Recording():
            record_is_plain(x)
    make_fx(record_is_plain)(x)
    torch.func.functionalize(record_is_plain)(x)
    torch.func.vmap(record_is_plain)(x)
    torch.jit.trace(record_is_plain, x, check_trace=False)
    assert len(seen) == 6
    assert not any(seen)


def test_a_mode_that_watches_does_not_change_the_backend(monkeypatch):
    x, requests = matrix(), []
    request = EncodeRequest(x, NVFP4_NEAREST, operand_dtype=torch.float32)
    expected = backends.encode(request)
    monkeypatch.setattr(reference, "encode", requests.append)
    with Recording():
        assert backends.is_plain(x)
        assert backends.backend_of(x) == "c"
        found = backends.encode(request)
    assert not requests
    assert [bits(each) for each in found[:4]] == [bits(each) for each in expected[:4]]


@pytest.mark.parametrize(
    "make", [Wrapper, lambda x: torch._efficientzerotensor(x.shape)], ids=["wrapper", "zeros"]
)
def test_tensors_without_memory_use_plain_torch(make):
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    made = make(x)
    values = made.inner if isinstance(made, Wrapper) else torch.zeros(3, 40)
    ours, theirs = (
        backends.encode(EncodeRequest(made, NVFP4_NEAREST)),
        reference.encode(EncodeRequest(values, NVFP4_NEAREST)),
    )
    assert bits(ours.codes) == bits(theirs.codes)
    amax = torch._efficientzerotensor(())
    ours = backends.encode(EncodeRequest(x, NVFP4_NEAREST, tensor_amax=amax))
    assert bits(ours.codes) == bits(
        reference.encode(EncodeRequest(x, NVFP4_NEAREST, tensor_amax=torch.zeros(()))).codes
    )
    decoded = backends.decode(
        DecodeRequest(Wrapper(ours.codes), Wrapper(ours.scales), NVFP4, 3, 40, torch.float32)
    )
    assert bits(decoded) == bits(
        reference.decode(DecodeRequest(ours.codes, ours.scales, NVFP4, 3, 40, torch.float32))
    )


def test_a_trace_holds_the_whole_computation():
    def quantised(x):
        return backends.encode(EncodeRequest(x, NVFP4_NEAREST, operand_dtype=torch.float32)).operand

    first, second = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(2))
    for traced in (make_fx(quantised)(first), torch.func.functionalize(quantised)):
        assert torch.equal(traced(second), quantised(second))


@pytest.mark.parametrize("format", [NVFP4, MXFP4, NVFP4_TILED])
def test_parts_that_do_not_belong_to_the_matrix_are_refused(format):
    encoded = reference.encode(EncodeRequest(matrix(32, 64), Encoding(format=format, scale_rounding="up")))
    codes, scales = encoded.codes, encoded.scales
    for bad_codes, bad_scales, rows, message in (
        (codes, scales, 33, "codes of a 33 × 64"),
        (codes[:, :-1], scales, 32, "codes of a 32 × 64"),
        (codes.view(torch.int8), scales, 32, "codes of a 32 × 64"),
        (codes, scales[:1, :1], 32, "scales of a 32 × 64"),
        (codes, scales.view(torch.uint8), 32, "scales of a 32 × 64"),
        (codes, scales.to("meta"), 32, "scales on meta"),
    ):
        with pytest.raises(UserError, match=message):
            backends.decode(DecodeRequest(bad_codes, bad_scales, format, rows, 64, torch.bfloat16))
