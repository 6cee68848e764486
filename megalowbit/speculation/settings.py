"""The `megalowbit.speculation` section of the configuration.

A *candidate* is a precision that a product may run at. Thresholds are signal-to-noise ratios (SNR) of a
product in dB. `every`, `lookahead` and `cooldown` count optimizer steps. `trend_window`, `patience` and
`verify_every` count precision checks, of which there is one every `every` steps.

This module imports pydantic only, so a configuration can be checked without loading torch. It lists the
candidates by name; `precisions` maps the names to quantizers. Whether a recipe can be combined with the
candidates is checked in `precisions.check_base`, because that needs torch.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megalowbit.errors import unknown_name
from megalowbit.values import SettingsModel

BITS = {"int4": 4, "nvfp4": 4, "int8": 8, "mixed": 8, "fp8": 8, "bf16": 16}  # bits of an element
HIGHEST = "bf16"  # the last candidate, always: it is not quantised, and so always safe
EVEN_CANDIDATES = ("int4", "int8", HIGHEST)  # evenly spaced grids, which the noise model "zeros" assumes
EXAMPLE = '["int8", "fp8", "bf16"]'
FORMER_KEY = "ladder"  # what `candidates` was called; still accepted

MOST = 10**9  # steps, checks or elements: beyond any run, and exact in a float
Count = Annotated[int, Field(ge=1, le=MOST)]
CountFromZero = Annotated[int, Field(ge=0, le=MOST)]
NumberFromZero = Annotated[float, Field(ge=0)]


class EstimatorSettings(SettingsModel):
    """`"estimator"`: how to estimate the spread of a tensor's bulk in the presence of outliers."""

    type: Literal["quantile", "mad", "negative"] = "quantile"
    """`"quantile"` (68 % of a sample) and `"mad"` (median absolute deviation) ignore outliers; `"negative"`
    takes the smallest variance of `negative_k` samples, which is biased low."""

    sample: Annotated[Count, Field(ge=16)] = 8192
    """Elements of an operand in the sample; if the operand has no more than that, each is taken once."""

    negative_k: Annotated[Count, Field(le=100)] = 5
    """Number of samples of type `"negative"` that each check draws; at most 100."""


