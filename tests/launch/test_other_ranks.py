"""A run resumes with fewer and with more ranks: the same samples in the same steps, and the same losses.

Two ranks, then one, then three, with one batch size; the epochs end in the middle of steps. What a rank took
it has written down itself.
"""

import math
import signal

import pytest
from forked_ranks import Ranks, run_ranks
from recorded_samples import FOLDER, LENGTH, read, write_corpus

from launchers import metrics, write_config

BATCH, STEPS, NUM_SAMPLES = 12, 16, 43
UNTIL = {2: 4, 1: 9, 3: STEPS}  # number of ranks: step that is waited for before they are asked to stop
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # its masks differ by rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    data = {"corpus": "numbers.txt", "sequence_length": LENGTH, "tokenizer": "byte"}
    block = {
        "data": data, "recipe": "bf16", "precision": "fp32", "run": {"steps": STEPS},
        "checkpoint": {"export_hf": False},
    }  # fmt: skip
    write_config(
        folder, model=NO_DROPOUT, block=block, train_batch_size=BATCH, gradient_accumulation_steps="auto",
        zero_optimization={"stage": 1},
    )  # fmt: skip
    write_corpus(folder / "numbers.txt", NUM_SAMPLES)
    return folder


def start(folder, name, world_size):
    samples = folder / f"samples of {name}"
    samples.mkdir(exist_ok=True)
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", folder / name, "--resume", "auto")
    hook = "recorded_samples.install"
    return Ranks(folder, *arguments, world_size=world_size, hook=hook, **{FOLDER: str(samples)})


@pytest.fixture(scope="module")
def undisturbed(folder):
    with start(folder, "undisturbed", 1) as ranks:
        assert ranks.wait()
        assert ranks.codes == [0], ranks.output()
    return read(folder / "samples of undisturbed"), metrics(folder / "undisturbed")


def newest(run):
    rows = metrics(run)
    return rows[-1]["step"] if rows else 0


@pytest.fixture(scope="module")
def changing(folder):
    """Samples, records and logs of the run whose number of ranks changes."""
    logs = []
    for world_size, until in UNTIL.items():
        with start(folder, "changing", world_size) as ranks:
            if until < STEPS:
                ranks.wait_until(lambda until=until: newest(folder / "changing") >= until)
                ranks.send(signal.SIGUSR1, [world_size - 1])
            assert ranks.wait()
            assert ranks.codes == [0] * world_size, ranks.output()
            logs.append(ranks.logs[0].read_text())
    return read(folder / "samples of changing"), metrics(folder / "changing"), logs


@pytest.mark.slow
def test_every_sample_is_used_once_and_at_its_step(changing, undisturbed):
    taken, expected = changing[0], undisturbed[0]
    assert [position for position, _ in taken] == list(range(BATCH * STEPS))
    assert taken == expected
    numbers = [number for _, number in taken]
    for epoch in range(math.floor(BATCH * STEPS / NUM_SAMPLES)):
        start = epoch * NUM_SAMPLES
        assert sorted(numbers[start : start + NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    assert numbers[:NUM_SAMPLES] != numbers[NUM_SAMPLES : 2 * NUM_SAMPLES]


@pytest.mark.slow
def test_losses_equal_those_of_an_uninterrupted_run(changing, undisturbed):
    rows, expected = changing[1], undisturbed[1]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for name in ("loss", "lr", "grad_norm", "tokens"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=1e-6), name
    assert expected[-1]["loss"] < 0.8 * expected[0]["loss"]


@pytest.mark.slow
def test_each_attempt_logs_its_number_of_ranks(changing):
    logs = changing[2]
    for log, world_size in zip(logs, UNTIL, strict=True):
        assert f"tokens per step on {world_size} process" in log
    for log, change in zip(
        logs[1:], ("2 processes continued with 1", "1 processes continued with 3"), strict=True
    ):
        assert f"checkpoint of {change}" in log
        assert "changed   gradient_accumulation_steps: " in log


@pytest.mark.slow
def test_an_indivisible_batch_is_a_one_line_error(folder):
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "5",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    arguments = ("--ds-config", "tiny.json", "--run-dir", "new", "--resume", "auto")
    done = run_ranks(*arguments, cwd=folder, **place)
    assert done.code == 2, done.output
    (line,) = done.errors
    assert "train_batch_size" in line
    assert "12" in line
