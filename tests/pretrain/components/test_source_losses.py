"""Runs on a blend of sources: losses by source, resumes with other weights, rollbacks, refusals."""

import json
import shutil

import numpy as np
import pytest
import torch
from host_reads import HostReads
from quick_cases import slow_except
from safetensors.torch import load_file

from launchers import SPEEDS, training_text
from megalowbit.data.loader import SEED_STEP, ShardedLoader, build_loader
from megalowbit.data.order.permutation import sample_index
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.components.loss_guard import GuardDecision
from megalowbit.pretrain.components.source_losses import SourceLosses
from megalowbit.pretrain.loop import roll_back, train, train_step
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.run import pretrain
from megalowbit.telemetry.sinks.console import Console

LENGTH = 32
PER_STEP = 4  # samples
KINDS = {
    "plain": (),
    "chunks": ("megalowbit.chunked_cross_entropy=true",),
    "ZeRO 3": ("zero_optimization.stage=3",),
    "chunks and ZeRO 3": ("megalowbit.chunked_cross_entropy=true", "zero_optimization.stage=3"),
    "retries": (
        "megalowbit.precision=fp16", 'megalowbit.grad_scaler={"initial_scale": 16}',
        "megalowbit.run.overflow_retries=2",
    ),
}  # fmt: skip


@pytest.fixture
def blend(tmp_path):
    """Overrides that name two sources, whose samples say where they are from."""
    texts = {"prose": training_text().lower(), "shout": training_text().upper()[:20000]}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)

    def blend(*, phases=(), **measures):
        sources = {
            name: {"corpus": str(tmp_path / f"{name}.txt"), **measure} for name, measure in measures.items()
        }
        data = {"sources": sources, "phases": list(phases), "sequence_length": LENGTH}
        return (f"megalowbit.data={json.dumps(data)}",)

    return blend


@pytest.fixture
def taken(monkeypatch):
    """The source of each sample that was taken, by its text, in order."""
    found, take = [], ShardedLoader.__next__

    def take_and_note(loader):
        batch = take(loader)
        for row in batch["input_ids"]:
            text = bytes(row.tolist()).decode()
            found.append((text, "shout" if text.isupper() else "prose"))
        return batch

    monkeypatch.setattr(ShardedLoader, "__next__", take_and_note)
    return found


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in SPEEDS} for row in rows]


def of_shout(taken):
    return [source for _, source in taken].count("shout")


THREE_TO_ONE = {"prose": {"weight": 3}, "shout": {"weight": 1}}


@pytest.mark.parametrize("kind", slow_except(["plain", "chunks and ZeRO 3"], KINDS))
def test_losses_by_source_have_the_loss_as_their_mean(resolve, blend, taken, tmp_path, kind):
    rows = run(resolve(*blend(**THREE_TO_ONE), *KINDS[kind]), tmp_path / "run")
    for step, row in enumerate(rows):
        count = of_shout(taken[step * PER_STEP : (step + 1) * PER_STEP])
        assert count == 1  # in each step, because it has four samples
        mean = (3 * row["loss/prose"] + row["loss/shout"]) / 4
        assert mean == pytest.approx(row["loss"], rel=1e-3 if "retries" in kind else 1e-6)
        assert row["loss/prose"] != row["loss/shout"]


def test_losses_by_source_are_those_of_the_rows(build_job, blend, monkeypatch, tmp_path):
    """Against transformers' own loss of each row alone, before the update."""
    job = build_job(*blend(**THREE_TO_ONE), "megalowbit.recipe=bf16", "megalowbit.precision=fp32")
    job.plan_data()
    seen, expected = [], {"prose": [], "shout": []}
    model, take = job.engine.module, ShardedLoader.__next__

    def take_and_note(loader):
        seen.append(take(loader))
        for row, place in zip(seen[-1]["input_ids"], seen[-1]["sources"].tolist(), strict=True):
            model.eval()  # no dropout
            with torch.no_grad():
                loss = model(input_ids=row[None], labels=row[None]).loss.item()
            model.train()
            expected[("prose", "shout")[place]].append(loss)
        return seen[-1]

    monkeypatch.setattr(ShardedLoader, "__next__", take_and_note)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    console = Console(6, log_every=1)
    with Recorder(job, console, is_main=True, is_resume=False) as recorder:
        train(job, recorder)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    for name, per_step in (("prose", 3), ("shout", 1)):
        for step, row in enumerate(rows):
            mean = sum(expected[name][step * per_step : (step + 1) * per_step]) / per_step
            assert row[f"loss/{name}"] == pytest.approx(mean, rel=1e-5)


def test_a_source_without_a_sample_has_no_loss(resolve, blend, taken, tmp_path):
    rows = run(resolve(*blend(prose={"weight": 7}, shout={"weight": 1})), tmp_path / "run")
    counts = [of_shout(taken[step * PER_STEP : (step + 1) * PER_STEP]) for step in range(6)]
    assert sorted(counts) == [0, 0, 0, 1, 1, 1]
    assert [row["loss/shout"] is None for row in rows] == [not count for count in counts]
    assert all(row["loss/prose"] is not None for row in rows)


