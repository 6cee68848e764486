"""Sums of token losses beside float64 formulas, with and without the matrix of all logits."""

import pytest
import torch
from tiny_models import KINDS, tiny_model

from megalowbit.hf.losses import chunked_cross_entropy
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
from megalowbit.hf.losses.token_losses import (
    losses_of_rows,
    sum_of_model_losses,
    sum_of_token_losses,
    sums_of_rows,
)


def batch_of(vocab_size):
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(vocab_size, (2, 3, 12), generator=generator)
    targets[0, 4:] = targets[2] = -100
    return {"input_ids": ids, "labels": targets}


def exact(logits, targets):
    each = -logits.double().log_softmax(-1).flatten(0, 1)
    rows = [index for index, target in enumerate(targets.flatten().tolist()) if target != -100]
    return sum(float(each[row, int(targets.flatten()[row])]) for row in rows)


def test_positions_count_with_their_own_target_and_ignored_ones_do_not():
    batch = batch_of(50)
    logits = torch.randn(3, 12, 50, generator=torch.Generator().manual_seed(1))
    found = sum_of_token_losses(logits, batch["labels"])
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(exact(logits, batch["labels"]), rel=1e-6)
    assert float(sum_of_token_losses(logits, torch.full((3, 12), -100))) == 0


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_model_that_trains_in_chunks_is_evaluated_in_chunks(kind, monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_ELEMENTS", 0)
    model = tiny_model(kind).eval()
    batch = batch_of(model.config.vocab_size)
    expected = exact(model(input_ids=batch["input_ids"]).logits, batch["labels"])
    assert float(sum_of_model_losses(model, model, batch)) == pytest.approx(expected, rel=1e-6)
    chunk_cross_entropy(model)
    shapes = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _args, output: shapes.append(output.shape))
    head._forward_hooks[next(iter(head._forward_hooks))].__module__ = "megalowbit.test"
    assert float(sum_of_model_losses(model, model, batch)) == pytest.approx(expected, rel=1e-6)
    assert shapes == [()]  # no logits
    assert model(input_ids=batch["input_ids"], labels=batch["input_ids"]).logits is not None


def test_rows_have_the_losses_of_the_next_tokens():
    logits = torch.randn(3, 12, 50, generator=torch.Generator().manual_seed(1))
    labels = batch_of(50)["labels"]
    found = sums_of_rows(logits.bfloat16(), labels)
    assert (found.shape, found.dtype) == ((3,), torch.float64)
    for row in range(3):
        expected = exact(logits[row : row + 1, :-1].bfloat16(), labels[row : row + 1, 1:])
        assert float(found[row]) == pytest.approx(expected, rel=1e-6)
    assert float(found[2]) == 0  # all ignored


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_losses_of_rows_leave_loss_and_gradients_as_they_are(kind, is_chunked, monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_ELEMENTS", 0)
    model = tiny_model(kind).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = batch_of(model.config.vocab_size)["input_ids"]
    labels = ids.clone()
    labels[1, 5:] = -100
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    expected = [exact(logits[row : row + 1, :-1], labels[row : row + 1, 1:]) for row in range(3)]
    if is_chunked:
        chunk_cross_entropy(model)
    plain = model(input_ids=ids, labels=labels).loss
    plain.backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    with losses_of_rows(model, labels) as sums_of:
        output = model(input_ids=ids, labels=labels)
        found = sums_of(output)
    output.loss.backward()
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert not found.requires_grad
    assert torch.equal(output.loss, plain)
    assert all(
        torch.equal(each.grad, before) for each, before in zip(model.parameters(), gradients, strict=True)
    )
