"""The mode that counts host reads finds them all. Layers have none: with meta tensors, a read is an error."""

import math

import numpy as np
import pytest
import torch
from host_reads import HostReads
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.layers.recipe import recipes
from megalowbit.optim.gradients.norm import GradientFacts, Measurement
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params

NUMBERS, NUMBER = torch.tensor([1.0, 2.0]), torch.tensor(1.0)
MASK, INDEX, COUNTS = NUMBERS > 1, torch.tensor(1), torch.tensor([1, 2])


def set_masked(value):
    NUMBERS.clone()[MASK] = value


READS = {
    "item": lambda: NUMBER.item(),
    "item of a parameter": lambda: nn.Parameter(NUMBER).item(),
    "tolist": lambda: NUMBERS.tolist(),
    "numpy": lambda: NUMBERS.numpy(),
    "np.asarray": lambda: np.asarray(NUMBERS),
    "np.from_dlpack": lambda: np.from_dlpack(NUMBERS),
    "cpu": lambda: NUMBERS.cpu(),
    "to": lambda: NUMBERS.to("cpu"),
    "to, with a dtype": lambda: NUMBERS.to(device="cpu", dtype=torch.float64),
    "type": lambda: NUMBERS.type("torch.FloatTensor"),
    "bool": lambda: bool(NUMBER),
    "if": lambda: 1 if NUMBER else 2,
    "float": lambda: float(NUMBER),
    "int": lambda: int(NUMBER),
    "complex": lambda: complex(NUMBER),
    "math": lambda: math.sqrt(NUMBER),
    "index of a list": lambda: [0, 1, 2][INDEX],
    "range": lambda: range(INDEX),
    "slice": lambda: NUMBERS[:INDEX],
    "element": lambda: NUMBERS[INDEX],
    "in": lambda: 1.0 in NUMBERS,
    "format": lambda: f"{NUMBER:.2f}",
    "str": lambda: str(NUMBERS),
    "_local_scalar_dense": lambda: torch.ops.aten._local_scalar_dense(NUMBER),
    "is_nonzero": lambda: torch.is_nonzero(NUMBER),
    "equal": lambda: torch.equal(NUMBERS, NUMBERS),
    "allclose": lambda: torch.allclose(NUMBERS, NUMBERS),
    "nonzero": lambda: NUMBERS.nonzero(),
    "argwhere": lambda: torch.argwhere(NUMBERS),
    "where of a mask": lambda: torch.where(MASK),
    "masked_select": lambda: torch.masked_select(NUMBERS, MASK),
    "a mask as an index": lambda: NUMBERS[MASK],
    "a byte mask": lambda: torch.ops.aten.index(NUMBERS, [MASK.byte()]),
    "writing under a mask": lambda: set_masked(3.0),
    "writing a tensor under a mask": lambda: set_masked(NUMBERS[:1]),
    "masked_fill with a tensor": lambda: NUMBERS.masked_fill(MASK, NUMBER),
    "index_fill with a tensor": lambda: NUMBERS.index_fill(0, COUNTS - 1, NUMBER),
    "repeat_interleave": lambda: torch.repeat_interleave(NUMBERS, COUNTS),
    "repeat_interleave of counts": lambda: torch.repeat_interleave(COUNTS),
    "unique": lambda: torch.unique(NUMBERS),
    "unique of rows": lambda: torch.unique(NUMBERS[None], dim=0),
    "unique_consecutive": lambda: torch.unique_consecutive(NUMBERS),
    "bincount": lambda: torch.bincount(COUNTS),
    "histc": lambda: torch.histc(NUMBERS),
    "arange": lambda: torch.arange(INDEX),
    "linspace": lambda: torch.linspace(NUMBER, NUMBER, 3),
    "a size": lambda: torch.zeros(INDEX),
    "full": lambda: torch.full((2,), NUMBER),
    "a factor of add": lambda: torch.add(NUMBERS, NUMBERS, alpha=NUMBER),
    "errors of linalg": lambda: torch.linalg.cholesky(torch.eye(2)),
    "singular values": lambda: torch.linalg.svdvals(torch.eye(2)),
    "tensor of tensors": lambda: torch.tensor([NUMBER, NUMBER]),
    "as_tensor": lambda: torch.as_tensor([NUMBER, NUMBER]),
    "as_tensor on the host": lambda: torch.as_tensor(NUMBERS, device="cpu"),
}
NO_READS = {
    "arithmetic": lambda: (NUMBERS * NUMBER).sum(),
    "facts about a tensor": lambda: (NUMBERS.shape, NUMBERS.device, NUMBERS.data_ptr(), len(NUMBERS)),
    "numbers as an index": lambda: NUMBERS[COUNTS - 1],
    "writing at numbers": lambda: NUMBERS.clone().index_put_((COUNTS - 1,), NUMBER),
    "where": lambda: torch.where(MASK, NUMBERS, NUMBER),
    "masked_fill": lambda: NUMBERS.masked_fill(MASK, 0.0),
    "repeat_interleave of known size": lambda: torch.repeat_interleave(NUMBERS, COUNTS, output_size=3),
    "fill with a tensor": lambda: torch.zeros(2).fill_(NUMBER),
    "another dtype": lambda: NUMBERS.to(torch.bfloat16),
    "like another tensor": lambda: NUMBERS.to(COUNTS),
    "to another tensor's device": lambda: NUMBERS.to(COUNTS.device),
    "a new tensor": lambda: torch.tensor([1.0, 2.0]),
    "cholesky_ex": lambda: torch.linalg.cholesky_ex(torch.eye(2)),
    "a copy on one device": lambda: torch.empty(2).copy_(NUMBERS),
}  # fmt: skip


