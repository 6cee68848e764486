import torch

from megalowbit.pretrain.saved_tensors import saved_for_backward


def test_a_storage_counts_once_and_parameters_do_not():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, input_ids, labels):
            x = self.weight.exp()  # kept as its own result, and by the product
            return type("Output", (), {"loss": (x * x).sum()})

    assert saved_for_backward(Model(), 1, 4) == 8 * 4