def test_the_summary_has_the_last_loss_of_a_source_that_gives_no_more(resolve, blend, tmp_path):
    phases = [{"from_step": 2, "weights": {"prose": 1, "shout": 0}}]
    overrides = (*blend(phases=phases, **THREE_TO_ONE), "megalowbit.checkpoint.every=1")
    rows = run(resolve(*overrides, "megalowbit.run.steps=3"), tmp_path / "run")
    rows = run(resolve(*overrides, "megalowbit.run.steps=4"), tmp_path / "run", is_resume=True)
    assert [row["loss/shout"] is None for row in rows] == [False, False, True, True]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["sources"]
    assert found["shout"]["loss"] == rows[1]["loss/shout"]
    assert found["prose"]["loss"] == rows[3]["loss/prose"]


def test_a_loss_that_is_not_finite_stays_in_its_source(build_job, blend):
    job = build_job(*blend(**THREE_TO_ONE))
    losses = job.find(SourceLosses)
    labels = torch.zeros((3, 5), dtype=torch.int64)
    labels[1, 2:] = -100  # one predicted token
    losses.begin_attempt()
    losses.add(torch.tensor([0, 1, 0]), labels, torch.tensor([4.0, torch.nan, 8.0], dtype=torch.float64))
    assert losses.sums[0] == 12
    assert losses.sums[1].isnan()
    assert losses.sums[2:].tolist() == [8, 1]
    losses.note([12.0, 0.0, 8.0, 0.0])
    assert losses.facts({}) == {"loss/prose": 1.5, "loss/shout": None}


@pytest.mark.parametrize("kind", slow_except(["plain"], KINDS))
def test_training_does_not_notice_losses_by_source(resolve, blend, tmp_path, monkeypatch, kind):
    rows = run(resolve(*blend(**THREE_TO_ONE), *KINDS[kind]), tmp_path / "with")
    monkeypatch.setattr(SourceLosses, "build", classmethod(lambda *_: None))
    without = run(resolve(*blend(**THREE_TO_ONE), *KINDS[kind]), tmp_path / "without")
    assert without == [
        {key: value for key, value in row.items() if not key.startswith("loss/")} for row in rows
    ]
    weights = [load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("with", "without")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_losses_by_source_read_the_device_no_further_time(build_job, blend):
    places = []
    for overrides in (blend(**THREE_TO_ONE), ()):
        job = build_job(*overrides)
        job.plan_data()
        train_step(job)  # state is made, kernels are checked
        with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads:
            train_step(job)
        places.append(reads.places)
    assert places[0] == places[1]
    assert places[0]["megalowbit.optim.gradients.norm.read"] == 1


def test_one_source_trains_as_one_corpus(resolve, blend, tmp_path):
    found = run(resolve(*blend(prose={"weight": 5})), tmp_path / "blend")
    corpus = f"megalowbit.data.corpus={tmp_path / 'prose.txt'}"
    expected = run(resolve(corpus), tmp_path / "corpus")
    assert [{**row, "loss/prose": row["loss"]} for row in expected] == [
        {**row, "loss/prose": pytest.approx(row["loss/prose"], rel=1e-6)} for row in found
    ]
    assert found[0].keys() - expected[0].keys() == {"loss/prose"}


def test_a_resumed_run_repeats_a_blend_bit_for_bit(resolve, blend, taken, tmp_path, capsys):
    phases = [{"from_step": 5, "weights": {"prose": 1, "shout": 4}}]
    overrides = (
        *blend(phases=phases, prose={"weight": 0.61803}, shout={"weight": 0.38197}),
        "megalowbit.run.steps=8",
        "megalowbit.checkpoint.every=3",
    )
    whole = run(resolve(*overrides), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for name in ("hf", "checkpoints/step-00000008", "checkpoints/step-00000006"):
        shutil.rmtree(tmp_path / "resumed" / name)
    for name in ("DONE", "summary.json"):
        (tmp_path / "resumed" / name).unlink()
    line = "shout: 38.1970% of the samples until step 5, then 80.0000%; 53.8731% of the whole run, from "
    assert line in capsys.readouterr().out
    read = list(taken)
    assert run(resolve(*overrides), tmp_path / "resumed", is_resume=True) == whole
    assert taken == [*read, *read[3 * PER_STEP :]]
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "resumed")]
    assert summaries[0]["sources"] == summaries[1]["sources"]
    assert summaries[0]["sources"]["shout"]["samples"] == of_shout(read)
    # 20 samples at 0.38197, then 12 at 0.8: exact to a sample over both
    assert abs(of_shout(read) - (20 * 0.38197 + 12 * 0.8)) <= 0.5