@pytest.fixture
def reads(monkeypatch):
    return HostReads(monkeypatch)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_to_read_a_tensor_is_counted_once(reads, read):
    read()  # outside of the mode nothing is counted
    assert not reads.events
    with reads:
        read()
    assert len(reads.events) == 1
    assert reads.places == {"elsewhere": 1}


@pytest.mark.parametrize("other", NO_READS.values(), ids=NO_READS)
def test_what_reads_nothing_is_not_counted(reads, other):
    with reads:
        other()
    assert not reads.events


def test_reads_of_a_backward_are_counted(reads):
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            grad_output.tolist()
            return grad_output[grad_output > 0].sum() * grad_output

    x = torch.ones(3, requires_grad=True)
    with reads:
        Reading.apply(x).sum().backward()
    assert reads.events == ["tolist", "index"]


FROM_A_DEVICE = {
    "to": lambda x: x.to("cpu"),
    "cpu": lambda x: x.cpu(),
    "like a tensor of the host": lambda x: x.to(torch.empty(1)),
    "_to_copy": lambda x: torch.ops.aten._to_copy(x, device="cpu"),
    "copy_": lambda x: torch.empty(2).copy_(x),
    "copy_ that does not wait": lambda x: torch.empty(2).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("copy", FROM_A_DEVICE.values(), ids=FROM_A_DEVICE)
def test_a_copy_from_a_device_is_counted_once(reads, copy):
    with FakeTensorMode():  # a GPU's tensors, without a GPU
        x = torch.empty(2, device="cuda")
        with reads:
            copy(x)
            x * 2
    assert len(reads.events) == 1


def test_a_copy_to_a_device_is_not_counted(reads):
    with reads:
        x = NUMBERS.to("meta")
        x.copy_(NUMBERS)
        x * NUMBER
    assert not reads.events


# Meta tensors have no values, so torch itself rejects every read, also those that no list has. What it does
# not reject, the mode counts: writing under masks, and checks of linalg's errors.


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.nonzero,
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        torch.unique,
        torch.unique_consecutive,
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: torch.bincount(x.long()),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        torch.Tensor.tolist,
        lambda x: x.to("cpu"),
        lambda x: torch.empty(2).copy_(x),
        lambda x: bool(x[0]),
    ],
)
def test_reading_a_meta_tensor_is_an_error(read):
    with pytest.raises(RuntimeError):
        read(NUMBERS.to("meta"))


READING = {"metis-seed": ["_linalg_svd"]}  # of the output gradient, as in the published code


# recipes whose quantizers, splits and transforms are those of others
COMBINED = frozenset({
    "nvidia-nvfp4", "nvfp4-unbiased", "four-over-six", "four-over-six-rht", "nvfp4-unbiased-backward",
    "mxfp4-rht",
})  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=pytest.mark.slow if name in COMBINED else ())
        for name in recipes()
        if recipe_of(name).gemm == "bf16"
    ],
)
def test_forward_and_backward_of_every_recipe_read_nothing(reads, recipe):
    layer = BitLinear(64, 64, recipe=recipe, device="meta", dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    layer(x).sum().backward()  # the first use draws a seed, on the host
    with reads:
        layer(x).sum().backward()
    assert reads.events == READING.get(recipe, [])


def test_without_the_one_read_a_step_of_the_optimizer_reads_nothing(reads, monkeypatch):
    model = nn.Linear(64, 64).to("meta", torch.bfloat16)
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), bf16=True, clip_grad=1.0,
        log_num_zeros_in_grad=True, grad_scaler=None, named_parameters=model.named_parameters(),
    )  # fmt: skip
    model(torch.randn(8, 64, dtype=torch.bfloat16, device="meta")).float().sum().backward()
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        optimizer.step()
    facts = GradientFacts(found_inf=False, norm=2.0, num_zeros=3)
    monkeypatch.setattr(Measurement, "read", lambda self, figures=(): (facts, [[] for _ in figures]))
    for _ in range(2):
        with reads:
            report = optimizer.step()
        assert report.grad_norm == 2.0
        assert not reads.events
