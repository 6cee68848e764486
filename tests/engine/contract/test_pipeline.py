"""DeepSpeed's pipelines: schedule, instructions, and the attributes of a stage's module and engine."""

import inspect

import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.engine.initialize import initialize
from megalowbit.engine.pipeline import batch_reader
from megalowbit.engine.pipeline.setup import pipeline_module
from megalowbit.hf.losses.token_losses import sum_of_token_losses

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "megalowbit": {"precision": "bf16"},
}


@pytest.fixture
def engine():
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    module = pipeline_module(GPT2LMHeadModel(config), num_stages=1)
    return initialize(model=module, config=CONFIG)[0]


def batches(count=2):
    tokens = torch.arange(6).reshape(1, 6)
    return iter([{"input_ids": tokens, "labels": tokens}] * count)


def test_instructions_are_looked_up_in_the_engine_object(engine):
    seen = []
    ours = engine._INSTRUCTION_MAP[schedule.ReduceGrads]
    assert ours is not PipelineEngine._INSTRUCTION_MAP[schedule.ReduceGrads]
    engine._INSTRUCTION_MAP[schedule.ReduceGrads] = lambda self: (seen.append(1), ours(self))
    engine.train_batch(batches())
    assert seen == [1], "tied weights would be reduced in .grad, which is None, and drift apart"


def test_gradients_are_reduced_in_the_buffer_of_our_optimizer(engine, monkeypatch):
    asked = []
    original = type(engine.optimizer).get_grads_for_reduction
    monkeypatch.setattr(
        type(engine.optimizer),
        "get_grads_for_reduction",
        lambda self: (asked.append(engine.is_gradient_accumulation_boundary()), original(self))[1],
    )
    engine.train_batch(batches())
    assert asked == [True], "fp32 gradients would not be averaged once a step"


def test_gradients_can_be_written_before_zero_reduces_them(monkeypatch):
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    module = pipeline_module(GPT2LMHeadModel(config), num_stages=1)
    engine = initialize(model=module, config={**CONFIG, "zero_optimization": {"stage": 1}})[0]
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    original, seen = PipelineEngine._exec_reduce_grads, []

    def reduce(self):
        gradients = [self.optimizer.get_gradient_for_reduction(each) for each in trained]
        seen.extend(gradient.dtype for gradient in gradients)
        for gradient in gradients:
            gradient.zero_()
        original(self)

    monkeypatch.setattr(PipelineEngine, "_exec_reduce_grads", reduce)
    engine.train_batch(batches())
    assert seen == [torch.float32] * len(trained), "tied gradients would be summed in half precision"
    assert engine.get_global_grad_norm() == 0, "tied gradients would be summed where nobody reads them"


def test_a_step_takes_its_micro_batches_through_our_reader(engine):
    before = (engine.global_steps, engine.global_samples, engine.micro_steps)
    engine.train_batch(batches())
    assert engine.was_step_applied(), "skips would not be recognised"
    assert (engine.global_steps, engine.global_samples) == (before[0] + 1, before[1] + 2)
    assert engine.micro_steps == before[2], "a checkpoint would be refused as in the middle of a step"


def test_our_reader_replaces_that_of_the_engine(engine):
    for name in ("train_batch", "eval_batch"):
        theirs = list(inspect.signature(getattr(PipelineEngine, name)).parameters.items())[1:]
        ours = list(inspect.signature(getattr(engine, name)).parameters.items())
        assert [(key, each.default) for key, each in ours] == [(key, each.default) for key, each in theirs], (
            f"{name} would lose an argument"
        )
    assert inspect.getsource(PipelineEngine).count("self._next_batch()") == 1, "data would be read unchecked"


def test_the_loss_of_a_step_is_known_when_the_optimizer_steps(engine):
    found = []
    engine.optimizer.also_read = lambda: found.append(batch_reader.loss_of_step(engine)) or torch.zeros(1)
    tokens = torch.arange(6).reshape(1, 6)
    data = [{"input_ids": each, "labels": each} for each in (tokens, tokens.flip(1))]
    mean = engine.train_batch(iter(data))
    assert torch.equal(torch.stack(found), mean[None]), "the loop would record another loss"
    assert torch.equal(engine.dp_group_loss, mean)
    engine.eval_batch(iter(data))
    assert engine.train_batch(iter(data)).item() != mean.item()  # the weights are other ones
    assert torch.equal(found[1], engine.dp_group_loss), "losses of a validation would be added"


def test_batches_are_evaluated_with_a_loss_function_of_ours(engine, monkeypatch):
    trained, seen = engine.module.loss_fn, []
    monkeypatch.setattr(
        batch_reader,
        "sum_of_token_losses",
        lambda logits, targets: (seen.append(logits.shape), sum_of_token_losses(logits, targets))[1],
    )
    sums = batch_reader.sums_of_losses(engine, list(batches(3)))
    assert seen == [(1, 6, 8)] * 3, "a validation would not see the logits of each batch"
    assert sums.tolist() == [float(sums[0])] * 3, "the losses of a batch would depend on those before it"
    # labels are not shifted: each position predicts its own token
    with torch.no_grad():
        logits = engine.module(torch.arange(6, device=engine.device).reshape(1, 6))
    expected = torch.nn.functional.cross_entropy(logits[0].double(), torch.arange(6), reduction="sum")
    assert sums[0].item() == pytest.approx(expected.item(), rel=1e-6)
    assert engine.module.loss_fn is trained, "training would go on with the loss of the validation"


def test_modules_become_the_stages_functions_in_order(engine):
    module = engine.module
    kinds = [type(part).__name__ for part in module.forward_funcs]
    assert kinds == ["Embedding", "Block", "Block", "Head"], "a stage would run other parts than it holds"
    assert module.parts == [0, 4], "empty stages are found with it"
    assert module.tied_comms == {}
    assert module.ckpt_layer_path("x", 2) == "x/layer_02-model_states.pt", "exporters look for these names"
    for name in ("ds_model_proc_group", "dp_proc_group", "slice_proc_group", "pp_proc_group"):
        assert isinstance(getattr(module._grid, name), torch.distributed.ProcessGroup), (
            f"norm and overflow are reduced over groups of the grid: {name}"
        )


def test_stages_recompute_with_non_reentrant_checkpointing(engine):
    assert engine.module.activation_checkpoint_func is non_reentrant_checkpoint, (
        "the engine would mark the first stage's inputs, which are integers, as needing gradients"
    )
    assert not engine._reentrant_activation_checkpointing()
