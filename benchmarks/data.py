"""Speed of the data path on a CPU: tokenising, loading, start-up, and its share of a training step.

    python benchmarks/data.py
    python benchmarks/data.py --megabytes 64 --rounds 5
    pip install --no-deps --target /tmp/torchdata 'torchdata==0.11.*'  # then PYTHONPATH=/tmp/torchdata

- *Tokenising*: tokens/s of one process, text file to token file, beside the Hugging Face tokenizer alone on
  the same documents in memory. The tokenizer is a BPE trained on the text, in one thread.
- *Loading*: tokens/s of the loader beside a memory-mapped read of the same rows in the same order, which is
  known beforehand, and beside torchdata's StatefulDataLoader with its sampler for several ranks. For one
  corpus, and for blends whose choices recur and do not.
- *Start-up*: time to open Megatron's files and read the first batch, and the memory that this takes,
  against the size of the `.bin` file. It is sparse: it takes no place on a disk, and reading it costs
  little. The `.idx` file is a real one. StatefulDataLoader opens a bare memory map, and checks nothing.
  The first start hashes the files. Then the fingerprint of 1,000 text files, also sparse.
- *Share of a step*: of a small GPT-2 on a blend, the time in the loader and in losses by source.

All times are of the processor, in one thread. Nothing runs in other processes: StatefulDataLoader has no
workers. Not measured: files that are not in the page cache.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import timing
import torch

from megalowbit.data.loader import BlendedDataset, BlendedLoader, ShardedLoader, build_loader
from megalowbit.data.order.permutation import sample_index
from megalowbit.data.packing import PackedDataset
from megalowbit.data.settings import DataSettings
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.token_files.build import write_tokens
from megalowbit.data.token_files.megatron import HEADER, MAGIC, VERSION
from megalowbit.data.tokenize import ByteTokenizer, train_bpe

LENGTH, MICRO_BATCH, WORLD = 2048, 8, 8
DOCUMENT = 1000  # tokens
SIZES = {"1 MB": 10**6, "10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9, "10 GB": 10**10}
SHARDS, SHARD_BYTES = 1000, 64 * 2**20
SETTLING = 2.5  # seconds after which digests of a file are remembered
TORCHDATA = "pip install --no-deps --target FOLDER 'torchdata==0.11.*', and PYTHONPATH=FOLDER"
BLENDS = {  # weights; the second ones have a long common denominator
    "blend, choices recur": (0.7, 0.2, 0.1),
    "blend, choices do not recur": (0.700001, 0.2, 0.099999),
}
WARM_UP = 3  # steps


def best(work: Callable[[], object], rounds: int) -> float:
    """The shortest of several times of the processor, in seconds: other programs change it little."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def text(size: int) -> list[str]:
    """Documents of about 2,000 letters, `size` in all, always the same."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(5000)]
    return [" ".join(draw.choices(words, k=340)) for _ in range(size // 2000)]


def tokenising(folder: Path, megabytes: int, rounds: int) -> None:
    """Print tokens/s of a token file's construction, and of the tokenizer alone."""
    documents = text(megabytes * 10**6)
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{each}"}}\n' for each in documents))
    corpus = LocalCorpus(folder / "text.jsonl")
    bpe = train_bpe(corpus, 4096, folder / "cache")
    counts: list[int] = []

    def library_alone() -> None:
        for start in range(0, len(documents), 256):
            bpe._bpe.encode_batch_fast(documents[start : start + 256], add_special_tokens=False)

    def whole() -> None:
        (folder / "tokens.npy").unlink(missing_ok=True)
        counts.append(write_tokens(corpus, bpe, folder / "tokens.npy", workers=1)["tokens"])

    seconds = {"ours, file to file": best(whole, rounds), "tokenizer alone": best(library_alone, rounds)}
    print(f"tokenising {megabytes} MB of text, {counts[-1]:,} tokens, one process")
    for name, lasted in seconds.items():
        print(f"  {name:30}{counts[-1] / lasted:14,.0f} tokens/s")
    print(f"  {'ratio':30}{seconds['tokenizer alone'] / seconds['ours, file to file']:14.2f}")


def dataset(size: int, name: str) -> PackedDataset:
    tokens = np.arange(size * LENGTH, dtype=np.uint32).astype(np.uint16)
    return PackedDataset(tokens, LENGTH, fingerprint=name, name=name)


def blended(weights: tuple[float, ...]) -> BlendedLoader:
    """A loader of rank 3, so that it chooses for others, too."""
    names = [f"source{place}" for place in range(len(weights))]
    sources = {name: {"corpus": name, "weight": each} for name, each in zip(names, weights, strict=True)}
    settings = DataSettings.model_validate({"sources": sources, "sequence_length": LENGTH})
    loader = BlendedLoader(
        BlendedDataset(settings, {name: dataset(20_000, name) for name in names}),
        micro_batch_size=MICRO_BATCH,
        rank=3,
        world_size=WORLD,
        seed=0,
        tokenizer=ByteTokenizer(),
    )
    loader.plan(step=0, steps=10**6, samples_per_step=MICRO_BATCH * WORLD)
    return loader


