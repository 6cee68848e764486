"""`mlb.trainer_optimizers` in Hugging Face's Trainer: the weights of a plain loop, and what users do next."""

import logging

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from quick_cases import slow_except
from tiny_trainers import ACCUMULATED, DATASET, STEPS, differing, llama, make, weights
from transformers import LlamaForCausalLM, TrainingArguments

import megalowbit as mlb
from megalowbit.errors import UserError


@pytest.fixture(autouse=True)
def _no_state_of_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def make_ours(folder, dtype=torch.bfloat16, model=None, **settings):
    """A Trainer with our optimizer, as docs/other-loops.md makes it."""
    model = llama(dtype=dtype) if model is None else model
    plain = make(folder, model, **settings)  # for its arguments
    return make(folder, model, optimizers=mlb.trainer_optimizers(model, plain.args), **settings)


def batches(trainer):
    """The micro-batches in the order in which Trainer reads them."""
    return list(trainer.get_train_dataloader())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A bf16 run that was not interrupted, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_ours(folder)
    trainer.train()
    return folder, weights(trainer), masters(trainer)


@pytest.mark.parametrize("dtype", slow_except([torch.bfloat16], [torch.bfloat16, torch.float32]))
def test_the_weights_are_those_of_a_plain_loop(tmp_path, dtype):
    trainer = make_ours(tmp_path, dtype, logging_steps=1)
    read = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].clone()), with_kwargs=True
    )
    trainer.train()
    model = llama(dtype=dtype)
    settings = {"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 0.0, "bf16": dtype == torch.bfloat16}
    optimizer = mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(**settings))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for tokens in read[step * ACCUMULATED : (step + 1) * ACCUMULATED]:
            # Trainer divides the sum over all micro-batches by the number of predicted tokens in them
            loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=2 * 2 * 7).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert optimizer.step().is_applied
        schedule.step()
        losses.append(total)
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert logged == pytest.approx(losses, abs=1e-4)
    assert differing(weights(trainer), model.state_dict()) == []


def test_sgd_takes_the_steps_of_trainers_own(tmp_path):
    settings = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "save_strategy": "no"}
    ours = make_ours(tmp_path / "ours", torch.float32, **settings)
    own = make(tmp_path / "own", llama(dtype=torch.float32), **settings)
    for each in (ours, own):
        each.train()
    assert type(own.optimizer.optimizer) is torch.optim.SGD
    expected = own.model.state_dict()
    start = llama(dtype=torch.float32).state_dict()
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert any(not torch.allclose(value, start[name], atol=1e-4) for name, value in expected.items())


def test_a_resumed_run_ends_with_the_same_weights_and_masters(whole, tmp_path):
    folder, expected, expected_masters = whole
    resumed = make_ours(tmp_path)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert differing(expected, weights(resumed)) == []
    for group, other in zip(expected_masters, masters(resumed), strict=True):
        assert torch.equal(group, other)
        assert not torch.equal(group, group.bfloat16().float())  # they hold more than the model


def masters(trainer):
    return [each for group in trainer.optimizer.optimizer.fp32_from_float16_groups for each in group]


def test_checkpoints_and_save_pretrained_are_plain_models(tmp_path):
    trainer = make_ours(tmp_path, max_steps=1, save_steps=1)
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "own")
    trainer.save_model(str(tmp_path / "trainers"))
    for each in (tmp_path / "own", tmp_path / "trainers", tmp_path / "checkpoint-1"):
        read = LlamaForCausalLM.from_pretrained(each, dtype="auto")
        assert mlb.bit_layers(read) == {}
        assert differing(weights(trainer), read.state_dict()) == []


