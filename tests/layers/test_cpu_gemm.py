"""Products of bf16 layers on a CPU: which dtype is chosen, and that both give the documented numbers."""

import json
import logging
import threading
import time
from functools import partial

import pytest
import torch
from torch.nn import functional

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers import cpu_gemm
from megalowbit.layers.matmul.gemms import add_product, gemm_dtype, multiply
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.quantize.names import quantizer

NEAREST = {"base": "nvfp4", "name": "nearest", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
BF16 = torch.bfloat16
PRODUCTS_IN_A_ROW = 8


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A machine and a process that have not chosen yet; the folder of the kept choice."""
    monkeypatch.delenv(cpu_gemm.VARIABLE)
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    cpu_gemm._of_process.cache_clear()
    yield tmp_path
    cpu_gemm._of_process.cache_clear()


def measured(monkeypatch, bf16, fp32):
    calls = []
    monkeypatch.setattr(cpu_gemm, "measure", lambda: calls.append(1) or {"bf16": bf16, "fp32": fp32})
    return calls


@pytest.mark.parametrize(
    ("times", "expected"), [((10.0, 5.0), "fp32"), ((5.0, 10.0), "bf16"), ((9, 8), "bf16")]
)
def test_the_faster_dtype_is_chosen_if_it_is_clearly_faster(fresh, monkeypatch, caplog, times, expected):
    measured(monkeypatch, *times)
    with caplog.at_level(logging.INFO, "megalowbit"):
        assert cpu_gemm.cpu_gemm() == expected
        assert cpu_gemm.cpu_gemm() == expected
    (line,) = [record.getMessage() for record in caplog.records if "multiply in" in record.getMessage()]
    assert line.startswith(f"bf16 models multiply in {expected} on this CPU")
    assert cpu_gemm.VARIABLE in line


def test_a_machine_is_measured_once(fresh, monkeypatch):
    calls = measured(monkeypatch, 10.0, 5.0)
    assert cpu_gemm.cpu_gemm() == "fp32"
    cpu_gemm._of_process.cache_clear()  # another process
    measured(monkeypatch, 5.0, 10.0)  # a measurement that turns out differently
    assert cpu_gemm.cpu_gemm() == "fp32"
    assert len(calls) == 1
    (path,) = fresh.glob("cpu-gemm-*.json")
    assert json.loads(path.read_text())["gemm"] == "fp32"


@pytest.mark.parametrize("content", ["", "{", '{"gemm": "int3"}', '{"gemm": ["fp32"]}', "[]", "{}"])
def test_a_damaged_file_is_measured_again(fresh, monkeypatch, content):
    measured(monkeypatch, 10.0, 5.0)
    cpu_gemm.cpu_gemm()
    (path,) = fresh.glob("cpu-gemm-*.json")
    path.write_text(content)
    cpu_gemm._of_process.cache_clear()
    assert cpu_gemm.cpu_gemm() == "fp32"
    assert json.loads(path.read_text())["gemm"] == "fp32"


def test_without_a_cache_the_process_measures(fresh, monkeypatch):
    fresh.chmod(0o777)  # others may write there
    calls = measured(monkeypatch, 10.0, 5.0)
    assert cpu_gemm.cpu_gemm() == cpu_gemm.cpu_gemm() == "fp32"
    assert len(calls) == 1
    assert not list(fresh.iterdir())


def test_the_measurement_takes_both_dtypes_and_no_random_numbers(fresh):
    before = torch.get_rng_state()
    times = cpu_gemm.measure()
    assert times.keys() == {"bf16", "fp32"}
    assert all(0 < each < 1e4 for each in times.values())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_variable_has_priority_over_everything(fresh, monkeypatch, caplog):
    calls = measured(monkeypatch, 10.0, 5.0)
    monkeypatch.setenv(cpu_gemm.VARIABLE, "bf16")
    assert cpu_gemm.cpu_gemm() == "bf16"
    assert not calls
    cpu_gemm.use_cpu_gemm("fp32")
    assert cpu_gemm.cpu_gemm() == "bf16"
    assert "this run multiplied in fp32 so far" in caplog.text
    monkeypatch.setenv(cpu_gemm.VARIABLE, "fp8")
    with pytest.raises(UserError, match=r"MEGALOWBIT_CPU_GEMM.*fp8"):
        cpu_gemm.cpu_gemm()


def test_the_choice_of_a_checkpoint_replaces_that_of_the_machine(fresh, monkeypatch):
    measured(monkeypatch, 10.0, 5.0)
    assert cpu_gemm.cpu_gemm() == "fp32"
    cpu_gemm.use_cpu_gemm("bf16")
    assert cpu_gemm.cpu_gemm() == "bf16"
    with pytest.raises(UserError, match="fp3"):
        cpu_gemm.use_cpu_gemm("fp3")


def test_only_bf16_layers_on_a_cpu_follow_the_choice(monkeypatch):
    monkeypatch.setenv(cpu_gemm.VARIABLE, "fp32")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert gemm_dtype([BF16, BF16], BF16, cpu) == torch.float32
    assert gemm_dtype([BF16, BF16], BF16, cuda) == BF16
    assert gemm_dtype([BF16, BF16], torch.float64, cpu) == torch.float64


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_fp32_products_of_bf16_layers_are_rounded_once(monkeypatch, has_bias, out):
    monkeypatch.setenv(cpu_gemm.VARIABLE, "fp32")
    generator = torch.Generator().manual_seed(3)
    left, right = (
        quantizer("nvfp4e2m1bnosr").quantize(torch.randn(40, 70, generator=generator).to(BF16))
        for _ in range(2)
    )
    bias = torch.randn(40, generator=generator) if has_bias else None
    got = multiply(left, right, transpose_right=True, compute_dtype=BF16, out_dtype=out, bias=bias)
    a, b = (each.operand(torch.float64) for each in (left, right))
    expected = a @ b.t() + (bias.double() if has_bias else 0)
    allowance = (2.0**-7.99 if out == BF16 else 2.0**-22) * expected.abs() + 2e-6 * (a.abs() @ b.abs().t())
    assert got.dtype == out
    assert ((got.double() - expected).abs() <= allowance).all()


@pytest.mark.parametrize("name", ["fp32", "int8e5m2b"])
def test_operands_with_more_digits_are_rounded_to_bf16_first(monkeypatch, name):
    """Those of a bf16 layer that autocast gives fp32 tensors, and of mixed blocks."""
    monkeypatch.setenv(cpu_gemm.VARIABLE, "fp32")
    left, right = (
        quantizer(name).quantize(torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)))
        for rows in (40, 24)
    )
    a, b = (each.operand(torch.float32).to(BF16).double() for each in (left, right))
    assert not torch.equal(a, left.operand(torch.float32).double())
    got = multiply(left, right, transpose_right=True, compute_dtype=BF16, out_dtype=torch.float32)
    total = torch.zeros(40, 24)
    assert add_product(total, left, right, transpose_right=True, compute_dtype=BF16, factor=1.0)
    for found in (got, total):
        assert ((found.double() - a @ b.t()).abs() <= 2e-6 * (a.abs() @ b.abs().t())).all()


@pytest.mark.parametrize("split", [None, {"rank": 4}, {"method": "mean"}])
def test_autocast_takes_an_fp32_weight_that_is_not_quantised_as_one_of_bf16(monkeypatch, split):
    monkeypatch.setenv(cpu_gemm.VARIABLE, "fp32")
    unquantised = {"q_forward_weight": "fp32", "q_backward_weight": "fp32"}
    recipe = {**NEAREST, **unquantised, "split_input": split, "split_grad_output": split}
    found = []
    for is_rounded_before in (False, True):
        torch.manual_seed(0)
        layer, x = mlb.BitLinear(48, 32, recipe=recipe), torch.randn(64, 48).requires_grad_()
        if is_rounded_before:
            layer.weight.data = layer.weight.data.to(BF16).float()
        with torch.autocast("cpu", BF16):
            output = layer(x)
        output.backward(torch.ones_like(output))
        found.append((output.detach(), x.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "recipe",
    [
        NEAREST,
        {**NEAREST, "split_grad_output": {"rank": 4}},
        {**NEAREST, "split_input": {"rank": 4}, "split_grad_output": {"method": "mean"}},
        {**NEAREST, "parameter_split": {"rank": 4}},
    ],
    ids=str,
)
def test_a_layer_gives_the_same_numbers_in_both_dtypes_up_to_rounding(monkeypatch, recipe):
    found = {}
    for name in cpu_gemm.DTYPES:
        monkeypatch.setenv(cpu_gemm.VARIABLE, name)
        torch.manual_seed(0)
        layer = mlb.BitLinear(48, 32, recipe=recipe, dtype=BF16)
        x = torch.randn(64, 48).to(BF16).requires_grad_()
        output = layer(x)
        output.backward(torch.randn(64, 32).to(BF16))
        found[name] = [output.detach(), x.grad, *(each.grad for each in layer.parameters())]
    for one, two in zip(*found.values(), strict=True):
        if one is None and two is None:  # factors of a weight that is not split yet
            continue
        assert one.dtype == two.dtype == BF16
        assert (one.double() - two.double()).abs().max() <= 2.0**-6 * two.double().abs().max()


def test_weight_gradients_are_added_in_fp32_where_products_are_fp32(monkeypatch):
    for name, is_rounded in (("bf16", True), ("fp32", False)):
        monkeypatch.setenv(cpu_gemm.VARIABLE, name)
        torch.manual_seed(0)
        layer = mlb.BitLinear(48, 32, recipe=NEAREST, dtype=BF16)
        GradBuffer(layer.parameters())
        layer(torch.randn(64, 48).to(BF16)).float().sum().backward()
        sums = layer.weight.main_grad
        assert torch.equal(sums, sums.to(BF16).float()) == is_rounded


@pytest.fixture
def replaced(monkeypatch):
    """Torch's operators follow the choice, fp32; afterwards they are torch's own again."""
    cpu_gemm._of_process.cache_clear()
    monkeypatch.setenv(cpu_gemm.VARIABLE, "fp32")
    cpu_gemm.let_torch_follow()
    yield
    cpu_gemm._of_process.cache_clear()


@pytest.fixture
def widened(monkeypatch):
    """The shapes of bf16 tensors that were copied to fp32. The bits of a product do not always tell."""
    found = []

    def wide(value):
        if isinstance(value, torch.Tensor) and value.dtype == BF16:
            found.append(tuple(value.shape))
            return value.float()
        return value

    monkeypatch.setattr(cpu_gemm, "_wide", wide)
    return found


def bf16_tensors(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]


PRODUCTS = {
    "mm": (torch.mm, [(40, 70), (70, 24)]),
    "addmm": (partial(torch.addmm, beta=0.5, alpha=2.0), [(24,), (40, 70), (70, 24)]),
    "bmm": (torch.bmm, [(3, 40, 70), (3, 70, 24)]),
    "baddbmm": (partial(torch.baddbmm, beta=0.5, alpha=2.0), [(3, 40, 24), (3, 40, 70), (3, 70, 24)]),
    "linear": (functional.linear, [(2, 20, 70), (24, 70), (24,)]),
    "transposed": (lambda a, b: a.t() @ b.t(), [(70, 40), (24, 70)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_torch_are_those_of_fp32_rounded_once(replaced, widened, name):
    multiply, shapes = PRODUCTS[name]
    operands = bf16_tensors(*shapes)
    got = multiply(*operands)
    assert len(widened) == len(shapes)
    cpu_gemm._of_process.cache_clear()  # torch's own operators
    own, wide = multiply(*operands), multiply(*(each.float() for each in operands))
    assert len(widened) == len(shapes)
    assert (got.dtype, got.shape, got.stride()) == (BF16, own.shape, own.stride())
    assert torch.equal(got, wide.to(BF16))
    exact = multiply(*(each.double() for each in operands))
    assert ((got.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()


def attention_and_gradients(dtype, *, is_causal, has_mask):
    """Of fused attention, at operands whose numbers are bf16."""
    query, key, value, grad = (each.to(dtype) for each in bf16_tensors(*4 * [(2, 3, 16, 8)]))
    mask = bf16_tensors((16, 16))[0].to(dtype) if has_mask else None
    inputs = [each.requires_grad_() for each in (query, key, value)]
    output = functional.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=is_causal)
    return output, *torch.autograd.grad(output, inputs, grad)


@pytest.mark.parametrize(("is_causal", "has_mask"), [(True, False), (False, False), (False, True)])
def test_attention_and_its_gradients_are_as_near_to_fp64_as_bf16_allows(
    replaced, widened, is_causal, has_mask
):
    settings = {"is_causal": is_causal, "has_mask": has_mask}
    found = attention_and_gradients(BF16, **settings)
    assert len(widened) == 3 + 5 + 2 * has_mask  # forward, backward, the mask in both
    exact = attention_and_gradients(torch.float64, **settings)
    cpu_gemm._of_process.cache_clear()
    for got, want, own in zip(found, exact, attention_and_gradients(BF16, **settings), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (BF16, own.shape, own.stride())
        assert (got.double() - want).norm() <= 2.0**-8 * want.norm()


def test_attention_is_that_of_fp32_rounded_once(replaced):
    query, key, value = bf16_tensors(*3 * [(2, 3, 16, 8)])
    got = functional.scaled_dot_product_attention(query, key, value)
    wide = functional.scaled_dot_product_attention(query.float(), key.float(), value.float())
    assert torch.equal(got, wide.to(BF16))


def test_gradients_of_a_linear_layer_are_those_of_fp32_rounded_once(replaced, widened):
    x, weight, grad = bf16_tensors((40, 70), (24, 70), (40, 24))
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    gradients = torch.autograd.grad(functional.linear(*inputs), inputs, grad)
    assert len(widened) == 3 * 2
    wide = [grad.float() @ weight.float(), grad.float().t() @ x.float()]
    for got, want in zip(gradients, wide, strict=True):
        assert torch.equal(got, want.to(BF16))


def test_torch_multiplies_in_bf16_unless_the_choice_is_fp32(monkeypatch, fresh, widened):
    a, b = bf16_tensors((40, 70), (70, 24))

    def is_fp32():
        widened.clear()
        a @ b
        return bool(widened)

    measured(monkeypatch, 10.0, 5.0)
    cpu_gemm.use_cpu_gemm(cpu_gemm.cpu_gemm())
    assert not is_fp32()  # an engine in fp32
    cpu_gemm.let_torch_follow()
    assert is_fp32()
    cpu_gemm.use_cpu_gemm("bf16")  # a checkpoint of another machine
    assert not is_fp32()
    cpu_gemm.use_cpu_gemm("fp32")
    assert is_fp32()
    monkeypatch.setenv(cpu_gemm.VARIABLE, "bf16")
    assert not is_fp32()


def test_a_later_choice_of_fp32_replaces_the_operators(monkeypatch, fresh, widened):
    measured(monkeypatch, 5.0, 10.0)
    cpu_gemm.let_torch_follow()
    a, b = bf16_tensors((40, 70), (70, 24))
    a @ b
    assert not widened
    cpu_gemm.use_cpu_gemm("fp32")
    a @ b
    assert widened == [(40, 70), (70, 24)]


def test_the_choice_alone_leaves_torch_as_it_is(monkeypatch, fresh, widened):
    """A layer in a user's own loop measures, and changes nothing outside itself."""
    measured(monkeypatch, 10.0, 5.0)
    mlb.BitLinear(48, 32, recipe=NEAREST, dtype=BF16)(torch.ones(64, 48, dtype=BF16))
    assert cpu_gemm.cpu_gemm() == "fp32"
    a, b = bf16_tensors((40, 70), (70, 24))
    a @ b
    assert not widened


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_products_of_other_dtypes_are_torchs_own(replaced, dtype):
    a, b = ((10 * each).to(dtype) for each in bf16_tensors((40, 70), (70, 24)))
    c = torch.ones(24, dtype=dtype)
    got = [a @ b, torch.addmm(c, a, b, beta=2, alpha=3)]
    cpu_gemm._of_process.cache_clear()
    for one, other in zip(got, [a @ b, torch.addmm(c, a, b, beta=2, alpha=3)], strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "columns", "expected"), [(7, 24, 0), (8, 8, 2), (40, 7, 0), (0, 24, 0)])
