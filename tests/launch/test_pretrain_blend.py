"""Blends on real processes: losses by source in every layout, and a killed run that continues.

Samples contain their own number, and those of the second source begin at 1000. What a rank took it has
written down itself.
"""

import signal

import pytest
from forked_ranks import Ranks, run_ranks
from quick_cases import slow_except
from recorded_samples import FOLDER, LENGTH, read

from launchers import metrics, write_config

BATCH, STEPS, SIZE = 12, 14, 130
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LAYOUTS = {  # processes, keys
    "two ranks": (2, {}),
    "tensor 2": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "stages 2": (2, {"pipeline": {"stages": 2}}),
    "ZeRO 3": (2, {"zero_optimization": {"stage": 3}}),
}


def write_run(folder, *, weights, keys=None, **block):
    for name, first in (("a", 0), ("b", 1000)):
        lines = [f"{number:0{LENGTH - 1}d}\n" for number in range(first, first + SIZE)]
        (folder / f"{name}.txt").write_text("".join(lines))
    sources = {name: {"corpus": f"{name}.txt", "weight": weight} for name, weight in weights.items()}
    block = {
        "data": {"sources": sources, "sequence_length": LENGTH},
        "recipe": "bf16",
        "precision": "fp32",
        "run": {"steps": STEPS},
        "checkpoint": {"every": 3, "export_hf": False},
        **block,
    }
    sizes = {"train_batch_size": BATCH, "gradient_accumulation_steps": "auto"}
    write_config(folder, model=NO_DROPOUT, block=block, **sizes, **(keys or {}))


def losses(folder):
    return [{key: row[key] for key in ("loss", "loss/a", "loss/b")} for row in metrics(folder)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("one")
    write_run(folder, weights={"a": 3, "b": 1}, run={"steps": 4})
    done = run_ranks("--ds-config", folder / "tiny.json", "--run-dir", folder / "run", cwd=folder)
    assert done.code == 0, done.output
    return losses(folder / "run")


@pytest.mark.parametrize("layout", slow_except(["stages 2"], LAYOUTS))
def test_every_layout_finds_the_same_losses(one, tmp_path, layout):
    processes, keys = LAYOUTS[layout]
    write_run(tmp_path, weights={"a": 3, "b": 1}, keys=keys, run={"steps": 4})
    arguments = ("--ds-config", tmp_path / "tiny.json", "--run-dir", tmp_path / "run")
    done = run_ranks(*arguments, cwd=tmp_path, processes=processes)
    assert done.code == 0, done.output
    found = losses(tmp_path / "run")
    assert len(found) == len(one) == 4
    for row, expected in zip(found, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
        assert (9 * row["loss/a"] + 3 * row["loss/b"]) / BATCH == pytest.approx(row["loss"], rel=1e-6)
        assert row["loss/a"] != row["loss/b"]


def start(folder, attempt, world_size):
    samples = folder / f"samples {attempt}"
    samples.mkdir()
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", folder / "run", "--resume", "auto")
    hook = "recorded_samples.install"
    return Ranks(folder, *arguments, world_size=world_size, hook=hook, **{FOLDER: str(samples)})


def newest(folder):
    """Step of the newest complete checkpoint."""
    return max((int(p.parent.name[5:]) for p in folder.glob("checkpoints/step-*/manifest.json")), default=0)


def test_a_killed_run_goes_on_with_other_weights_and_ranks(tmp_path):
    """Two ranks are killed, one goes on with other weights and is killed, three end the run."""
    attempts = [(2, {"a": 3, "b": 1}, 6), (1, {"a": 1, "b": 5}, 9), (3, {"a": 1, "b": 5}, None)]
    starts, taken, logs = [], {}, []
    for attempt, (world_size, weights, until) in enumerate(attempts):
        write_run(tmp_path, weights=weights)
        starts.append(newest(tmp_path / "run"))
        with start(tmp_path, attempt, world_size) as ranks:
            if until is None:
                assert ranks.wait()
                assert ranks.codes == [0] * world_size, ranks.output()
            else:
                ranks.wait_until(lambda until=until: newest(tmp_path / "run") >= until)
                ranks.send(signal.SIGKILL, range(world_size))
                assert ranks.wait()
            logs.append(ranks.logs[0].read_text())
        # what was taken after the last checkpoint is not in the run, which takes it again
        taken = {position: each for position, each in taken.items() if position < starts[-1] * BATCH}
        taken |= dict(read(tmp_path / f"samples {attempt}"))
    assert (tmp_path / "run" / "DONE").exists()
    assert starts[0] == 0 < 6 <= starts[1] < 9 <= starts[2] < STEPS
    numbers = [number for _, number in sorted(taken.items())]
    assert len(numbers) == len(set(numbers)) == BATCH * STEPS  # within an epoch: none twice
    change = starts[1] * BATCH
    for part, share in ((numbers[:change], 1 / 4), (numbers[change:], 5 / 6)):
        count = 0
        for place, number in enumerate(part, start=1):
            count += number >= 1000
            assert abs(count - place * share) <= 0.5 + 1e-9
    assert "changed   megalowbit.data.sources.b.weight: 1.0 → 5.0" in logs[1]
    assert "changed   megalowbit.data.sources" not in logs[2]
    for step, row in enumerate(metrics(tmp_path / "run")):
        share = sum(number >= 1000 for number in numbers[step * BATCH : (step + 1) * BATCH]) / BATCH
        mean = share * row["loss/b"] + (1 - share) * row["loss/a"]
        assert mean == pytest.approx(row["loss"], rel=1e-6)