def test_evaluate_predict_and_eval_mode_work_after_training(tmp_path):
    trainer = make_ours(tmp_path, max_steps=1)
    trainer.train()
    expected = weights(trainer)
    loss = trainer.evaluate()["eval_loss"]
    predictions = trainer.predict(DATASET[:2]).predictions
    assert predictions.shape == (2, 8, 64)
    model = trainer.model.eval()
    with torch.no_grad():
        tokens = torch.stack([each["input_ids"] for each in DATASET[:4]])
        assert model(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(loss, rel=0.05)
    assert differing(expected, weights(trainer)) == []


def test_the_best_model_is_loaded_and_training_continues_from_it(tmp_path, caplog):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    # the loss falls, so the worst model is that of step 2
    trainer = make_ours(tmp_path, metric_for_best_model="eval_loss", greater_is_better=True, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    loaded = weights(trainer)
    read = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype="auto")
    assert differing(loaded, read.state_dict()) == []
    trainer.args.max_steps = 1
    for group in trainer.optimizer.param_groups:
        group["initial_lr"] = 0.0
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "the model's weights were changed since the last step" in caplog.text
    assert differing(loaded, weights(trainer)) == []  # and not the masters of step 4


@pytest.mark.parametrize("flag", slow_except([{"bf16": True}], [{}, {"bf16": True}]))
def test_autocast_with_a_bf16_model_trains(tmp_path, flag):
    trainer = make_ours(tmp_path, max_steps=1, **flag)
    trainer.train()
    assert trainer.optimizer.optimizer.report.is_applied


def test_a_skipped_step_is_reported(tmp_path, caplog):
    trainer = make_ours(tmp_path, max_steps=1, gradient_accumulation_steps=1)
    before = weights(trainer)
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "step 1: skipped" in caplog.text
    assert differing(before, weights(trainer)) == []


@pytest.mark.slow
def test_a_compiled_model_ends_with_the_same_weights_to_the_rounding_of_gradients(whole, tmp_path):
    trainer = make_ours(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    trainer.train()
    assert mlb.random_stream(trainer.model).step == STEPS * ACCUMULATED
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, whole[1][name], rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("plugin", "expected"), [(None, False), (object(), True)], ids=["without", "accelerate_launch"]
)
def test_with_deepspeed_the_optimizer_is_left_to_it_in_a_line(tmp_path, caplog, plugin, expected):
    args = arguments(tmp_path)
    args.deepspeed_plugin = plugin
    with caplog.at_level(logging.WARNING):
        optimizer, schedule = mlb.trainer_optimizers(llama(dtype=torch.bfloat16), args)
    assert schedule is None
    assert (optimizer is None) == expected
    assert ("Trainer with DeepSpeed takes no optimizer" in caplog.text) == expected


def arguments(folder, **settings):
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], **settings)


@pytest.mark.parametrize(
    ("dtype", "settings", "message"),
    [
        (torch.float16, {}, "the model is float16, and Trainer does not multiply its loss by a loss scale"),
        (torch.bfloat16, {"optim": "adafactor"}, "optim = 'adafactor' is not one of trainer_optimizers'"),
        (torch.bfloat16, {"optim_args": "foreach=True"}, "optim_args = 'foreach=True' has no effect"),
    ],
)
def test_what_trainer_would_not_do_is_rejected(tmp_path, dtype, settings, message):
    with pytest.raises(UserError, match=message):
        mlb.trainer_optimizers(llama(dtype=dtype), arguments(tmp_path, **settings))


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("gpt2", None, r"trainer_optimizers takes a model, not 'gpt2': load it first"),
        (torch.nn.Linear(2, 2), "out", r"takes the TrainingArguments second, not 'out'"),
    ],
)
def test_arguments_of_other_types_are_rejected(model, args, message):
    with pytest.raises(UserError, match=message):
        mlb.trainer_optimizers(model, args)


def test_a_model_that_is_not_converted_is_rejected(tmp_path):
    with pytest.raises(UserError, match="LlamaForCausalLM has no low-bit layers"):
        mlb.trainer_optimizers(llama(None), arguments(tmp_path))


def test_a_fp16_flag_on_a_bf16_model_is_rejected(tmp_path):
    args = arguments(tmp_path)
    args.fp16 = True  # set here, so that the test does not depend on what the device allows
    with pytest.raises(UserError, match="would compute a bfloat16 model in float16"):
        mlb.trainer_optimizers(llama(dtype=torch.bfloat16), args)