class Rows(torch.utils.data.Dataset):
    """Rows of token ids for a data loader of torch.

    Args:
        tokens: ids of all rows.
        at_once: read the rows of a batch together, not one after another.
    """

    def __init__(self, tokens: np.ndarray, *, at_once: bool) -> None:
        self.rows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
        if at_once:
            self.__getitems__ = lambda indices: torch.from_numpy(self.rows[indices].astype(np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))

    @staticmethod
    def collate(samples: torch.Tensor | list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Batch as the loader's: inputs, and labels in memory of their own."""
        ids = samples if isinstance(samples, torch.Tensor) else torch.stack(samples)
        return {"input_ids": ids, "labels": ids.clone()}


def torchdata_batches(rows: Rows, rank: int, world: int) -> Iterator[dict[str, torch.Tensor]]:
    """Shuffled batches of one of several ranks from StatefulDataLoader, epoch after epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # it calls torch's
    sampler = StatefulDistributedSampler(rows, world, rank, seed=0, drop_last=True)
    loader = StatefulDataLoader(rows, MICRO_BATCH, sampler=sampler, collate_fn=Rows.collate, drop_last=True)
    while True:
        yield from loader


def loading(rounds: int) -> None:
    """Print tokens/s and microseconds a batch of loaders, and of a plain read."""
    one = dataset(60_000, "one")
    order = sample_index(0, 0, np.arange(300 * MICRO_BATCH), one.num_samples).reshape(300, MICRO_BATCH)
    rows = one.tokens.reshape(-1, LENGTH)

    def plain() -> None:
        for indices in order:
            ids = torch.from_numpy(rows[indices].astype(np.int64))
            ids.clone()

    corpus = ShardedLoader(
        one, micro_batch_size=MICRO_BATCH, rank=3, world_size=WORLD, seed=0, tokenizer=ByteTokenizer()
    )
    loaders: dict[str, Iterator[Any]] = {"one corpus": corpus}
    loaders |= {name: blended(weights) for name, weights in BLENDS.items()}
    if has_torchdata():
        for name, at_once in {"torchdata, row by row": False, "torchdata, whole batches": True}.items():
            loaders[name] = torchdata_batches(Rows(one.tokens, at_once=at_once), 3, WORLD)

    def take(loader: Iterator[Any]) -> None:
        for _ in range(len(order)):
            next(loader)

    seconds = {"plain read, order known": best(plain, rounds)}
    seconds |= {name: best(functools.partial(take, each), rounds) for name, each in loaders.items()}
    print(f"\nloading {MICRO_BATCH} × {LENGTH} tokens of {WORLD} ranks' batches")
    for name, lasted in seconds.items():
        rate = len(order) * MICRO_BATCH * LENGTH / lasted
        print(f"  {name:30}{rate / 1e6:10.1f} Mtokens/s{lasted / len(order) * 1e6:10.0f} µs a batch")


def has_torchdata() -> bool:
    return find_spec("torchdata") is not None


def opened(prefix: str, reader: str) -> None:
    """Open a pair of Megatron's files and read a batch, in a process of its own; print seconds and MiB."""
    if reader == "torchdata":  # imports take no part
        next(torchdata_batches(Rows(np.zeros(MICRO_BATCH * LENGTH, np.uint16), at_once=True), 0, 1))
    before = _memory()
    began = time.process_time()
    if reader == "torchdata":
        next(torchdata_batches(Rows(np.memmap(f"{prefix}.bin", np.uint16, mode="r"), at_once=True), 0, 1))
    else:
        raw = {
            "corpus": prefix, "tokenizer": "none", "vocab_size": 50257, "sequence_length": LENGTH,
            "cache_dir": f"{prefix}-cache",
        }  # fmt: skip
        settings = DataSettings.model_validate(raw)
        next(build_loader(settings, micro_batch_size=MICRO_BATCH, rank=0, world_size=1))
    print(time.process_time() - began, (_memory() - before) / 2**20)


def _memory() -> int:
    """Largest resident memory so far, in bytes; pages of files that are mapped count.

    getrusage would report that of the parent if it is larger.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def write_sparse_pair(prefix: Path, size: int) -> None:
    """Write Megatron's files of documents of `DOCUMENT` zeros; the `.bin` file of `size` bytes is sparse."""
    count = size // (2 * DOCUMENT)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(size)
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, count, count + 1))  # 8: uint16
        np.full(count, DOCUMENT, "<i4").tofile(file)
        np.arange(0, size, 2 * DOCUMENT, "<i8").tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)


