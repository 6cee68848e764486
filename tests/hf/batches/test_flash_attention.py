"""Separate documents with flash attention: transformers' own path to a kernel of plain attention."""

from itertools import pairwise

import flash_kernel
import numpy as np
import pytest
import torch
from quick_cases import every_value
from tiny_models import KINDS, tiny_model
from transformers import GPT2Config

from megalowbit.data.packing import DocumentRules
from megalowbit.engine.pipeline.parts import BlockInputs, parts_of, run_parts
from megalowbit.engine.process_start import FLASH_VARIABLE
from megalowbit.errors import UserError
from megalowbit.hf.activation_checkpointing import ActivationCheckpointingSettings, recompute_blocks
from megalowbit.hf.batches.separate_documents import (
    attention_within_documents,
    document_bounds,
    uses_flash_attention,
)
from megalowbit.hf.batches.upload import upload
from megalowbit.hf.generation import prepare_for_training
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
from megalowbit.hf.losses.token_losses import losses_of_rows, sum_of_model_losses
from megalowbit.hf.model import random_model

END, CPU = 0, torch.device("cpu")
LENGTHS = [[5, 1, 9, 3], [18], [1, 1, 7, 9]]  # of the documents in each row, end included
BOUNDS = [0, 5, 6, 15, 18, 36, 37, 38, 45, 54]
RULES = DocumentRules(end=END, are_separate=True, masks_first=True)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def kernel(monkeypatch):
    return flash_kernel.install(monkeypatch)


def batch():
    numbers = np.random.default_rng(3)
    rows = [
        [token for length in row for token in (*numbers.integers(1, 64, length - 1).tolist(), END)]
        for row in LENGTHS
    ]
    return RULES.batch(torch.tensor(rows))


def make(kind, attention, **more):
    model = tiny_model(kind, attn_implementation=attention, **more).double()  # rounding is not the question
    model.loss_type = "ForCausalLM"
    prepare_for_training(model)
    return model.train()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def loss_of(logits, labels):
    """The mean loss in float64; transformers computes it in fp32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@every_value(kind=KINDS, is_recomputed=[False, True])
def test_logits_and_gradients_are_those_of_rows_with_a_mask(kernel, kind, is_recomputed):
    """These are those of each document alone, as `test_separate_documents.py` shows."""
    with_mask, model = make(kind, "sdpa"), make(kind, flash_kernel.NAME)
    if is_recomputed:
        recompute_blocks(model, ActivationCheckpointingSettings(every=1))
    logits = []
    for each in (with_mask, model):
        given = upload(batch(), CPU, each.config)
        labels = given.pop("labels")
        with attention_within_documents(given, each.config):
            logits.append(each(**given).logits)
        loss_of(logits[-1], labels).backward()  # outside, as in a run
    torch.testing.assert_close(logits[1], logits[0], **EXACT)
    torch.testing.assert_close(gradients(model), gradients(with_mask), **EXACT)
    assert kernel.calls == [BOUNDS] * 2 * (1 + is_recomputed)  # once in each block


@every_value(kind=KINDS, is_chunked=[False, True])
def test_losses_of_steps_rows_and_validation_are_those_with_a_mask(kernel, kind, is_chunked):
    found = []
    for attention in ("sdpa", flash_kernel.NAME):
        model = make(kind, attention)
        if is_chunked:
            chunk_cross_entropy(model)
        given = upload(batch(), CPU, model.config)
        with (
            attention_within_documents(given, model.config),
            losses_of_rows(model, given["labels"]) as sums_of,
        ):
            output = model(**given, num_items_in_batch=torch.tensor(7.0))
        sums = sums_of(output)
        output.loss.backward()
        targets = {**given, "labels": given["labels"].roll(-1, dims=1)}
        with torch.no_grad():
            validated = sum_of_model_losses(model.eval(), model, targets)
        found.append([output.loss, sums, validated, gradients(model)])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7, check_dtype=False)  # losses are in fp32
    assert set(map(tuple, kernel.calls)) == {tuple(BOUNDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_positions_alone_would_leak(kernel, kind):
    """transformers looks for documents in a single row only."""
    with_mask, model, given = make(kind, "sdpa"), make(kind, flash_kernel.NAME), batch()
    row = {name: each[:1] for name, each in given.items()}
    with torch.no_grad():
        with attention_within_documents(given, with_mask.config):
            expected = with_mask(**given).logits
        leaking, single = model(**given).logits, model(**row).logits
    assert kernel.calls == [None, None, BOUNDS[:5], BOUNDS[:5]]
    assert not torch.allclose(leaking, expected, atol=1e-4)
    assert torch.allclose(leaking[0, :5], expected[0, :5], rtol=1e-9)  # nothing is before the first document
    torch.testing.assert_close(single[0], expected[0], **EXACT)


def test_rows_whose_bounds_are_missing_are_refused(kernel):
    """Attention would cross documents, see above."""
    with_mask, model, given = make("llama", "sdpa"), make("llama", flash_kernel.NAME), batch()
    with pytest.raises(ValueError, match="bounds of the documents in several rows: add"):
        attention_within_documents(given, model.config)
    with torch.no_grad(), pytest.raises(ValueError, match="documents in several rows"):
        sum_of_model_losses(model.eval(), model, given)
    row = {name: each[:1] for name, each in given.items()}
    one_position = {**given, "position_ids": row["position_ids"]}  # for all rows
    with pytest.raises(ValueError, match="documents in several rows"):
        attention_within_documents(one_position, model.config)
    found = []
    with torch.no_grad():
        for each in (with_mask, model):  # in a single row, transformers finds them
            found.append(sum_of_model_losses(each.eval(), each, row))
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)
    for rows, config in (
        (given, with_mask.config),
        (given, None),
        ({"input_ids": given["input_ids"]}, model.config),
    ):
        with attention_within_documents(rows, config):
            pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("are_separate", [True, False])
def test_the_device_is_not_read(kernel, kind, are_separate):
    """On the meta device that is an error, as in transformers' own search for documents in a single row."""
    model = make(kind, flash_kernel.NAME).to("meta")
    given = {name: each for name, each in batch().items() if are_separate or name != "position_ids"}
    row = {name: each[:1] for name, each in given.items()}
    for each in (given, row):
        uploaded = upload(each, torch.device("meta"), model.config)
        with attention_within_documents(uploaded, model.config):
            model(**uploaded).loss.backward()
    assert all(each.is_meta for each in gradients(model).values())
    uploaded = upload(row, torch.device("meta"))
    with attention_within_documents(uploaded, model.config), pytest.raises(RuntimeError, match="meta"):
        model(**uploaded)


