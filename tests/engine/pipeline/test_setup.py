"""A single stage in one process; tests/distributed/test_pipeline.py tests several stages."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import megalowbit as mlb
from megalowbit.engine.initialize import initialize
from megalowbit.engine.pipeline.setup import (
    full_model_of,
    gather_weights,
    groups_of,
    pipeline_module,
    stage_of,
)
from megalowbit.errors import UserError

TOKENS = torch.arange(12).reshape(2, 6)


def model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def config(recipe=None, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "megalowbit": {"precision": "fp32", **({} if recipe is None else {"recipe": recipe})},
        **more,
    }


def batches(count=2):
    return iter([{"input_ids": TOKENS, "labels": TOKENS}] * count)


def test_one_stage_trains_like_plain_autograd():
    engine, *_ = initialize(model=pipeline_module(model(), num_stages=1), config=config())
    loss = engine.train_batch(batches())
    plain = model()
    expected = plain(TOKENS, labels=TOKENS).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for name, parameter in plain.named_parameters():
        moved = engine.module.get_parameter(name)
        torch.testing.assert_close(moved, parameter - 0.1 * parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("recipe", "count"), [("nvfp4", 8), ("nvfp4-first-block-fp8", 7)])
def test_layers_are_converted_under_the_models_names(recipe, count):
    module = pipeline_module(model(), num_stages=1)
    initialize(model=module, config=config(recipe, pipeline={"stages": 1}))
    whole = model()
    report = mlb.convert(whole, recipe)
    assert len(report.swapped) == count
    assert list(mlb.bit_layers(module)) == [layer.name for layer in report.swapped]
    assert all(layer.layer_name == name for name, layer in mlb.bit_layers(module).items())
    assert module.full_model is None


def test_kept_blocks_are_counted_over_the_full_model():
    module = pipeline_module(model(), num_stages=1)
    recipe = {"base": "nvfp4", "keep_last": 1}
    initialize(model=module, config=config(recipe))
    assert {name.split(".")[2] for name in mlb.bit_layers(module)} == {"0"}


def test_converting_a_single_stage_rejects_keep_first_and_keep_last():
    module = pipeline_module(model(), num_stages=1)
    with pytest.raises(UserError, match="keep_first and keep_last"):
        mlb.convert(module, {"base": "nvfp4", "keep_last": 1})


def test_a_model_converted_before_partitioning_advances_its_stream():
    whole = model()
    mlb.convert(whole, "nvfp4", seed=1)
    module = pipeline_module(whole, num_stages=1)
    engine, *_ = initialize(model=module, config=config("nvfp4"))
    stream = next(iter(mlb.bit_layers(module).values())).random_stream
    engine.train_batch(batches())
    assert stream.step == 2
    engine.eval_batch(batches())
    assert stream.step == 2


def test_gathered_weights_are_those_of_plain_layers():
    module = pipeline_module(model(), num_stages=1)
    initialize(model=module, config=config("nvfp4"))
    gathered, expected = gather_weights(module), model().state_dict()
    assert gathered.keys() == expected.keys()
    assert all(gathered[name].equal(value) for name, value in expected.items())


def test_a_training_set_feeds_the_stages():
    data = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 8
    module = pipeline_module(model(), num_stages=1)
    engine, *_ = initialize(model=module, config=config(), training_data=data)
    assert engine.train_batch().item() > engine.train_batch().item()


def test_models_without_stages_are_not_pipelines():
    plain = model()
    assert stage_of(plain) is None
    assert full_model_of(plain) is plain
    assert groups_of(plain) is None


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"num_stages": 0}, "num_stages = 0"),
        ({"num_stages": True}, "num_stages = True"),
        ({"num_stages": 2}, "pipeline.stages = 2"),
        ({"num_stages": 1, "activation_checkpoint_interval": -1}, "activation_checkpoint_interval = -1"),
        ({"num_stages": 1, "partition": "best guess"}, "pipeline.partition = 'best guess'"),
    ],
)
def test_arguments_that_pipelines_do_not_support_are_rejected(arguments, part):
    with pytest.raises(UserError) as error:
        pipeline_module(model(), **arguments)
    assert part in str(error.value)


def test_an_mpu_together_with_stages_is_rejected():
    module = pipeline_module(model(), num_stages=1)
    with pytest.raises(UserError, match="mpu and a pipeline module both partition the model: leave mpu out"):
        initialize(model=module, config=config(), mpu=module.groups())
