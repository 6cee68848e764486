"""Hugging Face's own Trainer, with a tiny LLaMA on a CPU; with DeepSpeed: test_other_loops_page.py."""

import json
import logging

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from quick_cases import slow_except
from tiny_trainers import ACCUMULATED, DATASET, ROWS, STEPS, differing, llama, make, weights
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.carried_state import stream_states


@pytest.fixture(autouse=True)
def _no_state_of_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not interrupted, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make(folder)
    trainer.train()
    return folder, weights(trainer)


@pytest.mark.parametrize("more", slow_except([{}], [{}, {"restore_callback_states_from_checkpoint": True}]))
def test_a_resumed_run_continues_the_random_stream(whole, tmp_path, more):
    folder, expected = whole
    trainer = make(tmp_path, **more)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert mlb.random_stream(trainer.model).step == STEPS * ACCUMULATED
    assert differing(expected, weights(trainer)) == []
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    state = saved["stateful_callbacks"]["MegalowbitCallback"]["attributes"]["random_stream"]
    assert state == {"seed": 0, "step": STEPS * ACCUMULATED}


def test_a_resumed_run_continues_all_streams_of_a_model(tmp_path):
    def model():
        net = llama(None)
        for seed, block in enumerate(net.model.layers):
            mlb.convert(block, "nvfp4", seed=seed)
        return net

    first = make(tmp_path / "whole", model())
    first.train()
    trainer = make(tmp_path / "resumed", model())
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert [state["step"] for state in stream_states(trainer.model).values()] == [STEPS * ACCUMULATED] * 2
    assert differing(weights(first), weights(trainer)) == []


@pytest.mark.slow
def test_a_checkpoint_without_a_stream_position_is_reported_and_can_be_resumed(whole, tmp_path, caplog):
    _, expected = whole
    first = make(tmp_path, callbacks=[], max_steps=2)
    first.train()
    trainer = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "was saved without MegalowbitCallback" in caplog.text
    assert (tmp_path / "checkpoint-4").is_dir()
    assert differing(expected, weights(trainer)), "the other test could not fail"


@pytest.mark.slow
def test_a_second_call_of_train_continues_the_random_stream(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    trainer.train()
    assert mlb.random_stream(trainer.model).step == 2 * STEPS * ACCUMULATED


def test_evaluation_and_generation_do_not_advance_the_random_stream(tmp_path):
    trainer = make(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert mlb.random_stream(trainer.model).step == STEPS * ACCUMULATED
    trainer.evaluate()
    trainer.model.generate(ROWS[1][None], max_new_tokens=3, do_sample=False)
    assert mlb.random_stream(trainer.model).step == STEPS * ACCUMULATED


@pytest.mark.slow
def test_evaluation_during_training_changes_no_weight(whole, tmp_path):
    trainer = make(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert differing(whole[1], weights(trainer)) == []


def test_gradient_checkpointing_repeats_the_weights(whole, tmp_path):
    trainer = make(tmp_path, gradient_checkpointing=True)
    trainer.train()
    assert differing(whole[1], weights(trainer)) == []


def test_a_loss_in_chunks_trains_and_evaluates(whole, tmp_path):
    trainer = make(tmp_path, mlb.chunk_cross_entropy(llama()))
    trainer.train()
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, whole[1][name], rtol=0, atol=1e-3)
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(DATASET[:2]).predictions.shape == (2, 8, 64)  # evaluation returns logits


@pytest.mark.slow
def test_autocast_to_bf16_trains_in_low_precision(tmp_path):
    trainer = make(tmp_path, bf16=True)
    trainer.train()
    assert sum(mlb.product_counts(trainer.model)["grad_weight"].values()) == 14 * STEPS * ACCUMULATED


def test_a_model_that_is_not_converted_is_refused_before_the_first_step(tmp_path):
    model = llama(None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="LlamaForCausalLM has no low-bit layers"):
        make(tmp_path, model).train()
    assert differing(before, model.state_dict()) == []


def test_several_devices_in_a_process_are_refused(tmp_path):
    trainer = make(tmp_path)
    trainer.args._n_gpu = 2
    trainer.model_wrapped = torch.nn.DataParallel(trainer.model)  # what Trainer does where there are two
    with pytest.raises(UserError, match=r"nn\.DataParallel for 2 GPUs"):
        trainer.train()


def with_ours(folder, *, dtype, **settings):
    model = llama().to(dtype)
    optimizer = mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(lr=1e-3, **settings))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return make(folder, model, optimizers=(optimizer, scheduler), save_strategy="no")


def test_our_optimizer_is_rejected_if_its_loss_scale_is_not_applied(tmp_path):
    settings = {"fp16": True, "initial_loss_scale": 1024.0, "params_have_main_grad": False}
    with pytest.raises(UserError, match="divides gradients by a loss scale of 1024"):
        with_ours(tmp_path, dtype=torch.float16, **settings).train()


def test_an_optimizer_that_trainer_replaces_is_rejected(tmp_path):
    """As DeepSpeed's integration does it: it sets `trainer.optimizer` to None."""
    model = llama()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = make(tmp_path, model, optimizers=(given, None), save_strategy="no")
    trainer.optimizer = None
    with pytest.raises(UserError, match=r"given AdamW in optimizers=, and steps with AdamW: with"):
        trainer.train()


def test_our_optimizer_with_plain_gradients_trains_fp32_masters(tmp_path):
    trainer = with_ours(tmp_path, dtype=torch.bfloat16, bf16=True, params_have_main_grad=False)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert optimizer.report.is_applied
    for model, master in zip(optimizer.float16_groups[0], optimizer.fp32_from_float16_groups[0], strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), model)


def test_a_deepspeed_configuration_without_an_engine_is_refused(tmp_path):
    trainer = make(tmp_path)
    # as `deepspeed=` leaves it; with use_cpu=True Accelerate takes no notice of it
    trainer.args.hf_deepspeed_config = HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    with pytest.raises(UserError, match=r"made no engine: Accelerate ignores it on CPUs .* out deepspeed="):
        trainer.train()
