import ctypes
import mmap
import os
import textwrap
import time

import numpy as np
import pytest
from forks import run_processes
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.data.loader import (
    BlendedDataset,
    BlendedLoader,
    ShardedLoader,
    build_loader,
    count_samples,
)
from megalowbit.data.packing import PackedDataset
from megalowbit.data.settings import DataSettings
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError

LENGTH = 4
BYTES = ByteTokenizer()


def numbered(num_samples, fingerprint="f"):
    """Sample i holds the number i in every place."""
    tokens = np.repeat(np.arange(num_samples, dtype=np.uint32), LENGTH)
    return PackedDataset(tokens, LENGTH, fingerprint=fingerprint, name="numbers")


def loaders(dataset, world_size, micro_batch_size, seed=0):
    return [
        ShardedLoader(
            dataset,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            tokenizer=BYTES,
        )
        for rank in range(world_size)
    ]


def take(ranks, num_batches):
    """Sample numbers all ranks see, in the order of the job's positions."""
    seen = []
    for _ in range(num_batches):
        for loader in ranks:
            seen += next(loader)["input_ids"][:, 0].tolist()
    return seen


def test_a_batch_is_ids_and_equal_labels():
    (loader,) = loaders(numbered(10), 1, 3)
    batch = next(loader)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (3, LENGTH)
    assert batch["input_ids"].equal(batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
    assert (loader.num_samples, loader.tokens_per_batch) == (10, 3 * LENGTH)
    assert loaders(numbered(10), 2, 3)[0].tokens_per_batch == 2 * 3 * LENGTH


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(16, 60), st.integers(0, 2**62))
def test_ranks_share_every_epoch_without_overlap(world_size, micro_batch_size, num_samples, seed):
    per_batch = world_size * micro_batch_size
    seen = take(
        loaders(numbered(num_samples), world_size, micro_batch_size, seed), 3 * num_samples // per_batch
    )
    for start in range(0, len(seen) - num_samples + 1, num_samples):
        assert sorted(seen[start : start + num_samples]) == list(range(num_samples))


def test_ranks_of_a_batch_see_different_samples():
    ranks = loaders(numbered(64), 4, 4)
    seen = [set(next(loader)["input_ids"][:, 0].tolist()) for loader in ranks]
    assert len(set.union(*seen)) == 16


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_resuming_on_another_number_of_ranks_neither_repeats_nor_skips(data):
    num_samples = data.draw(st.integers(30, 50))
    (reference,) = loaders(numbered(num_samples), 1, 1)
    seen = []
    state = None
    for _ in range(data.draw(st.integers(2, 4))):
        ranks = loaders(numbered(num_samples), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6)))
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        seen += take(ranks, data.draw(st.integers(1, 8)))
        assert len({loader.position for loader in ranks}) == 1
        state = ranks[-1].state_dict()
    assert seen == take([reference], len(seen))


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    def order(seed):
        return take(loaders(numbered(100), 2, 5, seed), 20)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:100] != order(1)[100:]  # epochs differ


@pytest.mark.parametrize(
    ("dataset", "seed", "message"),
    [
        (numbered(40, "g"), 0, "made with data fingerprint .*resume with the data settings"),
        (numbered(40), 5, "made with data seed 0, this run has 5"),
    ],
)
def test_a_position_in_other_data_is_refused(dataset, seed, message):
    (loader,) = loaders(numbered(40), 1, 2)
    (other,) = loaders(dataset, 1, 2, seed)
    with pytest.raises(UserError, match=message):
        other.load_state_dict(loader.state_dict())
    assert other.position == 0


@pytest.mark.parametrize(("change", "message"), [({"position": -3}, "is -3"), ({"position": "3"}, "is '3'")])
def test_a_damaged_position_is_refused(change, message):
    (loader,) = loaders(numbered(40), 1, 2)
    with pytest.raises(UserError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(UserError, match="lacks fingerprint, position"):
        loader.load_state_dict({"seed": 0, "num_samples": 40})


def test_fewer_samples_than_one_batch_of_all_ranks_is_refused_with_the_sizes():
    with pytest.raises(
        UserError, match="has 7 sequences of 4 tokens, fewer than one micro-batch of 4 on each of 2"
    ):
        loaders(numbered(7), 2, 4)
    assert len(loaders(numbered(8), 2, 4)) == 2


@pytest.mark.parametrize(("micro_batch_size", "rank", "world_size"), [(0, 0, 1), (1, 1, 1), (1, -1, 1)])
def test_impossible_ranks_are_refused(micro_batch_size, rank, world_size):
    with pytest.raises(ValueError, match="rank below world_size"):
        ShardedLoader(
            numbered(9),
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=0,
            tokenizer=BYTES,
        )


def test_the_entry_points_agree(tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 50)
    values = DataSettings(
        corpus=str(tmp_path / "a.txt"), sequence_length=16, cache_dir=tmp_path / "cache", seed=3
    )
    loader = build_loader(values, micro_batch_size=2, rank=0, world_size=1)
    assert count_samples(values) == loader.num_samples == 701 // 16
    assert loader.tokenizer.name == "byte"
    assert loader.seed == 3
    assert bytes(next(loader)["input_ids"][0].tolist()).decode().split()[1] in ("one", "two", "three")


PROCESS = """
    import datetime, os, sys
    from pathlib import Path
    import torch.distributed as dist
    from megalowbit.data.loader import build_loader
    from megalowbit.data.settings import DataSettings
    from megalowbit.errors import UserError

    folder, corpus, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=200))
    values = DataSettings(corpus=corpus, sequence_length=16, tokenizer="bpe", vocab_size=300,
                          cache_dir=folder / "cache")
    try:
        loader = build_loader(values, micro_batch_size=2, rank=rank, world_size=2)
        print(loader.fingerprint, next(loader)["input_ids"].flatten().tolist())
    except UserError as error:
        print("error:", error)
    dist.destroy_process_group()
"""


def run_two(folder, corpus, *, before="", after=""):
    program = "\n".join(map(textwrap.dedent, (before, PROCESS, after)))
    (folder / "program.py").write_text(program)
    codes, outputs = run_processes(folder / "program.py", folder, corpus, folder=folder)
    assert codes == [0, 0], outputs
    return outputs


def test_two_processes_build_one_cache_and_read_different_samples(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"sentence number {number}" for number in range(300)))
    first, second = run_two(tmp_path, tmp_path / "a.txt")
    assert first.split()[0] == second.split()[0]
    assert first != second
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 2  # the tokens and their manifest


