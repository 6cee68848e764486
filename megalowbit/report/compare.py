"""What runs have in common: whether their losses may be subtracted, the gap and its noise, other settings.

A gap is the loss of a run minus that of the reference, the first run that is named, at equal steps. It means
something only if both read the same text in samples of the same length and the same number of tokens a step.
Otherwise there is no gap, and a sentence says why.

The noise of a gap has two parts. Means over blocks of steps scatter because single steps do; their standard
errors are computed here. A run with another seed ends elsewhere, too, and no statistics of two runs can say
how far. If a run repeats the reference with another seed, its gap shows that, as the noise floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalowbit.records.run import BLOCK, RunRecords

Numbers = NDArray[np.float64]
BLOCKS = 40  # means of a gap along a run
LEAST_STEPS = 5  # of a block
LAST_SHARE = 10  # the end is the last tenth of the common steps
MOST_CORRELATION = 0.95
ERRORS = 2.0  # half of the width of an interval, in standard errors: about 95 %

# Settings that decide which text is read, and how it is cut into samples.
TEXT = {
    "corpus": "text",
    "corpus_config": "text",
    "split": "text",
    "stream": "text",
    "text_field": "text",
    "sources": "blend",
    "phases": "blend",
    "tokenizer": "tokenizer",
    "vocab_size": "tokenizer",
    "parse_special_tokens": "tokenizer",
    "sequence_length": "sequence length",
    "packing": "packing",
    "eod_mask_loss": "masking of ends of documents",
}
SEEDS = (f"{BLOCK}.run.seed", f"{BLOCK}.data.seed")
# Settings and sections that do not change what a run computes: of this project's block, and of DeepSpeed's.
_OF_BLOCK = (
    "run.name", "model.config", "data.cache_dir", "data.workers", "data.build_timeout", "telemetry",
    "trackio", "checkpoint", "watchdog", "validation", "profile", "samples", "histograms",
)  # fmt: skip
_OF_DEEPSPEED = (
    "comet", "comms_logger", "csv_monitor", "disable_python_gc", "dump_state", "flops_profiler", "log_level",
    "memory_breakdown", "steps_per_print", "tensorboard", "timers", "wall_clock_breakdown", "wandb",
)  # fmt: skip
BESIDE = tuple(
    pattern
    for name in (*(f"{BLOCK}.{name}" for name in _OF_BLOCK), *_OF_DEEPSPEED)
    for pattern in (name, f"{name}.*")
)


@dataclass(frozen=True)
class Gap:
    """The loss of a run minus that of the reference.

    Attributes:
        steps: the last step of each block.
        means: of the differences of its steps.
        errors: standard errors of the means.
        end: mean over the last steps.
        end_error: its standard error.
        num_end: number of these steps.
        correlation: of the differences of neighbouring steps, around the means of their blocks.
        block: steps of a block.
        percent: the gap at the end in % of the reference's loss there.
        num_left_out: common steps at which a loss is not finite.
    """

    steps: Numbers
    means: Numbers
    errors: Numbers
    end: float
    end_error: float
    num_end: int
    correlation: float
    block: int
    percent: float
    num_left_out: int


def gap_between(run: RunRecords, reference: RunRecords) -> Gap | None:
    """The gap of the training loss; None if there are fewer than two blocks of common steps."""
    own, peer = run.metrics.column("loss"), reference.metrics.column("loss")
    steps, at, other = np.intersect1d(own.steps, peer.steps, assume_unique=True, return_indices=True)
    pair = np.stack([own.values[at], peer.values[other]])
    is_finite = np.isfinite(pair).all(axis=0)
    steps, pair = steps[is_finite], pair[:, is_finite]
    count = len(steps)
    if count < 2 * LEAST_STEPS:
        return None
    differences = pair[0] - pair[1]
    block = max(LEAST_STEPS, math.ceil(count / BLOCKS))
    starts = np.arange(0, max(1, count - block // 2), block)  # a short rest joins the last block
    sizes = np.diff(np.append(starts, count))
    means = np.add.reduceat(differences, starts) / sizes
    rest = differences - np.repeat(means, sizes)
    correlation = _correlation(rest)
    spread = np.sqrt(np.add.reduceat(rest**2, starts) / (sizes - 1))
    wider = math.sqrt((1 + correlation) / (1 - correlation))
    num_end = min(count, max(LEAST_STEPS, count // LAST_SHARE))
    last = differences[-num_end:]
    return Gap(
        steps=steps[np.append(starts[1:], count) - 1],
        means=means,
        errors=wider * spread / np.sqrt(sizes),
        end=float(last.mean()),
        end_error=float(wider * last.std(ddof=1) / math.sqrt(num_end)),
        num_end=num_end,
        correlation=correlation,
        block=block,
        percent=float(100 * last.mean() / pair[1, -num_end:].mean()),
        num_left_out=int((~is_finite).sum()),
    )


def _correlation(rest: Numbers) -> float:
    """Correlation of neighbours, from 0 to `MOST_CORRELATION`: a negative one is not relied on."""
    energy = float((rest**2).sum())
    if energy == 0.0:
        return 0.0
    return min(MOST_CORRELATION, max(0.0, float((rest[1:] * rest[:-1]).sum()) / energy))


def noise_floor(gaps: Sequence[Gap]) -> float | None:
    """Root mean square of what repeats differ by over the last half of their blocks; None without repeats.

    The mean over half of a run has little noise of batches, also if those of the repeat are others.
    """
    halves = [float(gap.means[len(gap.means) // 2 :].mean()) for gap in gaps]
    return math.sqrt(sum(each**2 for each in halves) / len(halves)) if halves else None


def why_not_comparable(run: RunRecords, reference: RunRecords) -> str | None:
    """A clause that says why no gap is computed; None: the losses of equal steps may be subtracted."""
    differing = []
    for name, what in TEXT.items():
        values = [each.setting(f"{BLOCK}.data.{name}") for each in (run, reference)]
        if values[0] != values[1] and what not in differing:
            differing.append(what)
    if differing:
        return f"they differ in {' and '.join(differing)}, so their losses are of other predictions"
    tokens = [each.tokens_per_step for each in (run, reference)]
    own, peer = tokens
    if own is not None and peer is not None and abs(own - peer) > 1e-6 * peer:
        return f"a step has {own:,.0f} and {peer:,.0f} tokens, so equal steps have not seen equally much text"
    return None


def cautions(run: RunRecords, reference: RunRecords) -> list[str]:
    """What a reader of the gap should know, as sentences."""
    found = []
    if is_other_order(run, reference):
        found.append(
            "The two runs read the text in another order, so the gap has the noise of different batches. "
            "With equal seeds it would be smaller."
        )
    last = [each.metrics.last_step for each in (run, reference)]
    if last[0] != last[1]:
        found.append(f"The runs have {last[0]:,} and {last[1]:,} steps; the gap ends at step {min(last):,}.")
    if not _has_equal_rates(run, reference):
        found.append("Their learning rates differ at equal steps, which is a part of the gap.")
    return found


def _has_equal_rates(run: RunRecords, reference: RunRecords) -> bool:
    """Whether the learning rates of equal steps are equal."""
    own, peer = (each.metrics.column("lr").finite() for each in (run, reference))
    _, at, other = np.intersect1d(own.steps, peer.steps, assume_unique=True, return_indices=True)
    return bool(np.allclose(own.values[at], peer.values[other], rtol=1e-6, atol=0.0))


def is_other_order(run: RunRecords, reference: RunRecords) -> bool:
    """Whether the batches of equal steps differ although the text is the same."""
    keys = (*SEEDS, f"{BLOCK}.data.validation.share")
    return any(run.setting(key) != reference.setting(key) for key in keys)


def is_repeat(run: RunRecords, reference: RunRecords) -> bool:
    """Whether a run differs from the reference in seeds only, and in settings that change nothing."""
    flat = [flattened(each.config) for each in (run, reference)]
    keys = {key for key in flat[0] | flat[1] if flat[0].get(key) != flat[1].get(key)}
    keys = {key for key in keys if not any(fnmatchcase(key, pattern) for pattern in BESIDE)}
    return bool(keys) and keys <= set(SEEDS)


def differing_settings(runs: Sequence[RunRecords]) -> list[tuple[str, list[Any]]]:
    """Keys of the configurations whose values are not all equal, and the value of each run; `…` is none."""
    flat = [flattened(run.config) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    found = [(key, [each.get(key, ...) for each in flat]) for key in keys]
    return [(key, values) for key, values in found if any(value != values[0] for value in values)]


def flattened(config: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Dotted key → value; lists are values."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{start}{name}.")
        else:
            found[f"{start}{name}"] = value
    return found
