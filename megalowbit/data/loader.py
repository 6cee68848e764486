"""An endless, sharded, resumable iterator over packed samples.

The only state is one counter for the whole job: the number of samples consumed so far. Each micro-batch takes
the next world_size × micro_batch_size positions, and rank r takes the r-th contiguous slice of them.
`order.sample_index` maps positions to samples, one epoch after another without a gap. A run can therefore
continue on another number of ranks without repeating or skipping samples. What a batch has beside token ids
follows from these alone (`packing.DocumentRules`).

A blend has an order for each source, and `order.quota` says which source gives the sample at a position. Its
state has the plan of the shares, too, and the samples that each source has given. These counts follow from
plan and position; with them a resumed run need not choose again from the beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalowbit.data.cache.digests import key_of
from megalowbit.data.cache.node_first import run_on_each_node_first
from megalowbit.data.corpus import AllSources, Corpus
from megalowbit.data.order.blend_plan import PlanPart, Progress, check_history, describe_shares, next_part
from megalowbit.data.order.permutation import sample_index
from megalowbit.data.order.quota import QuotaOrder
from megalowbit.data.packing import DocumentRules, Samples, best_fit, pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import is_same_text, open_source, sources_of
from megalowbit.data.tokenize import Tokenizer, build_tokenizer
from megalowbit.data.validation import ValidationText, open_validation
from megalowbit.errors import UserError

POSITIONS_AT_ONCE = 1024  # whose samples are computed
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of two sources; any odd number would do


@dataclass(frozen=True)
class BlendedDataset:
    """The packed samples of several sources.

    Attributes:
        settings: of the blend.
        sources: the samples of each source, by its name, in the order of `settings.sources`.
    """

    settings: DataSettings
    sources: Mapping[str, Samples]

    @property
    def name(self) -> str:
        """The sources, for messages."""
        return f"blend of {', '.join(self.sources)}"

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.settings.sequence_length

    @property
    def num_samples(self) -> int:
        """Samples of all sources."""
        return sum(each.num_samples for each in self.sources.values())

    @property
    def padding_share(self) -> float:
        """How much of the samples is padding."""
        return sum(each.padding_share * each.num_samples for each in self.sources.values()) / self.num_samples

    @property
    def fingerprint(self) -> str:
        """Identifies the sources and their tokens."""
        return key_of([(name, each.fingerprint) for name, each in self.sources.items()])


class ShardedLoader(Iterator[dict[str, torch.Tensor]]):
    """Endless micro-batches of one data-parallel rank.

    Yields `{"input_ids", "labels"}`, both int64 (micro_batch_size, sequence_length), on the CPU; if documents
    are separate, also `"position_ids"` of that shape.

    Args:
        dataset: the packed samples.
        micro_batch_size: samples per micro-batch on this rank.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        seed: determines the order of the samples.
        tokenizer: the tokenizer of the samples; saved together with the model.
        validation: the text for validation; None: there is none.
        rules: what batches make of documents; None: nothing.

    Raises:
        UserError: the data set has fewer samples than one micro-batch over all ranks.
    """

    def __init__(
        self,
        dataset: Samples | BlendedDataset,
        *,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        tokenizer: Tokenizer,
        validation: ValidationText | None = None,
        rules: DocumentRules | None = None,
    ) -> None:
        if micro_batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                "micro_batch_size must be ≥ 1 and rank below world_size: "
                f"{micro_batch_size}, {rank}, {world_size}"
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.tokenizer = tokenizer
        self.validation = validation
        self.rules = rules or DocumentRules()
        self.position = 0
        self._ordered = _in_order(dataset, seed, world_size)
        if dataset.num_samples < self.samples_per_batch:
            raise UserError(
                f"corpus {dataset.name} has {dataset.num_samples} sequences of {dataset.sequence_length} "
                f"tokens, fewer than one micro-batch of {micro_batch_size} on each of {world_size} ranks: "
                "use more text, or lower data.sequence_length or train_micro_batch_size_per_gpu"
            )

    @property
    def samples_per_batch(self) -> int:
        """Samples of one micro-batch over all ranks."""
        return self.micro_batch_size * self.world_size

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one micro-batch over all ranks."""
        return self.samples_per_batch * self.dataset.sequence_length

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return self.dataset.num_samples

    @property
    def fingerprint(self) -> str:
        """Identifies corpus, tokenizer and sequence length."""
        return self.dataset.fingerprint

    def __iter__(self) -> ShardedLoader:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = self._batch()
        self.position += self.samples_per_batch
        return batch

    def _batch(self) -> dict[str, torch.Tensor]:
        """The batch of this rank at `position`."""
        (samples,) = self._ordered
        first = self.position + self.rank * self.micro_batch_size
        return self.rules.batch(*samples.take(first, self.micro_batch_size))

    def plan(self, *, step: int, steps: int, samples_per_step: int) -> None:
        """Plan the shares of sources for the rest of a run; a single corpus needs no plan. Not collective.

        Call it before the first batch, and after `load_state_dict`.

        Args:
            step: optimizer steps taken.
            steps: of the whole run.
            samples_per_step: over all ranks.

        Raises:
            UserError: the sources do not have what they are to give.
        """

    def state_dict(self) -> dict[str, Any]:
        """The `position` (samples consumed by all ranks together), and what identifies data and order."""
        return {
            "position": self.position,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`, on any number of ranks.

        Raises:
            UserError: the state belongs to other data or another seed, or is incomplete.
        """
        if "blend" in state and not isinstance(self, BlendedLoader):
            raise UserError(
                f"the checkpoint is of a blend of {', '.join(state['blend']['sources'])}, and this run reads "
                f"corpus {self.dataset.name}: resume with the data settings of the checkpoint"
            )
        current = self.state_dict()
        missing = current.keys() - state.keys()
        if missing:
            raise UserError(
                f"the data position in the checkpoint lacks {', '.join(sorted(missing))}: it is damaged"
            )
        for key in ("fingerprint", "num_samples", "seed"):
            if state[key] != current[key]:
                raise UserError(
                    f"the checkpoint was made with data {key} {state[key]}, this run has {current[key]} "
                    f"(corpus {self.dataset.name}): resume with the data settings of the checkpoint"
                )
        if not (isinstance(state["position"], int) and state["position"] >= 0):
            raise UserError(f"the data position in the checkpoint is {state['position']!r}: it is damaged")
        self.position = state["position"]
        self._ordered = _in_order(self.dataset, self.seed, self.world_size)  # read ahead from there


class BlendedLoader(ShardedLoader):
    """Endless micro-batches of a blend; call `plan` before the first one.

    Batches also have `"sources"`, int64 (micro_batch_size,): the place of each row's source in `names`.

    Args:
        dataset: the sources. The other arguments are those of `ShardedLoader`.

    Attributes:
        names: of the sources.
        parts: the plan so far.
        planned_epochs: how often each source will have been read at the end of the run.
        planned_shares: describes the shares of each source from here on.
    """

    dataset: BlendedDataset

    def __init__(self, dataset: BlendedDataset, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.names = tuple(dataset.sources)
        self.parts: list[PlanPart] = []
        self.planned_epochs: dict[str, float] = {}
        self.planned_shares: dict[str, str] = {}
        self._counts = [0] * len(self.names)
        self._order: QuotaOrder | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Samples that each source has given."""
        return dict(zip(self.names, self._counts, strict=True))

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source has been read."""
        return {name: count / self.dataset.sources[name].num_samples for name, count in self.counts.items()}

    def plan(self, *, step: int, steps: int, samples_per_step: int) -> None:
        progress = Progress(
            step=step,
            steps=steps,
            samples_per_step=samples_per_step,
            position=self.position,
            counts=tuple(self._counts),
        )
        sizes = [each.num_samples for each in self.dataset.sources.values()]
        part = next_part(self.dataset.settings, sizes, progress, self.parts[-1] if self.parts else None)
        self._check_batch(part)
        if self.parts and self.parts[-1].start == part.start:
            self.parts.pop()
        self.parts.append(part)
        planned = part.planned(self.position + progress.left)
        self.planned_epochs = {
            name: float(count / size) for name, count, size in zip(self.names, planned, sizes, strict=True)
        }
        self.planned_shares = dict(zip(self.names, describe_shares(part, progress), strict=True))
        given = [now - before for now, before in zip(self._counts, part.counts, strict=True)]
        self._order = QuotaOrder(part.segments, self.position, given)

    def _check_batch(self, part: PlanPart) -> None:
        """Reject a source that would give a sample twice in a micro-batch over all ranks."""
        for place, (name, each) in enumerate(self.dataset.sources.items()):
            largest = max(segment.weights[place] for segment in part.segments_from(self.position))
            needed = -(-self.samples_per_batch * largest // sum(part.segments[0].weights))
            if each.num_samples < needed:
                raise UserError(
                    f"source {name} has {each.num_samples} sequences of {each.sequence_length} tokens, fewer "
                    f"than its share of one micro-batch over all ranks, {needed}: use more text, or lower "
                    "its share, data.sequence_length or train_micro_batch_size_per_gpu"
                )

    def _batch(self) -> dict[str, torch.Tensor]:
        if self._order is None:
            raise ValueError("a blend has no order yet: call plan, and again after load_state_dict")
        chosen = self._order.take(self.samples_per_batch)  # of all ranks
        start = self.rank * self.micro_batch_size
        before = np.bincount(chosen[:start], minlength=len(self.names)) + self._counts
        own = chosen[start : start + self.micro_batch_size]
        input_ids = torch.empty((len(own), self.dataset.sequence_length), dtype=torch.int64)
        num_unpadded: torch.Tensor | None = None
        for place in np.unique(own).tolist():
            rows = torch.from_numpy(np.flatnonzero(own == place))
            input_ids[rows], found = self._ordered[place].take(int(before[place]), len(rows))
            if found is not None:  # of one source, then of all: they are packed in the same way
                if num_unpadded is None:
                    num_unpadded = torch.empty(len(own), dtype=torch.int64)
                num_unpadded[rows] = found
        total = np.bincount(chosen, minlength=len(self.names)) + self._counts
        self._counts = total.tolist()
        return {**self.rules.batch(input_ids, num_unpadded), "sources": torch.from_numpy(own.copy())}

    def state_dict(self) -> dict[str, Any]:
        """As for one corpus, with the plan of the blend and the samples that each source has given."""
        blend = {
            "sources": {name: each.fingerprint for name, each in self.dataset.sources.items()},
            "counts": list(self._counts),
            "parts": [each.state_dict() for each in self.parts],
        }
        return {**super().state_dict(), "blend": blend}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; then call `plan`.

        Raises:
            UserError: the state belongs to other sources, other data or another seed, or is damaged.
        """
        remedy = "resume with the sources of the checkpoint (a weight of 0 leaves one out)"
        names = f"this run blends {', '.join(self.names)}"
        if "blend" not in state:
            raise UserError(f"the checkpoint is of a run on one corpus, and {names}: resume with that corpus")
        blend = state["blend"]
        if tuple(blend["sources"]) != self.names:
            raise UserError(f"the checkpoint blends {', '.join(blend['sources'])}, and {names}: {remedy}")
        for name, each in self.dataset.sources.items():
            if blend["sources"][name] != each.fingerprint:
                raise UserError(
                    f"the text of source {name} (corpus {each.name}), its tokenizer or data.sequence_length "
                    "is not that of the checkpoint: resume with the data settings of the checkpoint"
                )
        super().load_state_dict(state)
        try:
            parts = [PlanPart.of_state(each) for each in blend["parts"]]
            check_history(parts, self.position, blend["counts"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"the plan of the blend in the checkpoint is damaged: {error}") from error
        self.parts, self._counts, self._order = parts, list(blend["counts"]), None


class _OrderedSamples:
    """Samples by position in the order of a data set, epoch after epoch.

    When samples are taken, the system is asked to read those that come next from disk: as far behind them as
    they came behind the last ones. For the first ones, all ranks are assumed to take as many. The indices of
    `POSITIONS_AT_ONCE` positions are computed at once: a few cost as much as many.
    """

    def __init__(self, dataset: Samples, seed: int, world_size: int) -> None:
        self._dataset, self._seed, self._world_size = dataset, seed, world_size
        self._first, self._indices = 0, np.empty(0, np.int64)
        self._last: int | None = None  # first position of the samples that were taken last

    def take(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The samples at the positions first … first+count-1, and how many tokens of each are no padding."""
        indices = self._indices_of(first, count)
        last = first - count * self._world_size if self._last is None else self._last
        distance, self._last = max(first - last, count), first
        self._dataset.read_ahead(self._indices_of(first + distance, count))
        return self._dataset.batch(indices), self._dataset.num_unpadded(indices)

    def _indices_of(self, first: int, count: int) -> NDArray[np.int64]:
        if not self._first <= first <= first + count <= self._first + len(self._indices):
            num_samples = self._dataset.num_samples
            computed = np.arange(first, first + max(count, POSITIONS_AT_ONCE))
            epochs, positions = np.divmod(computed, num_samples)
            self._first = first
            self._indices = sample_index(self._seed, epochs, positions, num_samples)
        start = first - self._first
        return self._indices[start : start + count]


def _in_order(dataset: Samples | BlendedDataset, seed: int, world_size: int) -> list[_OrderedSamples]:
    """The samples of each source, or of the one corpus."""
    sources = list(dataset.sources.values()) if isinstance(dataset, BlendedDataset) else [dataset]
    # each has a seed of its own: texts of equal length should not be read in step
    seeds = (seed + place * SEED_STEP for place in range(len(sources)))
    return [_OrderedSamples(each, own, world_size) for each, own in zip(sources, seeds, strict=True)]


def build_loader(
    settings: DataSettings, *, micro_batch_size: int, rank: int, world_size: int
) -> ShardedLoader:
    """Open the corpus, tokenizer and tokenised samples, and create those that are not in the cache.

    Collective if there is a process group: one process of each node does the work, while the others wait and
    then read the cache. Work that takes longer than the group's timeout should be done once beforehand, by
    `count_samples` in a single process (`--prepare-data`). The arguments are those of `ShardedLoader`.

    Raises:
        UserError: corpus, tokenizer or cache cannot be used on some rank; all ranks raise it.
    """

    def work() -> ShardedLoader:
        dataset, tokenizer, validation = _open(settings)
        arguments: dict[str, Any] = {
            "micro_batch_size": micro_batch_size,
            "rank": rank,
            "world_size": world_size,
            "seed": settings.seed,
            "tokenizer": tokenizer,
            "validation": validation,
            "rules": DocumentRules.of(settings, tokenizer),
        }
        if isinstance(dataset, BlendedDataset):
            return BlendedLoader(dataset, **arguments)
        return ShardedLoader(dataset, **arguments)

    return run_on_each_node_first(work, _fingerprint_of_all)


def _fingerprint_of_all(loader: ShardedLoader) -> str:
    """Identifies the data for training and for validation."""
    return loader.fingerprint + ("" if loader.validation is None else loader.validation.fingerprint)


def count_samples(settings: DataSettings) -> int:
    """The number of samples in an epoch; tokenises all text that is not in the cache. Not collective.

    Raises:
        UserError: as `build_loader`.
    """
    dataset, _, _ = _open(settings)
    return dataset.num_samples


def _open(settings: DataSettings) -> tuple[Samples | BlendedDataset, Tokenizer, ValidationText | None]:
    corpora = {name: (open_source(name, each), each) for name, each in sources_of(settings).items()}
    _check_different({name: corpus for name, (corpus, _) in corpora.items()}, settings.cache_dir)
    whole = (
        AllSources({name: each for name, (each, _) in corpora.items()})
        if settings.sources
        else corpora[""][0]
    )
    tokenizer = build_tokenizer(settings, whole)
    # before the text for training is tokenised, which may take hours
    validation = open_validation(settings, tokenizer, [corpus for corpus, _ in corpora.values()])
    packed = {name: _samples(corpus, tokenizer, each) for name, (corpus, each) in corpora.items()}
    for each in packed.values():  # perhaps under another name
        if validation is not None and validation.tokens_fingerprint == each.tokens_fingerprint:
            raise UserError(f"data.validation: {validation.name} is the text for training: name other text")
    if settings.sources is None:
        return packed[""], tokenizer, validation
    return BlendedDataset(settings, packed), tokenizer, validation


def _samples(corpus: Corpus, tokenizer: Tokenizer, settings: DataSettings) -> Samples:
    packed = pack(
        corpus,
        tokenizer,
        settings.sequence_length,
        settings.cache_dir,
        workers=settings.workers,
        timeout=settings.build_timeout,
        needs_ends=settings.needs_ends,
    )
    if settings.packing != "best_fit":
        return packed
    return best_fit(packed, tokenizer, settings.cache_dir, timeout=settings.build_timeout)


def _check_different(corpora: Mapping[str, Corpus], cache_dir: Path) -> None:
    """Reject the same text under two names, whose losses and epochs would be counted apart."""
    for (name, each), (other, another) in itertools.combinations(corpora.items(), 2):
        if is_same_text(each, another, cache_dir):
            raise UserError(
                f"data.sources.{name} and data.sources.{other} are the same text: leave one of them out"
            )
