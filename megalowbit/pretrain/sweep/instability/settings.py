"""When a run counts as broken, and when a recorded metric counts as unusual. Imported without torch."""

from __future__ import annotations

from pydantic import Field

from megalowbit.values import SettingsModel, unit


class InstabilitySettings(SettingsModel):
    """Limits of the report on stresses."""

    window: int = Field(
        default=20,
        ge=1,
        description="number of steps in the means of the loss by which a run is judged",
        json_schema_extra=unit("steps"),
    )
    rise: float = Field(
        default=0.25,
        gt=0,
        allow_inf_nan=False,
        description="a run is broken if its mean loss is this far above the lowest mean it has had",
        json_schema_extra=unit("nats"),
    )
    gap: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="or this far above the baseline's under the same stress, from one window to the next one "
        "that has no step in common with it, unless the baseline is broken itself",
        json_schema_extra=unit("nats"),
    )
    bucket: int = Field(
        default=10,
        ge=1,
        description="metrics are judged by their median over this many steps",
        json_schema_extra=unit("steps"),
    )
    in_a_row: int = Field(
        default=2,
        ge=1,
        description="a metric gives an alarm after this many medians in a row beyond its limit",
        json_schema_extra=unit("medians"),
    )
    margin: float = Field(
        default=0.5,
        ge=0,
        allow_inf_nan=False,
        description="distance of a limit from the extreme of unstressed runs, as a share of their range",
    )