def test_the_switch_of_deterministic_runs_reaches_the_kernel(kernel, monkeypatch):
    model = make("llama", flash_kernel.NAME)
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv(FLASH_VARIABLE, value)
        model(**upload(batch(), CPU, model.config))
        assert kernel.is_deterministic is expected


@every_value(kind=KINDS, cuts=[(), (1, 2, 3)], num_rows=[1, 3])
def test_stages_of_a_pipeline_find_documents_in_the_positions(kernel, kind, cuts, num_rows):
    """`num_rows` of positions: one may be for all rows."""
    given = batch()
    positions = given["position_ids"][:num_rows]
    inputs = given["input_ids"], torch.ones(3, 1, dtype=torch.long), positions
    with_mask, model = make(kind, "sdpa"), make(kind, flash_kernel.NAME)
    with torch.no_grad():
        expected = with_mask(given["input_ids"], position_ids=positions).logits
        parts = parts_of(model)
        for start, stop in pairwise([0, *cuts, len(parts)]):
            inputs = run_parts(parts[start:stop], inputs, BlockInputs(model))
    torch.testing.assert_close(inputs, expected, **EXACT)
    of_row = BOUNDS[:5]
    repeated = [0, *(18 * row + bound for row in range(3) for bound in of_row[1:])]
    assert kernel.calls == [BOUNDS if num_rows == 3 else repeated] * 2


def test_a_batch_gets_bounds_for_flash_attention_only(kernel):
    for attention, names in ((flash_kernel.NAME, {"cu_seq_lens_q", "max_length_q"}), ("sdpa", set())):
        config = make("llama", attention).config
        added = upload(batch(), CPU, config).keys() - batch().keys()
        assert {name for name in added if name.endswith("q")} == names
        one_document = {name: batch()[name] for name in ("input_ids", "labels")}
        assert upload(one_document, CPU, config).keys() == one_document.keys()
    assert upload(batch(), CPU).keys() == batch().keys()  # of a pipeline
    row = {"input_ids": batch()["input_ids"][:1]}
    assert upload(row, CPU, make("llama", flash_kernel.NAME).config)["cu_seq_lens_q"].tolist() == [0, 18]


def test_padding_consists_of_documents_of_one_token():
    positions = torch.tensor([[0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    found = document_bounds(positions)
    assert found["cu_seq_lens_k"].tolist() == [0, 3, 4, 5, 6, 12]
    assert type(found["max_length_k"]) is int  # a tensor would be read in each block
    assert found["max_length_k"] == 6


def test_attention_that_is_not_installed_is_named_with_the_remedy():
    config = make("gpt2", "sdpa").config
    config._attn_implementation = flash_kernel.NAME
    with pytest.raises(UserError, match=r"'flash_attention_2' is not available here .*\"sdpa\""):
        random_model(config, seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_the_real_kernels_keep_documents_apart(kind, attention):
    with_mask = make(kind, "sdpa").cuda()
    try:
        model = make(kind, attention).cuda().bfloat16()
    except ImportError as error:
        pytest.skip(f"{attention} is not installed: {error}")
    found, expected = (upload(batch(), torch.device("cuda"), each.config) for each in (model, with_mask))
    labels = found.pop("labels")
    expected.pop("labels")
    with attention_within_documents(expected, with_mask.config):
        reference = with_mask(**expected).logits
    with attention_within_documents(found, model.config):
        logits = model(**found).logits
    del found["cu_seq_lens_q"]
    with torch.no_grad():
        leaking = model(**found).logits
    loss_of(reference, labels).backward()
    loss_of(logits.double(), labels).backward()
    error = relative_error(logits, reference)
    assert error < 0.03  # bf16
    assert relative_error(leaking, reference) > 3 * error
    for name, each in gradients(model).items():
        assert relative_error(each, gradients(with_mask)[name]) < 0.1, name


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flash_attention_2", True),
        ("flash_attention_3", True),
        ("kernels-community/flash-attn2", True),
        ("sdpa", False),
        ("eager", False),
        (None, False),
    ],
)
def test_all_kinds_of_flash_attention_are_known(name, expected):
    assert uses_flash_attention(GPT2Config(attn_implementation=name)) is expected
