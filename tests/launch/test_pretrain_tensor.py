"""The command line with two tensor-parallel ranks: the same run as one process, recorded and exported."""

import json

import pytest
import torch
from forked_ranks import run_ranks, variables
from forks import Forked
from transformers import AutoModelForCausalLM

from launchers import ROOT, environment, free_port, metrics, training_text, write_config

pytestmark = pytest.mark.slow  # in make test: the same of two pipeline stages, and of engines
MEGALOWBIT = ROOT / "megalowbit" / "__main__.py"
KEYS = ("step", "loss", "lr", "loss_scale", "tokens", "skipped_steps")
NEAREST = {"base": "nvfp4-first-block-fp8", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
BLOCK = {
    "precision": "fp32",
    "recipe": NEAREST,
    "checkpoint": {"every": 3},
    "oscillation_reset": {"start": 2, "period": 3, "window": 1, "threshold": 4.0},
}
# dropout of what both ranks hold draws what one process does; that of attention draws by head
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same configuration trained by one process and by two tensor ranks."""
    folder = tmp_path_factory.mktemp("tensor")
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir")
    write_config(folder, model=DROPOUT, block=BLOCK)
    one = run_ranks(*arguments, folder / "one", cwd=folder)
    assert one.code == 0, one.output
    write_config(folder, model=DROPOUT, block=BLOCK, tensor_parallel={"autotp_size": 2})
    two = run_ranks(*arguments, folder / "two", cwd=folder, processes=2)
    assert two.code == 0, two.output
    return folder


def test_two_tensor_ranks_record_the_same_as_one_process(folder):
    """The same batches and masks of dropout on both: other data or seeds change losses in the third digit."""
    one, two = (metrics(folder / name) for name in ("one", "two"))
    assert len(one) == len(two) == 6
    for first, second in zip(one, two, strict=True):
        expected, found = ([row[key] for key in KEYS] for row in (first, second))
        # low-bit rounding turns the last bits of other sums into steps of the format, later in the run
        is_first = first is one[0]
        assert found == pytest.approx(expected, rel=1e-5 if is_first else 1e-3)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5 if is_first else 1e-2)


def test_two_tensor_ranks_reset_the_weights_that_one_process_does(folder):
    one, two = (
        [row for row in metrics(folder / name) if "oscillation/ratio" in row] for name in ("one", "two")
    )
    assert [row["step"] for row in one] == [row["step"] for row in two] == [4]
    for key, minimum in (("oscillation/ratio", 0.5), ("oscillation/reset_share", 0.001)):
        assert one[0][key] > minimum
        assert two[0][key] == pytest.approx(one[0][key], rel=0.02)


def test_a_padded_vocabulary_of_two_tensor_ranks_is_evaluated_and_exported(tmp_path):
    """Under a configuration with the padding and without it, on two ranks; the export on one."""
    (tmp_path / "held.txt").write_text(training_text()[50:2000])
    data = {"corpus": "text.txt", "sequence_length": 32, "validation": {"corpus": "held.txt"}}
    block = {**BLOCK, "recipe": "bf16", "data": data, "validation": {"every": 6}}
    block.pop("oscillation_reset")
    padded = {"config": "model.json", "pad_vocab_to_multiple_of": 96}
    files = []
    for model in (padded, {"config": "model.json"}):
        file = write_config(tmp_path, block={**block, "model": model}, tensor_parallel={"autotp_size": 2})
        files.append(file.rename(tmp_path / f"{len(files)}.json"))
    done = run_ranks("--ds-config", files[0], "--run-dir", tmp_path / "run", cwd=tmp_path, processes=2)
    assert done.code == 0, done.output
    recorded = metrics(tmp_path / "run")[-1]["validation/loss"]
    for file in files:
        assert evaluated(tmp_path, "run", file, processes=2) == recorded
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert exported.config.vocab_size == len(exported.get_input_embeddings().weight) == 256
    one = "tensor_parallel.autotp_size=1"
    for file in files:
        found = evaluated(tmp_path, "run/hf", file, "--set", one)
        assert found == pytest.approx(recorded, rel=1e-6)


def evaluated(folder, path, config, *options, processes=1):
    """The loss that `megalowbit evaluate` finds on so many ranks."""
    port, output = free_port(), folder / "out.json"
    words = ["evaluate", folder / path, "--ds-config", config, "--output", output, *options]
    shared = environment(folder / "cache") | {"PYTHONPATH": str(ROOT)}
    logs, ranks = [folder / f"evaluated-{rank}.log" for rank in range(processes)], []
    for rank, log in enumerate(logs):
        env = {**shared, **variables(rank, processes, port)}
        log.write_text("")
        ranks.append(Forked(MEGALOWBIT, *words, env=env, cwd=folder, output=log))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * processes, "\n".join(log.read_text() for log in logs)
    return json.loads(output.read_text())["validation/loss"]


def test_the_exported_model_equals_that_of_one_process(folder):
    one, two = (AutoModelForCausalLM.from_pretrained(folder / name / "hf") for name in ("one", "two"))
    start = AutoModelForCausalLM.from_config(one.config)
    expected, fresh = one.state_dict(), start.state_dict()
    for name, found in two.state_dict().items():
        distance = torch.linalg.vector_norm(found - expected[name])
        assert distance <= 1e-2 * torch.linalg.vector_norm(expected[name]) + 1e-4, name
    name = "transformer.h.1.mlp.c_fc.weight"
    assert torch.linalg.vector_norm(fresh[name] - expected[name]) > 0.1