def test_weights_changed_on_resume_lose_and_repeat_no_sample(resolve, blend, taken, tmp_path, capsys):
    run(resolve(*blend(**THREE_TO_ONE), "megalowbit.run.steps=5"), tmp_path / "run")
    assert of_shout(taken) == 5
    changed = blend(prose={"weight": 1}, shout={"weight": 4})
    rows = run(resolve(*changed, "megalowbit.run.steps=10"), tmp_path / "run", is_resume=True)
    assert len(rows) == 10
    assert abs(of_shout(taken[20:]) - 16) <= 0.5
    output = capsys.readouterr().out
    assert "changed   megalowbit.data.sources.prose.weight: 3.0 → 1.0" in output
    assert "source    shout: 80.0000% of " in output
    for name in ("prose", "shout"):  # each source goes on in its order
        texts = [text for text, source in taken if source == name]
        assert texts == alone(resolve, tmp_path / f"{name}.txt", ("prose", "shout").index(name), len(texts))


def alone(resolve, path, place, count):
    """The first texts of a source in its order: samples of one corpus, with the seed of that place."""
    data = resolve(f"megalowbit.data.corpus={path}").settings.data
    seed = data.seed + place * SEED_STEP
    dataset = build_loader(data, micro_batch_size=1, rank=0, world_size=1).dataset
    epochs, positions = np.divmod(np.arange(count), dataset.num_samples)
    rows = dataset.batch(sample_index(seed, epochs, positions, dataset.num_samples))
    return [bytes(row.tolist()).decode() for row in rows]


def test_a_rollback_keeps_the_steps_of_phases(build_job, blend, taken):
    phases = [{"from_step": 6, "weights": {"prose": 0, "shout": 1}}]
    job = build_job(
        *blend(phases=phases, prose={"weight": 1}, shout={"weight": 0}),
        "megalowbit.checkpoint.every=2",
        "megalowbit.run.steps=8",
    )
    job.plan_data()
    console = Console(8, log_every=1)
    with Recorder(job, console, is_main=True, is_resume=False) as recorder:
        for _ in range(5):
            recorder.step(train_step(job).facts)
            if job.step % 2 == 0:
                job.save()
        roll_back(job, recorder, GuardDecision(action="roll back", line="a test", since=4))
        assert job.step == 2
        train(job, recorder)
    # five steps, then those after step 2 with new data: the phase begins after step 6 as before
    assert [source for _, source in taken] == ["prose"] * (9 * PER_STEP) + ["shout"] * (2 * PER_STEP)
    assert len({text for text, _ in taken}) == len(taken)
    assert [part.start for part in job.loader.parts] == [0, 5 * PER_STEP]


def test_amounts_are_those_of_the_whole_run(resolve, blend, taken, tmp_path):
    """Tokens of one source, the rest from the other; then fewer tokens are left to give after a resume."""
    steps = 10
    first = blend(prose={"weight": 1}, shout={"tokens": 12 * LENGTH})
    run(resolve(*first, f"megalowbit.run.steps={steps}"), tmp_path / "run")
    assert of_shout(taken) == 12
    longer = blend(prose={"weight": 1}, shout={"tokens": 17 * LENGTH})
    run(resolve(*longer, f"megalowbit.run.steps={2 * steps}"), tmp_path / "run", is_resume=True)
    assert (len(taken), of_shout(taken)) == (2 * steps * PER_STEP, 17)


def test_other_sources_on_resume_are_refused(resolve, blend, tmp_path):
    run(resolve(*blend(**THREE_TO_ONE), "megalowbit.run.steps=3"), tmp_path / "run")
    (tmp_path / "noise.txt").write_text("noise " * 2000)
    for changed, message in (
        (
            {"prose": {"weight": 1}},
            r"the checkpoint blends prose, shout, and this run blends prose: resume with the sources of the "
            r"checkpoint \(a weight of 0 leaves one out\)",
        ),
        (
            {"prose": {"weight": 1}, "noise": {"weight": 1}},
            "blends prose, shout, and this run blends noise, prose",
        ),
        (None, "is of a blend of prose, shout, and this run reads corpus .*text.txt"),
        (
            {"prose": {"weight": 1}, "shout": {"tokens": 2 * LENGTH}},
            r"shout.tokens = 64 is less than the run has read: 96",
        ),
    ):
        overrides = () if changed is None else blend(**changed)
        with pytest.raises(UserError, match=message):
            run(resolve(*overrides, "megalowbit.run.steps=6"), tmp_path / "run", is_resume=True)


def test_a_blend_does_not_continue_one_corpus_or_other_text(resolve, blend, tmp_path):
    run(resolve("megalowbit.run.steps=2"), tmp_path / "one")
    overrides = blend(**THREE_TO_ONE)
    with pytest.raises(
        UserError, match="the checkpoint is of a run on one corpus, and this run blends prose"
    ):
        run(resolve(*overrides, "megalowbit.run.steps=4"), tmp_path / "one", is_resume=True)
    run(resolve(*overrides, "megalowbit.run.steps=2"), tmp_path / "two")
    (tmp_path / "shout.txt").write_text(training_text().upper()[:20001])
    with pytest.raises(UserError, match=r"the text of source shout \(corpus .*shout.txt\), its tokenizer"):
        run(resolve(*overrides, "megalowbit.run.steps=4"), tmp_path / "two", is_resume=True)