class SpeculationSettings(SettingsModel):
    """`"speculation"`: run each product at the cheapest candidate predicted to meet its threshold."""

    candidates: tuple[str, ...] = ("int8", "fp8", HIGHEST)
    """Precisions a product may run at, cheapest first; the last one is `"bf16"`. Formerly called `ladder`."""

    threshold_db: float | dict[str, float] = 15.0
    """Lowest acceptable SNR of a product in dB: one number, or one for each candidate but `"bf16"`."""

    estimator: EstimatorSettings = EstimatorSettings()
    """How the spread of the operands is estimated."""

    model: Literal["calibrated", "zeros"] = "calibrated"
    """Noise model. `"calibrated"` counts the rounding errors of all elements; `"zeros"` counts only the
    values that become zero, and supports `"int4"` and `"int8"` only."""

    signal: Literal["bulk", "all"] = "bulk"
    """`"bulk"`: SNR without the elements beyond 6 σ, whose energy would hide the noise of the others;
    `"all"`: with them."""

    every: Count = 10
    """Steps from one precision check to the next."""

    lookahead: CountFromZero = Field(default=20, validate_default=True)
    """Steps ahead for which the SNR trend must meet the threshold too; at least `every`. 0: ignore trends."""

    trend_window: Annotated[Count, Field(ge=2, le=1000)] = 4
    """Number of checks the trend line is fitted to; checkpoints store all of them. At most 1000."""

    hysteresis_db: NumberFromZero = 1.0
    """How far above its threshold a cheaper candidate must be before a product moves to it."""

    patience: Count = 2
    """Consecutive checks at which a cheaper candidate must be that far above its threshold."""

    verify_every: CountFromZero = 3
    """Every how many checks products are also compared with high precision. The first `verify_every` checks
    all do that, and so does the check after a layer's product moved to another quantised candidate. 0:
    never."""

    verify_size: Count = 128
    """Number of rows and columns of each product that are compared."""

    cooldown: Count = 100
    """Steps that a product stays at `"bf16"` after its measured SNR was below the threshold."""

    use_alignment: bool = True
    """Correct predictions with measurements: the alignment of a product's operands, and the prediction error
    left at each candidate."""

    def threshold(self, candidate: str) -> float:
        """Lowest acceptable SNR of a candidate in dB; -inf for the last one, which is always safe."""
        if candidate == HIGHEST:
            return -math.inf
        return self.threshold_db[candidate] if isinstance(self.threshold_db, dict) else self.threshold_db

    @model_validator(mode="before")
    @classmethod
    def _accepts_the_former_key(cls, section: Any) -> Any:
        if not isinstance(section, Mapping) or FORMER_KEY not in section:
            return section
        if "candidates" in section:
            raise ValueError(f'"{FORMER_KEY}" is the former name of "candidates": remove "{FORMER_KEY}"')
        return with_current_keys(section)

    @field_validator("candidates", mode="before")
    @classmethod
    def _is_ordered_by_bits(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list of precisions, cheapest first, such as {EXAMPLE}")
        for candidate in value:
            if not isinstance(candidate, str) or candidate not in BITS:
                raise unknown_name("precision", candidate, BITS)
        for candidate in value:
            if value.count(candidate) > 1:
                raise ValueError(f"{candidate!r} is listed twice: list it once")
        if not value or value[-1] != HIGHEST:
            raise ValueError(f'the last precision must be "{HIGHEST}", such as {EXAMPLE}')
        for before, after in itertools.pairwise(value):
            if BITS[before] > BITS[after]:
                raise ValueError(
                    f"{after!r} has fewer bits than {before!r} before it: list the cheapest first"
                )
        return tuple(value)

    @field_validator("threshold_db", mode="before")
    @classmethod
    def _has_a_threshold_for_each_candidate(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, Mapping):
            return _threshold(value)
        if "candidates" not in info.data:
            return dict(value)  # the error about the candidates is reported first
        candidates = [candidate for candidate in info.data["candidates"] if candidate != HIGHEST]
        for name in value:
            if name == HIGHEST:
                raise ValueError(f'"{HIGHEST}" is not quantised and has no threshold: leave it out')
            if name not in candidates:
                raise unknown_name("candidate", name, candidates)
        missing = [candidate for candidate in candidates if candidate not in value]
        if missing:
            raise ValueError(f"no threshold for {', '.join(missing)}: add it, or write one number for all")
        return {candidate: _threshold(value[candidate], f"{candidate}: ") for candidate in candidates}

    @field_validator("model")
    @classmethod
    def _supports_the_candidates(cls, value: str, info: ValidationInfo) -> str:
        candidates = info.data.get("candidates", ())
        unsupported = [candidate for candidate in candidates if candidate not in EVEN_CANDIDATES]
        if value == "zeros" and unsupported:
            raise ValueError(
                f"it supports evenly spaced grids only, not {', '.join(unsupported)}: remove that from the "
                'candidates, or write "calibrated"'
            )
        return value

    @field_validator("lookahead")
    @classmethod
    def _reaches_the_next_check(cls, value: int, info: ValidationInfo) -> int:
        every = info.data.get("every", 0)
        if 0 < value < every:
            raise ValueError(
                f"the next check is {every} steps away: set it to {every} or more, to 0 for no trend, or "
                "lower every"
            )
        return value


def with_current_keys(section: Mapping[str, Any]) -> dict[str, Any]:
    """A `speculation` section with `ladder`, if it is there, under its present name."""
    return {"candidates" if key == FORMER_KEY else key: value for key, value in section.items()}


def _threshold(value: object, where: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{where}expected a number of dB, or one for each candidate such as {{"int8": 15}}')
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{where}expected a finite number of dB ≥ 0, such as 15")
    return float(value)
