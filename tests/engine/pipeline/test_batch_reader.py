"""Reading batches in one process; tests/distributed/test_pipeline.py tests agreement between ranks."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.engine.initialize import initialize
from megalowbit.engine.pipeline.batch_reader import loss_per_label
from megalowbit.engine.pipeline.setup import pipeline_module
from megalowbit.errors import UserError

TOKENS = torch.arange(12).reshape(2, 6)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


@pytest.fixture
def engine():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module = pipeline_module(GPT2LMHeadModel(config), num_stages=1)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "megalowbit": {"precision": "fp32"},
    }
    return initialize(model=module, config=settings)[0]


def test_a_step_takes_its_micro_batches_and_no_more(engine):
    data = iter([BATCH] * 5)
    first = engine.train_batch(data)
    assert engine.train_batch().equal(first)  # continues the previous iterator
    assert engine.eval_batch(iter([BATCH] * 2)).allclose(first)
    assert len(list(data)) == 1
    with pytest.raises(UserError, match=r"ended after 0 of the 2 micro-batches"):
        engine.train_batch()


def test_the_users_batch_function_is_applied_first(engine):
    expected = engine.train_batch(iter([BATCH] * 2))
    engine.set_batch_fn(lambda text: {"input_ids": TOKENS, "labels": TOKENS})
    for _ in range(2):
        assert engine.train_batch(iter(["some", "text"])).equal(expected)


def test_the_loss_is_divided_by_the_given_number_of_labels(engine):
    mean = engine.train_batch(iter([BATCH] * 2))
    with loss_per_label(engine, torch.tensor(4.0)):  # each micro-batch has 10
        assert engine.train_batch(iter([BATCH] * 2)).item() == pytest.approx(mean.item() * 10 / 4, rel=1e-6)
    assert engine.train_batch(iter([BATCH] * 2)).equal(mean)
    engine.module.loss_fn = lambda logits, _: logits.mean()
    with pytest.raises(ValueError, match="must be `causal_loss`"), loss_per_label(engine, mean):
        pass


def test_logits_can_be_requested(engine):
    loss, logits = engine.eval_batch(iter([BATCH]), return_logits=True, num_micro_batches=1)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
