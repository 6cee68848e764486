"""Public functions that get something of another type: one line, with the remedy."""

import re

import pytest
from torch import nn

import megalowbit as mlb
from megalowbit.errors import UserError

CONFIG = mlb.OptimizerConfig(lr=1e-3)
# functions whose first argument is a model
OF_A_MODEL = {
    "attach_autocast": lambda model: mlb.attach_autocast(model, "bf16", "cpu"),
    "bit_layers": mlb.bit_layers,
    "cache_weights": mlb.cache_weights,
    "check_training": mlb.check_training,
    "chunk_cross_entropy": mlb.chunk_cross_entropy,
    "convert": mlb.convert,
    "get_megatron_optimizer": lambda model: mlb.get_megatron_optimizer(model, CONFIG),
    "initialize": lambda model: mlb.initialize(model=model, config={}),
    "keep_fp32": mlb.keep_fp32,
    "LocalDDP": mlb.LocalDDP,
    "pipeline_module": lambda model: mlb.pipeline_module(model, num_stages=1),
    "PrecisionController": lambda model: mlb.PrecisionController(model, {}),
    "product_counts": mlb.product_counts,
    "random_stream": mlb.random_stream,
    "record_inputs": lambda model: mlb.record_inputs(model).__enter__(),
    "restore": mlb.restore,
    "set_observer": lambda model: mlb.set_observer(model, None),
    "split_weights": mlb.split_weights,
    "switch_precision": mlb.switch_precision,
    "trainer_optimizers": lambda model: mlb.trainer_optimizers(model, None),
    "use_static_inputs": lambda model: mlb.use_static_inputs(model, None),
}


def message(call):
    with pytest.raises(UserError) as seen:
        call()
    assert "\n" not in str(seen.value)
    return str(seen.value)


@pytest.mark.parametrize("value", ["gpt2", None, 3, nn.Linear, {}], ids=repr)
@pytest.mark.parametrize("function", OF_A_MODEL)
def test_what_is_no_model_is_rejected_in_one_line(function, value):
    line = message(lambda: OF_A_MODEL[function](value))
    assert re.search(r"model", line)
    assert ": " in line  # the remedy


def test_the_remedy_fits_the_value():
    assert message(lambda: mlb.convert("gpt2")) == (
        "convert takes a model, not 'gpt2': load it first, "
        "as with AutoModelForCausalLM.from_pretrained('gpt2')"
    )
    assert message(lambda: mlb.restore(3)) == "restore takes a model, not 3: pass a torch.nn.Module"
    assert message(lambda: mlb.convert(nn.Linear)).endswith(": make one first, as with Linear(…)")


MODEL = nn.Sequential(nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: mlb.Recipe("nvfp4"), "Recipe takes fields by name, not 'nvfp4'"),
        (lambda: mlb.Recipe(3), "Recipe takes fields by name, not 3"),
        (lambda: mlb.Recipe(name="mine", q_forward_inputs="nvfp4e2m1b"), "recipe key 'q_forward_inputs'"),
        (lambda: mlb.Recipe(name="mine"), "recipe block lacks q_forward_input, q_forward_weight"),
        (lambda: mlb.recipe(3), "unknown recipe 3"),
        (lambda: mlb.convert(MODEL, 3), "unknown recipe 3"),
        (lambda: mlb.convert(MODEL, seed="a"), "random stream seed = 'a'"),
        (lambda: mlb.quantizer(None), "a quantizer has a name, not None"),
        (lambda: mlb.quantizer("nvfp4e2m1b")([1.0]), "not a tensor"),
        (lambda: mlb.BitLinear("a", 3), "in_features of BitLinear"),
        (lambda: mlb.initialize(model=MODEL, config=3), "config is a int"),
        (lambda: mlb.get_megatron_optimizer(MODEL, {"lr": 1.0}), "takes an OptimizerConfig second, not"),
        (lambda: mlb.FP32Optimizer(MODEL, clip_grad=1.0), "FP32Optimizer takes a torch optimizer first"),
        (lambda: mlb.use_static_inputs(MODEL, 3), "takes what record_inputs has recorded, not 3"),
        (lambda: mlb.CheckpointStore(3), "CheckpointStore takes the path of a folder, not 3"),
        (lambda: mlb.save_quantized(3, "x"), "save_quantized takes tensors by name first, not int"),
    ],
)
def test_other_wrong_types_are_rejected_in_one_line(call, expected):
    assert expected in message(call)


def test_recipes_can_still_be_copied_and_pickled():
    import copy
    import pickle

    recipe = mlb.recipe("nvfp4")
    assert copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe)) == recipe
