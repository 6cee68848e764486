"""The `megalowbit.speculation` section of the configuration: which precisions, from which SNR on, how often.

A *candidate* is one precision of the ladder. Thresholds are signal-to-noise ratios of a product in dB;
`every`, `lookahead` and `cooldown` count optimizer steps; `trend_window`, `patience` and `verify_every` count
looks, of which there is one every `every` steps.

This module imports pydantic only, so that a configuration is checked without loading torch; the candidates
stand here by name, `precisions` says what they quantise to. Not covered: whether the recipe can be combined
with a ladder, which takes torch to know, see `precisions.check_base`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from megalowbit.errors import unknown_name
from megalowbit.values import SettingsModel

BITS = {"int4": 4, "nvfp4": 4, "int8": 8, "mixed": 8, "fp8": 8, "bf16": 16}  # bits of an element
HIGHEST = "bf16"  # the last candidate of every ladder: not quantised, and so always safe
EVEN_CANDIDATES = ("int4", "int8", HIGHEST)  # those whose grid is even, as the model "zeros" presumes
EXAMPLE = '["int8", "fp8", "bf16"]'

MOST = 10**9  # steps, looks or elements: no run has more, and floats tell these apart
Count = Annotated[int, Field(ge=1, le=MOST)]
CountFromZero = Annotated[int, Field(ge=0, le=MOST)]
NumberFromZero = Annotated[float, Field(ge=0)]


class EstimatorSettings(SettingsModel):
    """`"estimator"`: how the spread of a tensor's bulk is found among its outliers.

    Attributes:
        type: "quantile" (of 68 % of a sample) and "mad" (median absolute deviation) are unmoved by outliers;
            "negative" takes the least variance of `negative_k` samples, and so reads it low.
        sample: elements looked at; as many as the tensor has, or more, take each of them once.
        negative_k: number of samples of type "negative", each drawn at every look; 100 at most.
    """

    type: Literal["quantile", "mad", "negative"] = "quantile"
    sample: Annotated[Count, Field(ge=16)] = 8192
    negative_k: Annotated[Count, Field(le=100)] = 5


class SpeculationSettings(SettingsModel):
    """`"speculation"`: each product of each layer runs at the cheapest candidate that is foreseen to be safe.

    Attributes:
        ladder: precisions, cheapest first; the last one is "bf16".
        threshold_db: least SNR a candidate needs, one number or one for each candidate but "bf16".
        estimator: of the spread of operands.
        model: of their noise: "calibrated" counts the rounding error of all elements, "zeros" only the values
            that become zero; the latter for "int4" and "int8" alone.
        signal: "bulk": without elements beyond 6 σ, whose energy would hide what becomes of the others;
            "all": with them.
        every: steps between looks.
        lookahead: steps ahead for which the SNR is foreseen from its trend, at least `every`; 0: none.
        trend_window: looks whose line is the trend, all of which checkpoints hold; 1000 at most.
        hysteresis_db: what a cheaper candidate needs above its threshold before a product goes to it.
        patience: looks in a row for which it needs that.
        verify_every: looks from one comparison with high-precision products to the next, of which the first
            `verify_every` looks all have one, as has the next look of a layer that has come to another
            precision; 0: never.
        verify_size: rows and columns that are compared.
        cooldown: steps for which a product stays at "bf16" after its measured SNR was below the threshold.
        use_alignment: correct predictions by what was measured: how far the signal is from that of operands
            that have nothing to do with each other, and how far predictions at each precision were off then.
    """

    ladder: tuple[str, ...] = ("int8", "fp8", HIGHEST)
    threshold_db: float | dict[str, float] = 15.0
    estimator: EstimatorSettings = EstimatorSettings()
    model: Literal["calibrated", "zeros"] = "calibrated"
    signal: Literal["bulk", "all"] = "bulk"
    every: Count = 10
    lookahead: CountFromZero = Field(default=20, validate_default=True)
    trend_window: Annotated[Count, Field(ge=2, le=1000)] = 4
    hysteresis_db: NumberFromZero = 1.0
    patience: Count = 2
    verify_every: CountFromZero = 3
    verify_size: Count = 128
    cooldown: Count = 100
    use_alignment: bool = True

    def threshold(self, candidate: str) -> float:
        """Least SNR in dB that a candidate needs; -inf for the last one, which is always safe."""
        if candidate == HIGHEST:
            return -math.inf
        return self.threshold_db[candidate] if isinstance(self.threshold_db, dict) else self.threshold_db

    @field_validator("ladder", mode="before")
    @classmethod
    def _is_a_ladder(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list of precisions, cheapest first, such as {EXAMPLE}")
        for candidate in value:
            if not isinstance(candidate, str) or candidate not in BITS:
                raise unknown_name("precision", candidate, BITS)
        for candidate in value:
            if value.count(candidate) > 1:
                raise ValueError(f"{candidate!r} stands there twice, write it once")
        if not value or value[-1] != HIGHEST:
            raise ValueError(f'the last precision must be "{HIGHEST}", such as {EXAMPLE}')
        for cheap, dear in itertools.pairwise(value):
            if BITS[cheap] > BITS[dear]:
                raise ValueError(
                    f"{dear!r} has fewer bits than {cheap!r} before it: write the cheapest first"
                )
        return tuple(value)

    @field_validator("threshold_db", mode="before")
    @classmethod
    def _has_a_threshold_for_each_rung(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, Mapping):
            return _threshold(value)
        if "ladder" not in info.data:
            return dict(value)  # what is wrong with the ladder is told first
        candidates = [candidate for candidate in info.data["ladder"] if candidate != HIGHEST]
        for name in value:
            if name == HIGHEST:
                raise ValueError(f'"{HIGHEST}" is not quantised and has no threshold: leave it out')
            if name not in candidates:
                raise unknown_name("rung of the ladder", name, candidates)
        missing = [candidate for candidate in candidates if candidate not in value]
        if missing:
            raise ValueError(f"no threshold for {', '.join(missing)}: add it, or write one number for all")
        return {candidate: _threshold(value[candidate], f"{candidate}: ") for candidate in candidates}

    @field_validator("model")
    @classmethod
    def _suits_the_ladder(cls, value: str, info: ValidationInfo) -> str:
        foreign = [candidate for candidate in info.data.get("ladder", ()) if candidate not in EVEN_CANDIDATES]
        if value == "zeros" and foreign:
            raise ValueError(
                f"it counts zeros of even grids, which {', '.join(foreign)} has not: leave it out of the "
                'ladder, or write "calibrated"'
            )
        return value

    @field_validator("lookahead")
    @classmethod
    def _reaches_the_next_look(cls, value: int, info: ValidationInfo) -> int:
        every = info.data.get("every", 0)
        if 0 < value < every:
            raise ValueError(
                f"the next look is {every} steps away: set it to {every} or more, to 0 for no trend, or "
                "lower every"
            )
        return value


def _threshold(value: object, where: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{where}expected a number of dB, or one for each rung such as {{"int8": 15}}')
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{where}expected a finite number of dB ≥ 0, such as 15")
    return float(value)
