"""lm-eval reads an exported folder, and finds the losses of float64 and of `megalowbit evaluate`."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from environments import environment_with
from transformers import AutoModelForCausalLM

from launchers import ROOT, environment, run, write_config

LM_EVAL = "lm_eval==0.4.13"
LENGTH = 64  # most tokens that the model takes
TEXTS = ["the baker counts blue stones", "naïve 漢字 🙂 " * 12, "x" * LENGTH, "y" * (LENGTH + 1), "é"]
START, REST = "t", "he old fox paints seven clocks b"
ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
"""
CONTINUATION = """
task: local_continuation
dataset_path: json
dataset_kwargs: {data_files: {test: pairs.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{start}}"
doc_to_target: "{{rest}}"
target_delimiter: ""
metric_list: [{metric: perplexity}]
"""


def log_likelihood(model, text):
    """Of all bytes of a text, in float64: windows of `LENGTH` predictions, the last one with more context."""
    tokens = torch.tensor([0, *text.encode()])  # 0 ends a document, and lm-eval begins with it
    total = 0.0
    for first in range(0, len(tokens) - 1, LENGTH):
        last = min(first + LENGTH, len(tokens) - 1)
        start = max(0, last - LENGTH)
        with torch.no_grad():
            of_next = model(tokens[None, start:last]).logits[0].log_softmax(-1)
        places = torch.arange(first - start, last - start)
        total += of_next[places, tokens[first + 1 : last + 1]].sum().item()
    return total


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a GPT-2 that has been trained for a few steps: `run/hf`."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder, block={"precision": "fp32", "recipe": "bf16"})
    done = run("python", "--ds-config", config, "--run-dir", folder / "run", cwd=folder)
    assert done.code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def results(trained, tmp_path_factory):
    """What lm-eval finds: the log-likelihood of each sample, and the results, by task."""
    folder = tmp_path_factory.mktemp("tasks")
    made = environment_with(folder, LM_EVAL)
    (folder / "rolling.yaml").write_text(ROLLING)
    (folder / "continuation.yaml").write_text(CONTINUATION)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "pairs.jsonl").write_text(json.dumps({"start": START, "rest": REST}) + "\n")
    done = subprocess.run(
        [
            made / "bin" / "lm_eval", "--model", "hf",
            "--model_args", f"pretrained={trained / 'run' / 'hf'},dtype=float32",
            "--tasks", "local_text,local_continuation", "--include_path", ".",
            "--device", "cpu", "--batch_size", "1", "--output_path", "out", "--log_samples",
        ],
        cwd=folder, capture_output=True, text=True, timeout=900,
        env={**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("out/*/results_*.json")
    found = {}
    for task, values in json.loads(file.read_text())["results"].items():
        (samples,) = folder.glob(f"out/*/samples_{task}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        found[task] = values, rows
    return found


@pytest.mark.slow
def test_every_text_has_the_likelihood_of_float64(trained, results):
    values, rows = results["local_text"]
    model = AutoModelForCausalLM.from_pretrained(trained / "run" / "hf").double().eval()
    expected = [log_likelihood(model, text) for text in TEXTS]
    assert [row["doc"]["text"] for row in rows] == TEXTS
    assert [float(row["resps"][0][0]) for row in rows] == pytest.approx(expected, rel=1e-5)
    bits = -sum(expected) / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert values["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert values["byte_perplexity,none"] == pytest.approx(2**bits, rel=1e-5)
    assert bits < 7.99  # 8 would be a model that knows nothing


@pytest.mark.slow
def test_evaluate_finds_the_same_loss(trained, results, tmp_path):
    """`evaluate` predicts the same bytes from the same ones: all but the first, in one sequence."""
    (tmp_path / "text.txt").write_text(START + REST)
    section = {"corpus": str(tmp_path / "text.txt")}
    changes = {"data.validation": section, "data.sequence_length": len(REST), "validation.tokens": len(REST)}
    given = [f"--set=megalowbit.{key}={json.dumps(value)}" for key, value in changes.items()]
    program = [sys.executable, "-m", "megalowbit", "evaluate", trained / "run" / "hf"]
    done = subprocess.run(
        [*program, *given, "--output", tmp_path / "loss.json"],
        cwd=trained, capture_output=True, text=True, timeout=300,
        env={**environment(tmp_path / "cache"), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = json.loads((tmp_path / "loss.json").read_text())
    values, rows = results["local_continuation"]
    likelihood, _ = rows[0]["resps"][0][0]  # and whether it is the most likely text
    loss = -float(likelihood) / len(REST)
    assert ours["validation/loss"] == pytest.approx(loss, rel=1e-5)
    assert ours["validation/bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert math.log(values["perplexity,none"]) == pytest.approx(ours["validation/loss"] * len(REST), rel=1e-5)
