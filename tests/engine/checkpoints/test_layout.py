import pytest
import torch

from megalowbit.engine.checkpoints.layout import describe_layout, named_parameters, tied_names
from megalowbit.engine.initialize import initialize


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 3)
        self.body = torch.nn.Linear(3, 3, bias=False)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)))


@pytest.fixture(params=[0, 1, 2, 3])
def engine(request):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": request.param},
        "megalowbit": {"precision": "bf16"},
    }
    return initialize(model=Tied(), config=config)[0]


def test_tied_parameters_are_listed_once_under_their_first_name(engine):
    layout = describe_layout(engine)
    assert [each.name for each in layout.slices[0].parameters] == ["embedding.weight", "body.weight"]
    assert layout.tied == tied_names(engine) == {"head.weight": "embedding.weight"}
    assert list(named_parameters(engine)) == ["embedding.weight", "body.weight"]
    assert {each.dtype for each in layout.slices[0].parameters} == {"bfloat16"}
