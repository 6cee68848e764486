"""Padded vocabularies: loss, import and export against models without padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quick_cases import every_value
from start_checkpoints import write_start_checkpoint
from tiny_models import KINDS, tiny_model
from transformers import AutoModelForCausalLM

from megalowbit.engine.pipeline.parts import batch_limits
from megalowbit.errors import UserError
from megalowbit.families.config_checks import check_fits
from megalowbit.families.vocabulary import num_tokens, padding_multiple
from megalowbit.hf.checkpoint import build_model, export_checkpoint, read_config
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
from megalowbit.hf.losses.token_losses import sum_of_model_losses
from megalowbit.hf.model import random_model, save_hf
from megalowbit.hf.settings import ModelSettings

TOKENS = torch.arange(20).reshape(2, 10) * 7 % 50
SIZE, PADDED = 50, 64


@pytest.fixture
def folder(tmp_path):
    """Saves a tiny model with 50 tokens, whose logits are far below 0 as those of GPT-2."""

    def save(kind, **more):
        model = tiny_model(kind, vocab_size=SIZE, **more)
        with torch.no_grad():
            model.get_output_embeddings().weight.add_(-0.3)
        model.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return save


def build(source, multiple=PADDED, **more):
    key = "config" if source.suffix else "checkpoint"
    return build_model(ModelSettings(**{key: source}, pad_vocab_to_multiple_of=multiple, **more), seed=0)


def weights_of(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


@given(st.integers(1, 3000), st.integers(2, 600))
def test_the_multiple_of_a_padded_vocabulary_gives_its_rows(size, multiple):
    rows = math.ceil(size / multiple) * multiple
    found = padding_multiple(size, rows)
    if rows == size:
        assert found is None
    else:
        assert found <= multiple
        assert math.ceil(size / found) * found == rows


@every_value(kind=KINDS, tied=[False, True])
def test_padding_adds_rows_and_an_export_has_none(folder, tmp_path, kind, tied):
    source = folder(kind, tie_word_embeddings=tied)
    expected, model = weights_of(source), build(source)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight.shape == head.weight.shape == (PADDED, 32)
    assert (embedding.num_embeddings, head.out_features) == (PADDED, PADDED)
    assert (head.weight is embedding.weight) == tied
    assert (model.config.vocab_size, num_tokens(model.config)) == (PADDED, SIZE)
    assert (
        sum(each.numel() for each in model.parameters())
        == sum(each.numel() for each in build(source, None).parameters())
        + (1 if tied else 2) * (PADDED - SIZE) * 32
    )
    save_hf(model, tmp_path / "back")
    found = weights_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in found.items())
    assert "unpadded" not in (tmp_path / "back" / "config.json").read_text()


@every_value(kind=KINDS, is_chunked=[False, True])
def test_the_loss_is_that_without_padding_up_to_its_bound(folder, kind, is_chunked):
    source = folder(kind)
    plain, model = build(source, None).eval(), build(source)
    if is_chunked:
        chunk_cross_entropy(model)
    expected = plain(TOKENS, labels=TOKENS).loss.item()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    assert 0 < loss.item() - expected <= math.log(1 + (PADDED - SIZE) / SIZE) + 1e-6
    # never a label: training only lowers the logits of the padding
    hidden = model.base_model(TOKENS).last_hidden_state
    for_padding = hidden @ model.get_output_embeddings().weight.grad[SIZE:].T
    assert for_padding.sum() > 0
    targets = torch.roll(TOKENS, -1, 1)
    with torch.no_grad():
        batch = {"input_ids": TOKENS, "labels": targets}
        sums = [sum_of_model_losses(each.eval(), each, batch).item() for each in (plain, model)]
    assert sums[1] == pytest.approx(sums[0], rel=1e-6)  # validation leaves the padding out


def test_a_training_checkpoint_with_padding_is_exported_and_padded_otherwise(folder, tmp_path):
    source = folder("llama")
    write_start_checkpoint(build(source), "bf16", tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "back")
    expected = weights_of(source)
    for name, value in weights_of(tmp_path / "back").items():
        assert value.equal(expected[name])
    for multiple, size in ((None, 50), (2, 50), (7, 56), (128, 128)):
        settings = ModelSettings(checkpoint=tmp_path / "start", pad_vocab_to_multiple_of=multiple)
        model = build_model(settings, seed=0)
        assert model.config.vocab_size == read_config(settings).vocab_size == size
        assert num_tokens(model.config) == SIZE
        assert model.state_dict()["lm_head.weight"][:SIZE].equal(expected["lm_head.weight"])


def test_random_weights_do_not_depend_on_the_padding(folder):
    source = folder("gpt2") / "config.json"
    plain = random_model(read_config(ModelSettings(config=source)), seed=0).state_dict()
    for name, value in build(source).state_dict().items():
        assert value[: len(plain[name])].equal(plain[name])


def test_tokens_beyond_the_padding_are_refused(folder):
    config = read_config(ModelSettings(checkpoint=folder("gpt2"), pad_vocab_to_multiple_of=PADDED))
    check_fits(config, vocab_size=SIZE, sequence_length=8)
    with pytest.raises(UserError, match="has 51 tokens, the model's vocab_size is only 50"):
        check_fits(config, vocab_size=SIZE + 1, sequence_length=8)
    assert batch_limits(config).vocabulary == SIZE