def starting(folder: Path, rounds: int) -> None:
    """Print time and memory of a start against the size of the token file."""
    print("\nstart-up against the size of the .bin file")
    prefix = folder / "sparse"
    readers = ("ours", "torchdata") if has_torchdata() else ("ours",)
    for name, size in SIZES.items():
        write_sparse_pair(prefix, size)
        time.sleep(SETTLING)
        for reader in readers:
            command = [sys.executable, __file__, "--opened", str(prefix), reader]
            found = []
            for _ in range(1 + rounds):
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found.append([float(each) for each in done.stdout.split()])
            first, *later = found
            best_of_later = [min(each) for each in zip(*later, strict=True)]
            for when, (seconds, memory) in (("", best_of_later), (", first start", first)):
                print(f"  {f'{name}, {reader}{when}':30}{seconds * 1e3:10.1f} ms{memory:10.1f} MiB more")


def fingerprints(folder: Path) -> None:
    """Print the time for the fingerprint of many text files, when they are new and later."""
    (folder / "shards").mkdir()
    for number in range(SHARDS):
        with (folder / "shards" / f"{number:04}.txt").open("wb") as file:
            file.truncate(SHARD_BYTES)
    time.sleep(SETTLING)
    print(f"\nfingerprint of {SHARDS:,} text files of {SHARD_BYTES // 2**20} MiB")
    for when in ("first start", "later start"):
        began = time.process_time()
        corpus = LocalCorpus(folder / "shards", cache_dir=folder / "cache")
        assert corpus.fingerprint
        print(f"  {when:30}{(time.process_time() - began) * 1e3:10.1f} ms")


def share_of_a_step(folder: Path, steps: int) -> None:
    """Print how much of a step of a small GPT-2 is spent in the loader and in losses by source."""
    from megalowbit.distributed.process_group import ProcessIdentity
    from megalowbit.engine.process_start import start_process_group
    from megalowbit.hf.losses import token_losses
    from megalowbit.pretrain import loop
    from megalowbit.pretrain.config import load_config
    from megalowbit.pretrain.job import assemble
    from megalowbit.pretrain.run_folder.folder import RunFolder

    spent = {"loader": [0.0], "losses by source": [0.0]}

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return original(*arguments)
            finally:
                spent[name][-1] += time.process_time() - began

        return call

    ShardedLoader.__next__ = timed("loader", ShardedLoader.__next__)  # type: ignore[method-assign]
    token_losses.sums_of_rows = timed("losses by source", token_losses.sums_of_rows)
    start_process_group()
    config = load_config(_configuration(folder, steps), [], world_size=1)
    (folder / "run").mkdir()
    job = assemble(config, ProcessIdentity(), RunFolder(folder / "run"))
    job.plan_data()
    seconds = []
    for _ in range(steps):
        for each in spent.values():
            each.append(0.0)
        began = time.process_time()
        loop.train_step(job)
        seconds.append(time.process_time() - began)
    step = statistics.median(seconds[WARM_UP:])
    print(f"\na step of a GPT-2 on 4 × 256 tokens, recipe bf16: {step * 1e3:.1f} ms")
    for name, each in spent.items():
        part = statistics.median(each[1 + WARM_UP :])
        print(f"  {name:30}{part * 1e6:10.0f} µs{part / step:10.2%}")


def _configuration(folder: Path, steps: int) -> Path:
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(name.join(text(10**6)))
    model = {
        "model_type": "gpt2", "vocab_size": 4096, "n_positions": 256, "n_embd": 128, "n_layer": 4,
        "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(model))
    sources = {"a": {"corpus": "a.txt", "weight": 3}, "b": {"corpus": "b.txt", "weight": 1}}
    raw = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megalowbit": {
            "model": {"config": "model.json"},
            "data": {"sources": sources, "sequence_length": 256, "cache_dir": "cache"},
            "run": {"steps": steps},
            "recipe": "bf16",
        },
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder / "config.json"


def main() -> None:
    """Measure and print."""
    options = timing.parser(str(__doc__))
    options.add_argument("--megabytes", type=timing.positive, default=16, help="of text to tokenise")
    options.add_argument("--steps", type=timing.positive, default=30, help="of the small GPT-2, and 3 more")
    options.set_defaults(rounds=3, threads=1)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        tokenising(folder, chosen.megabytes, chosen.rounds)
        loading(chosen.rounds)
        starting(folder, chosen.rounds)
        fingerprints(folder)
        if not has_torchdata():
            print(f"\nStatefulDataLoader is not installed: {TORCHDATA}")
        share_of_a_step(folder, WARM_UP + chosen.steps)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--opened"]:
        opened(*sys.argv[2:])
    else:
        main()
