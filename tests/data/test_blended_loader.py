"""Batches of a blend: its own order in each source, exact shares, any ranks, resumes with other weights."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.data.loader import (
    SEED_STEP,
    BlendedDataset,
    BlendedLoader,
    ShardedLoader,
    build_loader,
    count_samples,
)
from megalowbit.data.order.permutation import sample_index
from megalowbit.data.packing import PackedDataset
from megalowbit.data.settings import DataSettings
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError
from megalowbit.labels import IGNORED_LABEL

LENGTH = 4
STEPS = 1000
SIZES = (50, 37, 23, 64, 31)


def dataset(place, size):
    """Samples of a source; each token says the source and the sample."""
    ids = place * 1000 + np.arange(size).repeat(LENGTH)
    return PackedDataset(ids.astype(np.uint16), LENGTH, fingerprint=f"source {place}", name=f"text {place}")


def blend(weights, phases=(), **measures):
    names = [f"s{place}" for place in range(len(weights))]
    sources = {name: {"corpus": name, "weight": weight} for name, weight in zip(names, weights, strict=True)}
    return DataSettings(
        sources=sources,
        phases=[{"from_step": step, "weights": dict(zip(names, each, strict=True))} for step, each in phases],
        sequence_length=LENGTH,
        seed=7,
        **measures,
    )


def loaders(chosen, world_size=1, micro_batch_size=1):
    sources = {name: dataset(place, SIZES[place]) for place, name in enumerate(chosen.sources)}
    return [
        BlendedLoader(
            BlendedDataset(chosen, sources),
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=chosen.seed,
            tokenizer=ByteTokenizer(),
        )
        for rank in range(world_size)
    ]


def take(ranks, num_batches):
    """(source, sample) of each sample, in the order of the positions."""
    found = []
    for _ in range(num_batches):
        for loader in ranks:
            batch = next(loader)
            for row, source in zip(batch["input_ids"][:, 0].tolist(), batch["sources"].tolist(), strict=True):
                assert row // 1000 == source
                found.append((source, row % 1000))
    return found


def in_order(place, count, seed=7):
    """The samples that a source gives, one epoch after another."""
    numbers, size = np.arange(count), SIZES[place]
    return sample_index(seed + place * SEED_STEP, numbers // size, numbers % size, size).tolist()


def shares_by_sample(chosen, step, per_step, count):
    """The shares of the next samples, written down one by one from the settings."""
    found = []
    for number in range(count):
        now = step + number // per_step
        weights = {name: source.weight for name, source in chosen.sources.items()}
        for phase in chosen.phases:
            if phase.from_step <= now:
                weights = phase.weights
        exact = [Fraction(str(weights[name])) for name in chosen.sources]
        found.append([each / sum(exact) for each in exact])
    return found


WEIGHT = st.sampled_from([0, 1, 2, 5, 0.1, 0.35, 1e-3, 0.123457])


@st.composite
def blends(draw, num_sources):
    """Weights that are not all 0, and up to two phases."""
    each = st.lists(WEIGHT, min_size=num_sources, max_size=num_sources).filter(any)
    steps = sorted(draw(st.sets(st.integers(1, 30), max_size=2)))
    return blend(draw(each), [(step, draw(each)) for step in steps])


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_ranks_resumes_and_changes_of_weights_read_what_is_planned(data):
    num_sources = data.draw(st.integers(1, 5))
    chosen, state, step = data.draw(blends(num_sources)), None, 0
    seen, due, given_since, planned = [], [Fraction(0)] * num_sources, [0] * num_sources, []
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            chosen = data.draw(blends(num_sources))
        ranks = loaders(chosen, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)))
        accumulation = data.draw(st.integers(1, 2))
        per_step = ranks[0].samples_per_batch * accumulation
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))  # plain values
            loader.plan(step=step, steps=STEPS, samples_per_step=per_step)
        shares = shares_by_sample(chosen, step, per_step, 31 * per_step)
        if (
            planned[: len(shares)] != shares[: len(planned)]
        ):  # not known before: targets are counted from here
            due, given_since = [Fraction(0)] * num_sources, [0] * num_sources
        num_steps = data.draw(st.integers(0, 8))
        found = take(ranks, num_steps * accumulation)
        for (source, _), share in zip(found, shares, strict=False):
            given_since[source] += 1
            due = [before + each for before, each in zip(due, share, strict=True)]
            assert all(abs(each - count) <= 1 for each, count in zip(due, given_since, strict=True))
        planned, step, seen = shares[len(found) :], step + num_steps, seen + found
        states = [loader.state_dict() for loader in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    for place in range(num_sources):
        samples = [sample for source, sample in seen if source == place]
        assert samples == in_order(place, len(samples))
        assert state["blend"]["counts"][place] == len(samples)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_number_of_ranks_does_not_matter(data):
    chosen = data.draw(blends(data.draw(st.integers(1, 5))))
    (reference,) = loaders(chosen)
    reference.plan(step=0, steps=STEPS, samples_per_step=12)
    state, seen = None, []
    for _ in range(data.draw(st.integers(2, 4))):
        world_size, micro_batch_size = data.draw(st.sampled_from([(1, 12), (4, 3), (3, 2), (6, 2), (2, 3)]))
        ranks = loaders(chosen, world_size, micro_batch_size)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
            loader.plan(step=len(seen) // 12, steps=STEPS, samples_per_step=12)
        seen += take(ranks, 12 // ranks[0].samples_per_batch * data.draw(st.integers(1, 6)))
        state = ranks[-1].state_dict()
    assert seen == take([reference], len(seen))
    assert len(state["blend"]["parts"]) == 1


def test_a_blend_of_one_source_has_its_order():
    (found,) = loaders(blend([0.3]), micro_batch_size=5)
    found.plan(step=0, steps=STEPS, samples_per_step=5)
    one = ShardedLoader(
        dataset(0, SIZES[0]), micro_batch_size=5, rank=0, world_size=1, seed=7, tokenizer=ByteTokenizer()
    )
    assert [sample for _, sample in take([found], 30)] == [
        row % 1000 for _ in range(30) for row in next(one)["input_ids"][:, 0].tolist()
    ]


def test_a_position_of_a_thousand_million_is_continued_at_once():
    """With a state as a run would have it; and a plan whose period is too long for blocks."""
    chosen = blend([0.500001, 0.299999, 0.2])
    (early,) = loaders(chosen, micro_batch_size=8)
    early.plan(step=0, steps=STEPS, samples_per_step=8)
    state = early.state_dict()
    position = 1000 * 10**6
    counts = [500_001_000, 299_999_000, 200_000_000]
    (late,) = loaders(chosen, micro_batch_size=8)
    late.load_state_dict({**state, "position": position, "blend": {**state["blend"], "counts": counts}})
    late.plan(step=position // 8, steps=position, samples_per_step=8)
    assert len(late.parts) == 1
    assert [source for source, _ in take([late], 20)] == [source for source, _ in take([early], 20)]
    assert late.counts["s2"] == 200_000_000 + 32


def test_a_batch_without_a_plan_is_a_mistake():
    (loader,) = loaders(blend([1, 1]))
    with pytest.raises(ValueError, match="call plan"):
        next(loader)
    loader.plan(step=0, steps=STEPS, samples_per_step=1)
    next(loader)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="call plan"):
        next(loader)


def test_a_source_with_less_than_its_share_of_a_micro_batch_is_refused():
    (loader,) = loaders(blend([1, 0, 9]), micro_batch_size=30)  # 27 of the third, which has 23
    with pytest.raises(
        UserError, match=r"source s2 has 23 sequences of 4 tokens, fewer than .* 27: use more"
    ):
        loader.plan(step=0, steps=STEPS, samples_per_step=30)


DAMAGES = {
    "counts": lambda blend: blend["counts"].reverse(),
    "one count": lambda blend: blend["counts"].__setitem__(0, 0),
    "no parts": lambda blend: blend["parts"].clear(),
    "weights": lambda blend: blend["parts"][0]["segments"][0].__setitem__(1, [1, -1]),
    "start": lambda blend: blend["parts"][0]["segments"][0].__setitem__(0, 3),
    "asked": lambda blend: blend["parts"][0].pop("asked"),
    "types": lambda blend: blend["counts"].__setitem__(0, None),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_plan_is_refused(damage):
    (loader,) = loaders(blend([3, 1]), micro_batch_size=8)
    loader.plan(step=0, steps=STEPS, samples_per_step=8)
    take([loader], 3)
    state = json.loads(json.dumps(loader.state_dict()))
    damage(state["blend"])
    (other,) = loaders(blend([3, 1]), micro_batch_size=8)
    with pytest.raises(UserError, match="the plan of the blend in the checkpoint is damaged"):
        other.load_state_dict(state)


def written(folder, **texts):
    sources = {}
    for name, (text, measure) in texts.items():
        (folder / f"{name}.txt").write_text(text)
        sources[name] = {"corpus": str(folder / f"{name}.txt"), **measure}
    return sources


def test_files_are_blended(tmp_path):
    sources = written(tmp_path, b=("B" * 799, {"weight": 1}), a=("A" * 399, {"weight": 0.5}))
    common = {"sources": sources, "sequence_length": 8, "cache_dir": tmp_path / "cache"}
    chosen = DataSettings(**common)
    assert (chosen.corpus, list(chosen.sources)) == ("blend", ["a", "b"])  # in one order, whatever the file's
    loader = build_loader(chosen, micro_batch_size=3, rank=0, world_size=1)
    loader.plan(step=0, steps=10, samples_per_step=3)
    assert count_samples(chosen) == loader.num_samples == 150
    rows = [bytes(row.tolist()).decode() for row in next(loader)["input_ids"]]
    assert sorted(row[0] for row in rows) == ["A", "B", "B"]
    held = DataSettings(**common, tokenizer="bpe", vocab_size=258)
    assert build_loader(held, micro_batch_size=3, rank=0, world_size=1).tokenizer.vocab_size == 258


def test_the_same_text_twice_and_a_missing_file_are_refused_by_name(tmp_path):
    sources = written(tmp_path, b=("same " * 99, {"weight": 1}), a=("same " * 99, {"weight": 1}))
    common = {"sequence_length": 8, "cache_dir": tmp_path / "cache"}
    with pytest.raises(UserError, match=r"data.sources.a and data.sources.b are the same text: leave one"):
        count_samples(DataSettings(sources=sources, **common))
    sources["b"]["corpus"] = str(tmp_path / "none.txt")
    with pytest.raises(UserError, match=r"data.sources.b: corpus .*none.txt' does not exist"):
        count_samples(DataSettings(sources=sources, **common))
    sources["b"]["corpus"] = str(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"data.validation: .*is the text for training"):
        count_samples(
            DataSettings(
                sources={"b": sources["b"]}, validation={"corpus": str(tmp_path / "a.txt")}, **common
            )
        )


@pytest.mark.parametrize("validation", [None, {"share": 0.2}])
def test_a_file_and_its_folder_are_the_same_text_but_other_columns_and_more_files_are_not(
    tmp_path, validation
):
    (tmp_path / "folder").mkdir()
    rows = [json.dumps({"text": f"question {n}", "answer": f"yes, {n}"}) + "\n" for n in range(50)]
    (tmp_path / "folder" / "b.jsonl").write_text("".join(rows))
    one, other = {"corpus": str(tmp_path / "folder"), "weight": 1}, {"weight": 1}
    other["corpus"] = str(tmp_path / "folder" / "b.jsonl")

    def count(**more):
        sources = {"x": one, "y": {**other, **more}}
        chosen = DataSettings(
            sources=sources, sequence_length=8, cache_dir=tmp_path / "cache", validation=validation
        )
        return count_samples(chosen)

    with pytest.raises(UserError, match=r"data\.sources\.x and data\.sources\.y are the same text"):
        count()
    assert count(text_field="answer") > 0
    (tmp_path / "folder" / "more.jsonl").write_text(rows[0])
    assert count() > 0


def test_a_share_for_validation_is_held_out_of_every_source(tmp_path):
    lines = {name: [json.dumps({"text": f"{name}{n:06}"}) for n in range(200)] for name in "ab"}
    for name, each in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(each))
    sources = {name: {"corpus": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in "ab"}
    chosen = DataSettings(
        sources=sources, sequence_length=8, cache_dir=tmp_path / "c", validation={"share": 0.3}
    )
    loader = build_loader(chosen, micro_batch_size=1, rank=0, world_size=1)
    packed = loader.dataset.sources.values()
    trained = {bytes(row.tolist()) for each in packed for row in each.batch(np.arange(len(each)))}
    held = loader.validation.batch(0, loader.validation.num_sequences)["input_ids"]
    held = {bytes(row.tolist()) for row in held[:-1]}  # the last one overlaps the one before it
    assert {row[:1] for row in held} == {row[:1] for row in trained} == {b"a", b"b"}
    assert not held & trained
    assert len(held) + len(trained) == 399


@pytest.mark.parametrize("world_size", [1, 2])
def test_best_fit_samples_of_each_source_are_whole_documents(tmp_path, world_size):
    documents = {name: [name * (number % 9 + 1) for number in range(60)] for name in "ab"}
    for name, texts in documents.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    sources = {name: {"corpus": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in documents}
    chosen = DataSettings(sources=sources, sequence_length=20, packing="best_fit", cache_dir=tmp_path)
    ranks = [
        build_loader(chosen, micro_batch_size=2, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    num_samples = [each.num_samples for each in ranks[0].dataset.sources.values()]
    assert num_samples[0] == num_samples[1]
    assert sum(num_samples) % (2 * world_size) == 0, "whole batches read every document exactly once"
    for rank in ranks:
        rank.plan(step=0, steps=num_samples[0], samples_per_step=2 * world_size)
    seen = {"a": [], "b": []}
    for _ in range(sum(num_samples) // (2 * world_size)):
        for rank in ranks:
            batch = next(rank)
            assert batch["position_ids"].shape == (2, 20)
            for row, source in zip(batch["input_ids"].tolist(), batch["sources"].tolist(), strict=True):
                seen["ab"[source]] += filter(None, bytes(row).decode().split("\0"))
            num_labels = [len(bytes(row).rstrip(b"\0")) + 1 for row in batch["input_ids"].tolist()]
            assert (batch["labels"] != IGNORED_LABEL).sum(1).tolist() == num_labels
    assert {name: sorted(each) for name, each in seen.items()} == {
        name: sorted(each) for name, each in documents.items()
    }