@pytest.mark.slow
def test_one_of_two_processes_reads_the_files_for_the_fingerprint_of_both(tmp_path):
    (tmp_path / "a.txt").write_text("some text of some length " * 40)
    counted = """
    from megalowbit.data.cache import digests
    digests.NS_UNTIL_SETTLED, read, original = 0, [], digests.content_digest
    digests.content_digest = lambda path, *blocks: read.append(path) or original(path, *blocks)
    """
    shown = "print(sum(each.suffix == '.txt' for each in read))"
    outputs = run_two(tmp_path, tmp_path / "a.txt", before=counted, after=shown)
    assert [output.splitlines()[-1] for output in outputs] == ["1", "0"]


@pytest.mark.slow
def test_an_error_in_the_corpus_reaches_both_processes(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nnot json\n')
    for output in run_two(tmp_path, tmp_path / "a.jsonl"):
        assert output.startswith(f"error: corpus file {tmp_path / 'a.jsonl'} is not JSON: line 2, column 1")


def resident(tokens, start, length):
    """Whether each page of these tokens is in memory, as the system says."""
    page = mmap.PAGESIZE
    first = tokens[start:].ctypes.data // page * page
    num_pages = -(-(tokens[start:].ctypes.data + length * tokens.itemsize - first) // page)
    found = (ctypes.c_ubyte * num_pages)()
    arguments = ctypes.c_void_p(first), ctypes.c_size_t(num_pages * page), found
    assert ctypes.CDLL(None).mincore(*arguments) == 0
    return [bool(each & 1) for each in found]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="files cannot be dropped from memory here")
@pytest.mark.parametrize("rank", [0, 1])
def test_the_next_micro_batch_is_read_from_disk_in_the_background(tmp_path, rank):
    length, path = 2**17, tmp_path / "tokens.npy"  # far more than the system reads around a page
    np.save(path, np.arange(64 * length, dtype=np.uint32))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokens = np.load(path, mmap_mode="r")
    if sum(resident(tokens, 0, len(tokens))) > 64:
        pytest.skip("this file system keeps files in memory")
    dataset = PackedDataset(tokens, length, fingerprint="f")
    loader, twin = loaders(dataset, 2, 2)[rank], loaders(numbered(64), 2, 2)[rank]
    next(loader), next(twin)
    end = time.monotonic() + 30
    for index in next(twin)["input_ids"][:, 0].tolist():
        while not all(resident(tokens, index * length, length)):
            assert time.monotonic() < end
            time.sleep(0.01)


class Recorded(PackedDataset):
    """Samples that remember which of them were read ahead and taken."""

    def __init__(self, num_samples):
        super().__init__(np.zeros(2 * num_samples, np.uint16), 2, fingerprint="f")
        self.ahead, self.taken = [], []

    def read_ahead(self, indices):
        self.ahead.append(indices.tolist())

    def batch(self, indices):
        self.taken.append(indices.tolist())
        return super().batch(indices)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 600, 6000])
def test_what_is_read_ahead_is_what_is_taken_next_also_after_a_resume(rank, position):
    loader = ShardedLoader(
        Recorded(50_000), micro_batch_size=2, rank=rank, world_size=3, seed=1, tokenizer=ByteTokenizer()
    )
    if position:
        next(loader)
        loader.load_state_dict({**loader.state_dict(), "position": position})
        loader.dataset.ahead.clear()
        loader.dataset.taken.clear()
    for _ in range(4):
        next(loader)
    assert loader.dataset.ahead[:-1] == loader.dataset.taken[1:]


def test_a_source_of_a_blend_is_read_ahead_from_where_a_resume_left_it():
    sources = {name: Recorded(50_000) for name in "ab"}
    settings = DataSettings(
        sequence_length=2, sources={"a": {"corpus": "a", "weight": 3}, "b": {"corpus": "b", "weight": 1}}
    )

    def blended():
        return BlendedLoader(
            BlendedDataset(settings, sources),
            micro_batch_size=4,
            rank=1,
            world_size=2,
            seed=1,
            tokenizer=ByteTokenizer(),
        )

    first, resumed = blended(), blended()
    first.plan(step=0, steps=1000, samples_per_step=8)
    for _ in range(500):
        next(first)
    resumed.load_state_dict(first.state_dict())
    resumed.plan(step=500, steps=1000, samples_per_step=8)
    for each in sources.values():
        each.ahead.clear()
        each.taken.clear()
    for _ in range(2):
        next(resumed)
    for each in sources.values():
        assert each.ahead[0] == each.taken[1]
