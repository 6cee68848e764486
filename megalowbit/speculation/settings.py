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
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.values import SettingsModel, unit

BITS = {"int4": 4, "nvfp4": 4, "int8": 8, "mixed": 8, "fp8": 8, "bf16": 16}  # bits of an element
HIGHEST = "bf16"  # the last candidate, always: it is not quantised, and so always safe
EXAMPLE = '["int8", "fp8", "bf16"]'
FORMER_KEY = "ladder"  # what `candidates` was called; still accepted
# Former settings, and the value that is built in now. It is accepted and ignored, others are errors.
FIXED = {"model": "calibrated", "signal": "bulk"}
FIXED_IN_ESTIMATOR = {"type": "quantile"}
UNUSED_IN_ESTIMATOR = "negative_k"  # belonged to the estimator type "negative"

MOST = 10**9  # steps, checks or elements: beyond any run, and exact in a float
Count = Annotated[int, Field(ge=1, le=MOST)]
CountFromZero = Annotated[int, Field(ge=0, le=MOST)]
NumberFromZero = Annotated[float, Field(ge=0)]


def _present_estimator(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    kept = {key: value for key, value in section.items() if key != UNUSED_IN_ESTIMATOR}
    return _without_fixed(kept, FIXED_IN_ESTIMATOR)


def _without_fixed(section: Mapping[str, Any], fixed: Mapping[str, str]) -> dict[str, Any]:
    for key, value in fixed.items():
        if key in section and section[key] != value:
            raise ValueError(f'{key} {shown(section[key])} was removed, "{value}" is built in: remove {key}')
    return {key: value for key, value in section.items() if key not in fixed}


class EstimatorSettings(SettingsModel):
    """How to estimate the spread of an operand's bulk in the presence of outliers."""

    sample: Annotated[Count, Field(ge=16)] = Field(
        default=8192,
        description="size of the sample. If the tensor has no more elements than this, each is taken once",
        json_schema_extra=unit("elements"),
    )

    @model_validator(mode="before")
    @classmethod
    def _accepts_former_keys(cls, section: Any) -> Any:
        return _present_estimator(section)


class SpeculationSettings(SettingsModel):
    """Each product of each layer runs at the cheapest precision predicted to meet the SNR threshold."""

    candidates: tuple[str, ...] = Field(
        default=("int8", "fp8", HIGHEST),
        description="the candidate precisions, cheapest first: `int4`, `nvfp4`, `int8`, `mixed`, `fp8`, "
        "`bf16`. The last one must be `bf16`. The former key, `ladder`, is accepted too",
    )
    threshold_db: float | dict[str, float] = Field(
        default=15.0,
        description="smallest SNR (≥ 0) that a candidate needs: one number, or an object with one number for "
        "each candidate except `bf16`. Predictions below 6 dB are not reliable",
        json_schema_extra=unit("dB"),
    )
    estimator: EstimatorSettings = Field(
        default=EstimatorSettings(), description="how to estimate the spread of operands"
    )
    every: Count = Field(
        default=10, description="interval between precision checks", json_schema_extra=unit("steps")
    )
    lookahead: CountFromZero = Field(
        default=20,
        validate_default=True,
        description="how far ahead the trend of the SNR is extrapolated; at least `every`. 0: no trend",
        json_schema_extra=unit("steps"),
    )
    trend_window: Annotated[Count, Field(ge=2, le=1000)] = Field(
        default=4,
        description="number of checks through which the trend line is fitted; checkpoints store all of them",
        json_schema_extra=unit("checks"),
    )
    hysteresis_db: NumberFromZero = Field(
        default=1.0,
        description="margin above its threshold that a cheaper candidate needs before a product moves to it",
        json_schema_extra=unit("dB"),
    )
    patience: Count = Field(
        default=2,
        description="number of checks in a row that a cheaper candidate must meet this margin",
        json_schema_extra=unit("checks"),
    )
    verify_every: CountFromZero = Field(
        default=3,
        description="interval between verified checks, which compare products with high precision. The first "
        "`verify_every` checks are all verified. 0: never",
        json_schema_extra=unit("checks"),
    )
    verify_size: Count = Field(
        default=128,
        description="number of rows and of columns that a verified check compares",
        json_schema_extra=unit("rows"),
    )
    cooldown: Count = Field(
        default=100,
        description="how long a product stays at `bf16` after its measured SNR was below the threshold",
        json_schema_extra=unit("steps"),
    )
    use_alignment: bool = Field(
        default=True,
        description="correct predictions by earlier measurements, which show how operands and rounding "
        "errors depend on each other",
    )

    def threshold(self, candidate: str) -> float:
        """Smallest SNR in dB that a candidate needs; -inf for the last one."""
        if candidate == HIGHEST:
            return -math.inf
        return self.threshold_db[candidate] if isinstance(self.threshold_db, dict) else self.threshold_db

    @model_validator(mode="before")
    @classmethod
    def _accepts_former_keys(cls, section: Any) -> Any:
        if not isinstance(section, Mapping):
            return section
        if FORMER_KEY in section and "candidates" in section:
            raise ValueError(f'"{FORMER_KEY}" is the former name of "candidates": remove "{FORMER_KEY}"')
        return _without_fixed(_with_current_name(section), FIXED)

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
    """A `speculation` section that a run recorded, without settings that no longer exist.

    Raises:
        UserError: the run used a value that no longer exists.
    """
    present = _with_current_name(section)
    try:
        if "estimator" in present:
            present["estimator"] = _present_estimator(present["estimator"])
        return _without_fixed(present, FIXED)
    except ValueError as error:
        raise UserError(
            f"the run to resume used a setting of megalowbit.speculation that no longer exists ({error}): "
            "start a new run from its weights with megalowbit.model.checkpoint"
        ) from None


def _with_current_name(section: Mapping[str, Any]) -> dict[str, Any]:
    return {"candidates" if key == FORMER_KEY else key: value for key, value in section.items()}


def _threshold(value: object, where: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{where}expected a number of dB, or one for each candidate such as {{"int8": 15}}')
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{where}expected a finite number of dB ≥ 0, such as 15")
    return float(value)
