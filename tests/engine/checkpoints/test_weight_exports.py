"""Exported weights are in transformers' layout; checkpoint files keep the engine's layout."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.split import split_weights
from megalowbit.engine.pipeline.setup import pipeline_module
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers

SPLIT = {"base": "nvfp4", "parameter_split": {"rank": 3}}
IDS = torch.arange(32).view(2, 16)


def gpt2(seed=0):
    torch.manual_seed(seed)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0))


def make_engine(stage=0, *, seed=0, recipe="nvfp4", **zero):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "megalowbit": {"precision": "bf16", "recipe": recipe},
    }
    return initialize(model=gpt2(seed), config=config)[0]


def step(engine):
    loss = engine(input_ids=IDS, labels=IDS).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def assert_plain(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name].cpu(), value.bfloat16()), name


def own_parameters(engine):
    """The names and values that an engine's checkpoint files hold: its own parameters."""
    return dict(engine.module.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_an_engine_exports_its_weights_in_the_layout_of_transformers(tmp_path, stage):
    engine = make_engine(stage, stage3_gather_16bit_weights_on_model_save=True)
    expected = gpt2().state_dict()
    if stage < 3:
        assert_plain(engine.module.state_dict(), expected)
        assert_plain(engine.module_state_dict(), expected)
    else:
        assert_plain(engine._zero3_consolidated_16bit_state_dict(), expected)
        assert_plain(engine._consolidated_16bit_state_dict(), expected)
    assert engine.save_16bit_model(str(tmp_path / "new"), "weights.bin")
    stored = torch.load(tmp_path / "new" / "weights.bin", weights_only=True)
    assert_plain(stored, expected)
    assert stored["lm_head.weight"].data_ptr() == stored["transformer.wte.weight"].data_ptr()
    gpt2(1).load_state_dict(stored)


def test_stage_three_saves_no_weights_unless_gathering_is_enabled(tmp_path):
    engine = make_engine(3)
    assert not engine.save_16bit_model(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_frozen_parameters_can_be_excluded():
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "megalowbit": {"precision": "bf16", "recipe": "nvfp4"},
    }
    engine = initialize(model=model, config=config)[0]
    found = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert set(gpt2().state_dict()) - set(found) == {"transformer.wpe.weight"}


def test_a_file_that_cannot_be_written_raises_a_one_line_error(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="taken"):
        make_engine().save_16bit_model(str(tmp_path / "taken"))


def test_weights_of_transformers_are_loaded_into_an_engine():
    engine = make_engine(seed=1)
    engine.load_module_state_dict({"module": {n: v.bfloat16() for n, v in gpt2().state_dict().items()}})
    assert_plain(engine.module.state_dict(), gpt2().state_dict())


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_holds_the_parameters_in_the_layout_of_the_engine(tmp_path, stage):
    engine = make_engine(stage)
    step(engine)
    engine.save_checkpoint(str(tmp_path), tag="t")
    stored = torch.load(tmp_path / "t" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    expected = own_parameters(engine)
    assert set(stored) == set(expected)
    for name, parameter in expected.items():
        assert torch.equal(stored[name], parameter), name
        assert stored[name].is_contiguous()
    again = make_engine(stage, seed=1)
    again.load_checkpoint(str(tmp_path), tag="t")
    assert all(map(torch.equal, again.module.parameters(), engine.module.parameters()))
    assert_plain(again.module.state_dict(), engine.module.state_dict())


def test_a_checkpoint_of_a_split_model_holds_the_residual_and_an_export_the_full_weight(tmp_path):
    engine = make_engine(recipe=SPLIT)
    step(engine)
    split_weights(engine)
    step(engine)
    engine.save_checkpoint(str(tmp_path), tag="t")
    stored = torch.load(tmp_path / "t" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert set(stored) == set(own_parameters(engine))
    again = make_engine(seed=1, recipe=SPLIT)
    again.load_checkpoint(str(tmp_path), tag="t")
    assert all(map(torch.equal, again.module.parameters(), engine.module.parameters()))
    engine.save_16bit_model(str(tmp_path), "weights.bin")
    plain = gpt2(1).bfloat16()
    found = plain.load_state_dict(torch.load(tmp_path / "weights.bin", weights_only=True), strict=False)
    assert not found.missing_keys
    assert {name.rpartition(".")[2] for name in found.unexpected_keys} == {
        "split_u", "split_s", "split_v", "split_residual",
    }  # fmt: skip
    for name, layer in bit_layers(engine.module).items():
        assert torch.equal(plain.get_submodule(name).weight, layer.merged_weight().t())


def test_a_pipelines_weights_are_gathered(tmp_path):
    module = pipeline_module(gpt2(), num_stages=1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "megalowbit": {"precision": "bf16", "recipe": "nvfp4"},
    }
    engine = initialize(model=module, config=config)[0]
    engine.save_16bit_model(str(tmp_path))
    stored = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    expected = gpt2().state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], value.bfloat16()) for name, value in expected.items())
    engine.save_checkpoint(str(tmp_path), tag="t")
    parameters = own_parameters(engine)
    for file in (tmp_path / "t").glob("layer_*.pt"):
        for name, value in torch.load(file, weights_only=True).items():
            assert torch.equal(value, parameters.pop(name)), name
    assert parameters.keys() <= {"lm_head.weight", "transformer.wte.weight"}  # tied: one tensor
    with pytest.raises(UserError, match="exclude_frozen_parameters is not supported for a pipeline"):
        engine.save_16bit_model(str(tmp_path), exclude_frozen_parameters=True)
