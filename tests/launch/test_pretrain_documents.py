"""Separate documents on real processes: equal losses in every layout, those of each document alone."""

import json
import shutil

import pytest
import torch
from forked_ranks import run_ranks
from quick_cases import slow_except
from transformers import AutoModelForCausalLM

from launchers import metrics, training_text, write_config

LENGTH = 32
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "validation/loss", "validation/bits_per_byte")
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DOCUMENTS = [line[: 7 + 5 * (number % 6)] for number, line in enumerate(training_text().splitlines())]
HELD_OUT = DOCUMENTS[-40:]
LAYOUTS = {  # processes, keys
    "two ranks": (2, {"gradient_accumulation_steps": 1}),
    "tensor 2": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "stages 2": (2, {"pipeline": {"stages": 2}}),
    "ZeRO 3": (2, {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}}),
}


def train(folder, name, *arguments, processes=1, data=None, **keys):
    for file, documents in (("train", DOCUMENTS[:-40]), ("held", HELD_OUT)):
        lines = [json.dumps({"text": each}) + "\n" for each in documents]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    data = {"corpus": "train.jsonl", "sequence_length": LENGTH, "packing": "documents", **(data or {})}
    block = {
        "precision": "fp32",
        "recipe": "bf16",
        "data": {**data, "validation": {"corpus": "held.jsonl"}},
        "validation": {"every": 3},
        "checkpoint": {"every": 3},
    }
    write_config(folder, model=NO_DROPOUT, block=block, **keys)
    given = ("--ds-config", folder / "tiny.json", "--run-dir", folder / name, *arguments)
    done = run_ranks(*given, cwd=folder, processes=processes)
    assert done.code == 0, done.output
    return done.output


def rows(folder):
    return [{key: row[key] for key in KEYS if key in row} for row in metrics(folder)]


def loss_alone(folder, *, masks_first):
    """The mean loss of the text by transformers alone, one piece of a document after another."""
    model = AutoModelForCausalLM.from_pretrained(folder / "hf").double().eval()
    tokens = [token for text in HELD_OUT for token in (*text.encode(), 0)]
    losses = []
    for start in range(0, len(tokens) - 1, LENGTH):
        first = min(start, len(tokens) - 1 - LENGTH)
        begin = first
        for place in range(first, first + LENGTH):
            if place + 1 == first + LENGTH or tokens[place] == 0:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([tokens[begin : place + 1]])).logits[0]
                targets = torch.tensor(tokens[begin + 1 : place + 2])
                each = -logits.log_softmax(-1)[torch.arange(len(targets)), targets]
                is_counted = [
                    at >= start and not (masks_first and tokens[at] == 0) for at in range(begin, place + 1)
                ]
                losses += each[is_counted].tolist()
                begin = place + 1
    assert len(losses) == len(tokens) - 1 - masks_first * tokens[:-1].count(0)
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("documents")
    output = train(folder, "one")
    assert "packing documents" in output
    return folder


def test_the_loss_of_validation_is_that_of_documents_alone(folder):
    found = rows(folder / "one")[-1]["validation/loss"]
    assert found == pytest.approx(loss_alone(folder / "one", masks_first=False), abs=1e-6)


@pytest.mark.slow
def test_first_tokens_of_documents_are_not_predicted_on_request(tmp_path):
    output = train(tmp_path, "one", data={"eod_mask_loss": True})
    assert "packing documents, eod_mask_loss" in output
    found = rows(tmp_path / "one")[-1]["validation/loss"]
    assert found == pytest.approx(loss_alone(tmp_path / "one", masks_first=True), abs=1e-6)


@pytest.mark.parametrize("layout", slow_except(["stages 2"], LAYOUTS))
def test_every_layout_finds_the_same_losses(folder, layout):
    processes, keys = LAYOUTS[layout]
    train(folder, layout, processes=processes, **keys)
    for row, expected in zip(rows(folder / layout), rows(folder / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", slow_except(["two ranks"], ["one", *LAYOUTS]))
def test_the_loss_is_the_mean_of_all_labels_of_a_step(tmp_path, layout):
    """Micro-batches and ranks with different numbers of labels train like one large micro-batch."""
    data = {"packing": "best_fit", "eod_mask_loss": True, "sequence_length": 48}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    output = train(tmp_path, "large", data=data, **sizes)
    assert "packing best_fit, eod_mask_loss (" in output
    processes, keys = LAYOUTS.get(layout, (1, {}))
    sizes = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "train_batch_size": 4,
    }
    train(tmp_path, "small", processes=processes, data=data, **{**keys, **sizes})
    for row, expected in zip(rows(tmp_path / "small"), rows(tmp_path / "large"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("packing", slow_except(["documents"], ["documents", "best_fit"]))
def test_a_resumed_run_repeats_itself_bit_for_bit(folder, packing):
    data, whole, resumed = {"packing": packing}, folder / "one", folder / f"resumed {packing}"
    if packing != "documents":
        whole = folder / packing
        train(folder, whole.name, data=data)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "hf")
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    output = train(folder, resumed.name, "--resume", "auto", data=data)
    assert "resumed after step 3" in output
    assert rows(resumed) == rows(whole)
    given = ("--ds-config", folder / "tiny.json", "--run-dir", whole, "--resume", "auto")
    changed = ("--set", "megalowbit.data.packing=wrapped", "--set", "megalowbit.run.steps=7")
    done = run_ranks(*given, *changed, cwd=folder)
    assert done.code == 2
    assert f"megalowbit.data.packing was '{packing}' in the run to resume and is 'wrapped' now" in done.output


def test_attention_across_documents_gives_other_losses(folder, tmp_path):
    """What is compared above depends on the packing."""
    train(tmp_path, "wrapped", data={"packing": "wrapped"})
    first, expected = rows(tmp_path / "wrapped")[0], rows(folder / "one")[0]
    assert first["loss"] != pytest.approx(expected["loss"], rel=1e-4)
    assert first["tokens"] == expected["tokens"]
