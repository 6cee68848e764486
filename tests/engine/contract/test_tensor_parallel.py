"""AutoTP, as `engine.tensor_parallel` calls it."""

import pytest
import torch
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups

from megalowbit.engine.process_start import start_process_group


@pytest.fixture
def tensor_groups():
    """DeepSpeed keeps groups and mode for the whole process; reset them for other tests."""
    start_process_group()
    yield groups
    set_autotp_mode(training=False)
    groups._release_process_group_references()


def test_autotp_replaces_the_modules_named_in_the_plan_and_keeps_the_parameters(tensor_groups):
    tensor_groups._init_tp_mesh_device(tensor_model_parallel_size=1)
    set_autotp_mode(training=True)
    model = torch.nn.ModuleDict({"block": torch.nn.ModuleDict({n: torch.nn.Linear(6, 6) for n in "abc"})})
    weight = model["block"]["a"].weight
    specs = [
        TPLayerSpec(patterns=[r".*\.a\.weight$"], partition_type=PartitionType.COLUMN, shape=(3, -1)),
        TPLayerSpec(patterns=[r".*\.b\.weight$"], partition_type=PartitionType.ROW),
    ]
    autotp = AutoTP(
        module=model, all_reduce_linears=(), prefix="", state_dict=None,
        linear_layer_setting=(torch.nn.Linear, torch.nn.Embedding), orig_layer_impl=None,
        partition_config=AutoTPConfig(tp_size=1, layer_specs=specs), training_mode=True,
    )  # fmt: skip
    autotp.set_tensor_parallel_config(1, groups.get_tensor_model_parallel_group())
    autotp.update_linear_policies()
    autotp._replace_module(model)
    layers = model["block"]
    assert isinstance(layers["a"], TensorParallel_Layer), "no layer would be cut by our plan"
    assert isinstance(layers["b"], TensorParallel_Layer), "no layer would be cut by our plan"
    assert type(layers["c"]) is torch.nn.Linear, "layers would be cut that the plan leaves whole"
    assert layers["a"].weight is weight, "a caller's optimizer would train parameters the model has not"
