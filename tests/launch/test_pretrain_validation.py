"""Validation on real processes: the same loss in every layout, and training that does not notice it."""

import json

import pytest
import torch
from forked_ranks import run_ranks
from quick_cases import slow_except
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launchers import SPEEDS, metrics, training_text, write_config

LENGTH = 32
TEXT = (
    training_text()[100:3211] + "end"
)  # 97 sequences and 10 tokens: the last batch is uneven in all layouts
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LAYOUTS = {  # processes, keys
    "one": (1, {}),
    "two ranks": (2, {"gradient_accumulation_steps": 1}),
    "tensor 2": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "stages 2": (2, {"pipeline": {"stages": 2}}),
    **{
        f"ZeRO {stage}": (2, {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": stage}})
        for stage in (1, 2, 3)
    },
}
OTHERS = slow_except(["stages 2", "ZeRO 3"], [name for name in LAYOUTS if name != "one"])


def section(folder, **settings):
    (folder / "held.txt").write_text(TEXT)
    data = {"corpus": "text.txt", "sequence_length": LENGTH, "validation": {"corpus": "held.txt"}}
    return {"data": data, "validation": {"every": 2, "bf16": True, **settings}}


def train(folder, layout, name, block, *arguments, model=NO_DROPOUT):
    processes, keys = LAYOUTS[layout]
    write_config(folder, model=model, block=block, **keys)
    given = ("--ds-config", folder / "tiny.json", "--run-dir", folder / name, *arguments)
    done = run_ranks(*given, cwd=folder, processes=processes)
    assert done.code == 0, done.output
    return done.output


def validations(folder):
    found = {
        row["step"]: {key: value for key, value in row.items() if key.startswith("validation/")}
        for row in metrics(folder)
    }
    return {step: values for step, values in found.items() if values}


def loss_of_export(folder):
    """The mean loss of every token after the first, by transformers alone and in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder / "hf").double().eval()
    tokens = torch.tensor([*TEXT.encode(), 0])
    losses = []
    for start in range(0, len(tokens) - 1, LENGTH):  # the last one ends with the last token
        first = min(start, len(tokens) - 1 - LENGTH)
        with torch.no_grad():
            logits = model(input_ids=tokens[None, first : first + LENGTH]).logits[0]
        targets = tokens[first + 1 : first + LENGTH + 1]
        each = -logits.log_softmax(-1)[torch.arange(LENGTH), targets]
        losses += each[start - first :].tolist()
    assert len(losses) == len(tokens) - 1
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of one process in fp32."""
    folder = tmp_path_factory.mktemp("validation")
    block = {"precision": "fp32", "recipe": "bf16", **section(folder)}
    train(folder, "one", "one", block)
    return folder


def test_the_loss_is_that_of_the_exported_model_token_by_token(folder):
    found = validations(folder / "one")
    assert list(found) == [2, 4, 6]
    assert found[6]["validation/loss"] == pytest.approx(loss_of_export(folder / "one"), abs=1e-6)
    assert found[6]["validation/bf16_loss"] == found[6]["validation/loss"]  # nothing is quantised


@pytest.mark.parametrize("layout", OTHERS)
def test_every_layout_finds_the_same_loss(folder, layout):
    block = {"precision": "fp32", "recipe": "bf16", **section(folder)}
    train(folder, layout, layout, block)
    one, other = (validations(folder / name) for name in ("one", layout))
    assert list(other) == [2, 4, 6]
    assert other[6]["validation/loss"] == pytest.approx(loss_of_export(folder / layout), abs=1e-6)
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=1e-6), (step, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "stages 2", "tensor 2", "ZeRO 3"])
def test_the_loss_leaves_out_what_pads_the_vocabulary(tmp_path, layout):
    model = {"config": "model.json", "pad_vocab_to_multiple_of": 96}  # 256 tokens, 288 rows
    block = {"precision": "fp32", "recipe": "bf16", "model": model, **section(tmp_path)}
    if layout == "ZeRO 3":
        block["chunked_cross_entropy"] = True
    train(tmp_path, layout, "run", block)
    found = validations(tmp_path / "run")
    assert found[6]["validation/loss"] == pytest.approx(loss_of_export(tmp_path / "run"), abs=1e-6)
    exported = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert exported["transformer.wte.weight"].shape == (256, 32)


@pytest.mark.parametrize("layout", slow_except(["stages 2"], LAYOUTS))
def test_training_does_not_notice(tmp_path, layout):
    """In FP4 with stochastic rounding, dropout, cached weights and counts: equal weights and records."""
    model = dict.fromkeys(NO_DROPOUT, 0.1)
    block = {"precision": "bf16", "recipe": "nvfp4", **section(tmp_path)}
    train(tmp_path, layout, "with", block, model=model)
    del block["validation"], block["data"]["validation"]
    train(tmp_path, layout, "without", block, model=model)
    assert validations(tmp_path / "with")
    with_it, without = (
        [
            {key: value for key, value in row.items() if not (key in SPEEDS or key.startswith("validation/"))}
            for row in metrics(tmp_path / name)
        ]
        for name in ("with", "without")
    )
    assert with_it == without
    weights = [load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("with", "without")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("with", "without")]
    assert summaries[0]["best_loss"] == summaries[1]["best_loss"]
