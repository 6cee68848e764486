"""From the settings of a blend to the shares of its sources, and their history.

A plan has parts. A part begins when the run begins, or when its shares change in a way that was not known
before: the settings of a resumed run differ, or a rollback has moved the phases. It says at which sample, how
many samples each source had given until then, and which shares hold from there on. `quota.QuotaOrder` then
finds the source of each sample. Nothing is lost or repeated: each source goes on where it was.

Targets are counted from the beginning of a part. Across changes that come as a surprise no order of samples
can keep within one sample of accumulated targets: docs/decisions/0020-blends-by-quota.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from megalowbit.data.order.quota import Segment, check_segments, is_within_quota, targets
from megalowbit.data.settings import AMOUNTS, BlendSource, DataSettings
from megalowbit.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is, and how long it will be.

    Attributes:
        step: optimizer steps taken.
        steps: of the whole run.
        samples_per_step: over all ranks.
        position: samples taken.
        counts: those of each source.
    """

    step: int
    steps: int
    samples_per_step: int
    position: int
    counts: tuple[int, ...]

    @property
    def left(self) -> int:
        """Samples until the end of the run."""
        return max(0, self.steps - self.step) * self.samples_per_step


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """Shares that were known at one time.

    Attributes:
        counts: samples of each source before the part, whose first sample is that of the first segment.
        segments: the shares.
        asked: settings and length of the run from which the shares follow.
    """

    counts: tuple[int, ...]
    segments: tuple[Segment, ...]
    asked: Mapping[str, Any]

    @property
    def start(self) -> int:
        """The number of its first sample."""
        return self.segments[0].start

    def segments_from(self, position: int) -> tuple[Segment, ...]:
        """The segments that hold at `position` and after it."""
        past = sum(each.start <= position for each in self.segments)
        return self.segments[max(0, past - 1) :]

    def planned(self, position: int) -> list[Fraction]:
        """Samples of each source that are due before `position`, since the beginning of the run."""
        due, total = targets(self.segments, position), sum(self.segments[0].weights)
        return [given + Fraction(each, total) for given, each in zip(self.counts, due, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        segments = [[each.start, list(each.weights)] for each in self.segments]
        return {"counts": list(self.counts), "segments": segments, "asked": self.asked}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> PlanPart:
        """The part with this state.

        Raises:
            ValueError, TypeError, KeyError: the state is damaged.
        """
        segments = tuple(Segment(start=start, weights=tuple(each)) for start, each in state["segments"])
        check_segments(segments)
        return cls(counts=tuple(state["counts"]), segments=segments, asked=state["asked"])


def check_history(parts: Sequence[PlanPart], position: int, counts: Sequence[int]) -> None:
    """Check that a run with this plan has these counts at `position`.

    Raises:
        ValueError: it cannot have them.
    """
    ends = [*((each.start, each.counts) for each in parts[1:]), (position, tuple(counts))]
    if not parts or parts[0].start or any(parts[0].counts):
        raise ValueError("the plan does not begin at the first sample")
    for part, (end, after) in zip(parts, ends, strict=True):
        given = [later - earlier for earlier, later in zip(part.counts, after, strict=True)]
        if end < part.start or min(given) < 0 or not is_within_quota(part.segments, end, given):
            raise ValueError(f"counts {given} of samples {part.start} … {end} do not fit the shares")


def next_part(
    settings: DataSettings, num_samples: Sequence[int], progress: Progress, last: PlanPart | None
) -> PlanPart:
    """The part of the plan for the next sample: a new one, or the last one if it goes on.

    Args:
        settings: with sources.
        num_samples: in an epoch of each source.
        progress: of the run.
        last: the part so far; None: the run begins.

    Raises:
        UserError: the sources do not have what they are to give.
    """
    assert settings.sources is not None, "the caller has checked it"
    has_amounts = any(each.weight is None for each in settings.sources.values())
    asked = _asked(settings, progress)
    is_same = last is not None and asked == last.asked
    if last is not None and is_same and has_amounts:
        return last  # a rollback takes samples beside the plan, and changes no share
    segments = (
        _segments_of_amounts(settings, num_samples, progress)
        if has_amounts
        else _segments_of_weights(settings, progress)
    )
    if last is not None and not segments:  # nothing is left to give
        return replace(last, asked=asked)
    part = PlanPart(counts=progress.counts, segments=segments, asked=asked)
    if not is_same:
        _check_epochs(settings.sources, num_samples, part.planned(progress.position + progress.left))
    if last is not None and _from(last.segments, progress.position) == _from(segments, progress.position):
        return replace(last, asked=asked)
    return part


def describe_shares(part: PlanPart, progress: Progress) -> list[str]:
    """For each source, `50.0000% of the samples until step 10, then 10.0000%; 30.0000% of the whole run`."""
    end = progress.position + progress.left
    segments = [each for each in part.segments_from(progress.position) if each.start < end] or [
        part.segments[-1]
    ]
    total = sum(segments[0].weights)
    changes = [
        progress.step + (each.start - progress.position) // progress.samples_per_step for each in segments[1:]
    ]
    lines = []
    for place, planned in enumerate(part.planned(end)):
        shares = [f"{each.weights[place] / total:.4%}" for each in segments]
        line = f"{shares[0]} of the samples"
        if not changes:
            lines.append(f"{line} to come")
            continue
        for step, share in zip(changes, shares[1:], strict=True):
            line += f" until step {step}, then {share}"
        lines.append(f"{line}; {float(planned / end):.4%} of the whole run")
    return lines


def describe_settings(settings: DataSettings, *, steps: int, samples_per_step: int) -> dict[str, str]:
    """For each source, what it gives in a run that has not begun; no source is opened.

    Args:
        settings: with sources.
        steps: of the run.
        samples_per_step: over all ranks.
    """
    assert settings.sources is not None, "the caller has checked it"
    sources = settings.sources
    if any(each.weight is None for each in sources.values()):
        weights = sum(each.weight or 0.0 for each in sources.values()) or 1.0
        return {name: _describe_amount(each, weights) for name, each in sources.items()}
    counts = (0,) * len(sources)
    progress = Progress(step=0, steps=steps, samples_per_step=samples_per_step, position=0, counts=counts)
    part = PlanPart(counts=counts, segments=_segments_of_weights(settings, progress), asked={})
    return dict(zip(sources, describe_shares(part, progress), strict=True))


def _describe_amount(source: BlendSource, weights: float) -> str:
    if source.tokens is not None:
        return f"{source.tokens:,} tokens"
    if source.epochs is not None:
        return f"{source.epochs:g} epochs"
    return f"{(source.weight or 0.0) / weights:.4%} of the samples that tokens and epochs leave"


def _asked(settings: DataSettings, progress: Progress) -> dict[str, Any]:
    assert settings.sources is not None, "the caller has checked it"
    names = ("weight", *AMOUNTS, "max_epochs")
    return {
        "sources": {
            name: {key: getattr(each, key) for key in names} for name, each in settings.sources.items()
        },
        "phases": [each.model_dump(mode="json") for each in settings.phases],
        "steps": progress.steps,
        "samples_per_step": progress.samples_per_step,
    }


def _segments_of_weights(settings: DataSettings, progress: Progress) -> tuple[Segment, ...]:
    assert settings.sources is not None, "the caller has checked it"
    known = [(0, {name: each.weight or 0.0 for name, each in settings.sources.items()})]
    known += [(each.from_step, each.weights) for each in settings.phases]
    past = [weights for from_step, weights in known if from_step <= progress.step]
    shares = [(progress.position, _exact(past[-1], settings.sources))]
    for from_step, weights in known:
        if from_step > progress.step:
            start = progress.position + (from_step - progress.step) * progress.samples_per_step
            shares.append((start, _exact(weights, settings.sources)))
    return _in_integers(shares)


def _segments_of_amounts(
    settings: DataSettings, num_samples: Sequence[int], progress: Progress
) -> tuple[Segment, ...]:
    """One segment; its shares are in proportion to what each source has still to give."""
    assert settings.sources is not None, "the caller has checked it"
    sources, length = settings.sources, settings.sequence_length
    left: list[Fraction] = []
    for (name, each), size, given in zip(sources.items(), num_samples, progress.counts, strict=True):
        amount = given if each.weight is not None else _amount(name, each, size, length)
        if amount < given:
            measure = next(key for key in AMOUNTS if getattr(each, key) is not None)
            raise UserError(
                f"data.sources.{name}.{measure} = {getattr(each, measure):g} is less than the run has read: "
                f"{given * length:,} tokens, {given / size:.4g} epochs; raise it, or set a weight of 0"
            )
        left.append(Fraction(amount - given))
    _check_amounts(settings, progress, int(sum(left)))
    rest = max(Fraction(0), progress.left - sum(left))
    weights = _exact({name: each.weight or 0.0 for name, each in sources.items()}, sources)
    total = sum(weights) or 1
    shares = [each + rest * weight / total for each, weight in zip(left, weights, strict=True)]
    if not sum(shares):
        return ()
    return _in_integers([(progress.position, shares)])


def _amount(name: str, source: BlendSource, num_samples: int, length: int) -> int:
    """Samples that a source with tokens or epochs gives in the whole run."""
    if source.tokens is not None:
        found = round(Fraction(source.tokens, length))
    else:
        assert source.epochs is not None, "BlendSource has checked it"
        found = round(_fraction(source.epochs) * num_samples)
    if not found:
        raise UserError(
            f"data.sources.{name} gives less than half a sample of {length} tokens "
            f"({num_samples:,} samples in an epoch): raise its tokens or epochs"
        )
    return found


def _check_amounts(settings: DataSettings, progress: Progress, amount: int) -> None:
    """Reject amounts that the run does not reach, or that end before it; a step more or less is rounding."""
    assert settings.sources is not None, "the caller has checked it"
    has_rest = any(each.weight for each in settings.sources.values())
    difference = amount - progress.left
    if abs(difference) <= progress.samples_per_step or (has_rest and difference < 0):
        return
    length = settings.sequence_length
    steps = progress.step + -(-amount // progress.samples_per_step)
    still = " still" if progress.step else ""
    what = (
        f"tokens and epochs in data.sources are{still} {amount * length:,} tokens, and the run reads"
        f"{still} {progress.left * length:,}"
    )
    if difference > 0:
        raise UserError(f"{what}: lower them, or set run.steps to {steps:,}")
    raise UserError(
        f"{what}: raise them, give one source a weight instead (it gives the rest), or set run.steps to "
        f"{steps:,}"
    )


def _check_epochs(
    sources: Mapping[str, BlendSource], num_samples: Sequence[int], planned: Sequence[Fraction]
) -> None:
    """Reject a plan that reads a source more often than allowed."""
    for (name, each), size, count in zip(sources.items(), num_samples, planned, strict=True):
        if each.max_epochs is not None and count >= _fraction(each.max_epochs) * size + 1:
            raise UserError(
                f"data.sources.{name} has {size:,} samples, and the run would read them "
                f"{float(count / size):.4g} times, more than max_epochs = {each.max_epochs:g}: use more "
                "text, lower its share, or raise max_epochs"
            )


def _exact(weights: Mapping[str, float], sources: Mapping[str, BlendSource]) -> list[Fraction]:
    """Weights in the order of the sources, as the decimal numbers that were written."""
    return [_fraction(weights[name]) for name in sources]


def _fraction(value: float) -> Fraction:
    return Fraction(repr(value))  # 0.1 is 1/10, not the nearest binary fraction


def _in_integers(shares: Sequence[tuple[int, Sequence[Fraction]]]) -> tuple[Segment, ...]:
    """Segments with the smallest integers; a later one at the same sample replaces an earlier one."""
    parts = {start: [each / sum(weights) for each in weights] for start, weights in shares}
    denominator = lcm(*(each.denominator for weights in parts.values() for each in weights))
    return tuple(
        Segment(start=start, weights=tuple(int(each * denominator) for each in weights))
        for start, weights in parts.items()
    )


def _from(segments: Sequence[Segment], position: int) -> list[tuple[int, tuple[int, ...]]]:
    """The shares from a sample on, in one form for equal shares."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for each in segments:
        divisor = gcd(*each.weights)
        weights = tuple(weight // divisor for weight in each.weights)
        start = max(each.start, position)
        if found and found[-1][0] == start:
            found.pop()
        if not found or found[-1][1] != weights:
            found.append((start, weights))
    return found
