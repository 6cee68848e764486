import pytest
import torch
from torch.nn import Parameter

from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.layout import make_parameters_contiguous
from megalowbit.errors import UserError


class Model(torch.nn.Module):
    """A linear layer and one more parameter."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.extra = make(self.layer.weight)

    def forward(self, x):
        extra = self.extra.float()
        return self.layer(x.to(self.layer.weight.dtype)).float().sum() + (extra * extra).sum()


def frozen(values):
    return Parameter(values, requires_grad=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: Parameter(torch.tensor(1.5)), "has no dimension"),
        (lambda _: frozen(torch.tensor(1.5)), "has no dimension"),
        (lambda _: Parameter(torch.ones(3, dtype=torch.complex64)), "is complex64, which cannot be trained"),
        (
            lambda weight: Parameter(weight.data.t()),
            "is not contiguous and shares its memory with layer.weight",
        ),
        (lambda _: Parameter(torch.ones(1).expand(4)), "repeats its elements"),
        (lambda _: Parameter(torch.ones(2, device="meta")), "is on the meta device"),
        (lambda _: Parameter(torch.eye(2).to_sparse()), "is sparse_coo"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_parameter_that_deepspeed_does_not_support_is_rejected_by_name(make, message, stage):
    with pytest.raises(UserError) as caught:
        make_parameters_contiguous(Model(make), stage=stage)
    assert str(caught.value).startswith(f"parameter extra {message}")
    assert ": " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda _: frozen(torch.arange(4)), lambda _: Parameter(torch.zeros(0, 4))])
def test_a_parameter_that_cannot_be_partitioned_is_rejected_only_at_stage_3(make):
    for stage in (0, 1, 2):
        make_parameters_contiguous(Model(make), stage=stage)
    with pytest.raises(UserError, match=r"^parameter extra .* zero_optimization\.stage 3 cannot partition: "):
        make_parameters_contiguous(Model(make), stage=3)


def test_a_rejected_model_is_unchanged():
    model = Model(lambda _: Parameter(torch.ones(3, 4).t()))
    model.other = Parameter(torch.ones(1).expand(4))
    with pytest.raises(UserError, match="parameter other"):
        make_parameters_contiguous(model, stage=0)
    assert not model.extra.is_contiguous()


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_strided_parameters_train_like_contiguous_ones(stage):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": "fp32"},
    }
    losses = []
    values = torch.arange(12.0).view(3, 4)
    for is_strided in (True, False):
        extra = Parameter(values.clone().t() if is_strided else values.t().contiguous())
        assert extra.is_contiguous() != is_strided
        engine, *_ = initialize(model=Model(lambda _, extra=extra: extra), config=config)
        assert engine.module.extra is extra
        losses.append([])
        for _ in range(3):
            loss = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]


def test_parameters_that_share_a_flat_storage_without_overlap_pass():
    flat = torch.ones(8)
    model = Model(lambda _: Parameter(flat[:4]))
    model.other = Parameter(flat[4:])
    make_parameters_contiguous(model, stage=0)
    assert model.extra.data_ptr() == flat.data_ptr()
