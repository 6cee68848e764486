"""Documents in one row against each document alone, in models of all families."""

import numpy as np
import pytest
import torch
from quick_cases import every_value
from tiny_models import KINDS, tiny_model

from megalowbit.data.packing import DocumentRules
from megalowbit.hf.activation_checkpointing import ActivationCheckpointingSettings, recompute_blocks
from megalowbit.hf.batches.separate_documents import attention_within_documents
from megalowbit.hf.generation import prepare_for_training
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
from megalowbit.hf.losses.token_losses import sum_of_model_losses

END = 0
LENGTHS = [[5, 1, 9, 3], [18], [1, 1, 7, 9]]  # of the documents in each row, end included
RULES = DocumentRules(end=END, are_separate=True, masks_first=True)


def documents():
    numbers = np.random.default_rng(3)
    return [[[*numbers.integers(1, 64, length - 1).tolist(), END] for length in row] for row in LENGTHS]


def batch():
    rows = [[token for each in row for token in each] for row in documents()]
    return RULES.batch(torch.tensor(rows))


def make(kind, attention="sdpa", **more):
    model = tiny_model(kind, attn_implementation=attention, **more).double()  # rounding is not the question
    model.loss_type = "ForCausalLM"
    prepare_for_training(model)
    return model.train()


def alone(model):
    """The logits of each document, and the mean loss of all of them, from documents alone."""
    logits, total, count = [], 0.0, 0
    for row in documents():
        for each in row:
            ids = torch.tensor([each])
            logits.append(model(input_ids=ids).logits[0])
            losses = torch.nn.functional.cross_entropy(logits[-1][:-1], ids[0, 1:], reduction="sum")
            total, count = total + losses, count + len(each) - 1
    return torch.cat(logits), total / count


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_value(
    kind=KINDS,
    attention=["sdpa", "eager"],
    option=["none", "recompute", "chunked"],
)
def test_logits_and_gradients_are_those_of_separate_documents(kind, attention, option):
    reference, model = make(kind, attention), make(kind, attention)
    expected, loss = alone(reference)
    loss.backward()
    if option == "recompute":
        recompute_blocks(model, ActivationCheckpointingSettings(every=1))
    if option == "chunked":
        chunk_cross_entropy(model)
    given = batch()
    with attention_within_documents(given, model.config):
        output = model(**given)
    output.loss.backward()  # outside, as in a run
    tolerance = 1e-5 if option == "chunked" else 1e-6  # losses are in fp32
    assert output.loss.item() == pytest.approx(loss.item(), rel=tolerance)
    if option != "chunked":
        # eager attention has its softmax in fp32
        absolute = 1e-6 if attention == "eager" else 1e-12
        torch.testing.assert_close(output.logits.flatten(0, 1), expected, rtol=1e-9, atol=absolute)
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, gradients(reference)[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_that_restart_alone_would_leak(kind):
    """What is compared above does depend on the mask: with the same positions, and one mask for all."""
    model, given = make(kind), batch()
    expected, _ = alone(model)
    ones = torch.ones_like(given["input_ids"])
    leaking = model(
        input_ids=ones * given["input_ids"], position_ids=given["position_ids"], attention_mask=ones
    )
    found = leaking.logits.flatten(0, 1)
    assert not torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(found[:5], expected[:5], rtol=1e-9)  # the first document has nothing before it


@pytest.mark.parametrize("limit", [17, 18])
def test_longrope_keeps_documents_apart_only_up_to_its_original_length(limit):
    """transformers chooses its factors by the longest document, which has 18 tokens; configurations in which
    they could be the long ones are refused (pretrain/checks.py)."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    rope |= {"rope_theta": 1e4, "original_max_position_embeddings": limit}
    model, given = make("llama", rope_parameters=rope), batch()
    with torch.no_grad(), attention_within_documents(given, model.config):
        found = model(**given).logits.flatten(0, 1)
        expected, _ = alone(model)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12) == (limit == 18)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_changes_nothing_in_other_documents(kind):
    model, given = make(kind), batch()
    with attention_within_documents(given, model.config), torch.no_grad():
        before = model(**given).logits
        given["input_ids"][0, 7] = given["input_ids"][0, 7] % 63 + 1  # in the third document
        after = model(**given).logits
    changed = (before != after).any(2)
    assert changed[0].tolist() == [False] * 7 + [True] * 8 + [False] * 3
    assert not changed[1:].any()


@every_value(kind=KINDS, is_chunked=[False, True])
def test_the_loss_of_validation_is_that_of_separate_documents(kind, is_chunked):
    model = make(kind)
    _, loss = alone(model)
    if is_chunked:
        chunk_cross_entropy(model)
    given = batch()
    targets = torch.roll(given["labels"], -1, dims=1)
    targets[:, -1] = -100
    with torch.no_grad():
        found = sum_of_model_losses(model.eval(), model, {**given, "labels": targets})
    assert found.item() / (targets != -100).sum().item() == pytest.approx(loss.item(), rel=1e-5)
