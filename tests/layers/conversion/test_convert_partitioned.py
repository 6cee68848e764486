import pytest
import torch

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import refuse_partitioned


def model():
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))


def test_a_model_with_full_parameters_passes():
    refuse_partitioned(model())


def test_a_partitioned_parameter_is_rejected_before_any_layer_is_converted():
    net = model()
    net[1].weight.data = torch.zeros(0)  # as DeepSpeed leaves it
    net[1].weight.ds_id = 0
    for refused in (refuse_partitioned, mlb.convert):
        message = r"^parameter 1\.weight is already partitioned, .*outside of zero\.Init"
        with pytest.raises(UserError, match=message):
            refused(net)
    assert type(net[0]) is torch.nn.Linear