def test_few_rows_or_columns_are_multiplied_in_bf16(replaced, widened, rows, columns, expected):
    """A step of generation would copy all weights."""
    a, b = bf16_tensors((rows, 70), (70, columns))
    assert (a @ b).shape == (rows, columns)
    assert len(widened) == expected


@pytest.mark.parametrize(
    ("operator", "shapes", "dtypes"),
    [
        ("mm", [(8, 8), (8, 8)], [BF16, torch.float32]),
        ("mm", [(8, 8), (9, 8)], [BF16, BF16]),
        ("mm", [(8,), (8, 8)], [BF16, BF16]),
        ("mm", [(8, 8), (8,)], [BF16, BF16]),
        ("bmm", [(8, 8), (1, 8, 8)], [BF16, BF16]),
        ("addmm", [(9,), (8, 8), (8, 8)], [BF16, BF16, BF16]),
    ],
    ids=str,
)
def test_wrong_operands_are_the_same_error_as_ever(replaced, operator, shapes, dtypes):
    operands = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def message():
        with pytest.raises(RuntimeError) as failure:
            getattr(torch, operator)(*operands)
        return str(failure.value)

    found = message()
    cpu_gemm._of_process.cache_clear()
    assert found == message()


def test_other_threads_run_during_a_product(replaced):
    """A heartbeat must not stop because a product takes long."""
    a, is_finished, ticks = torch.ones(1000, 1000), threading.Event(), []

    def tick():
        while not is_finished.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        products = []
        for operand in (a, a.to(BF16)):
            start = time.perf_counter()
            for _ in range(PRODUCTS_IN_A_ROW):
                operand @ operand
            products.append((start, time.perf_counter()))
    finally:
        is_finished.set()
        thread.join()
    for start, end in products:
        # a product that keeps other threads waiting allows one or two
        assert sum(start < each < end for each in ticks) > 4 * PRODUCTS_IN_A_ROW


def test_a_traced_model_has_the_bits_of_eager(replaced):
    a, b = bf16_tensors((40, 70), (70, 24))
    assert torch.equal(torch.compile(lambda: (a @ b).relu(), backend="aot_eager")(), (a @ b).relu())
