"""A loss scale that rises while half-precision gradients are lost to zero, and the base of such scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megalowbit.optim.loss_scale.base import Count, GradientStatistics, PositiveNumber, check, is_positive
from megalowbit.optim.loss_scale.gradient_based import StrategyGradScaler, StrategySettings
from megalowbit.values import is_count, unit


class ProbingGradScaler(StrategyGradScaler):
    """Base of the strategies that periodically compare gradient norms with fp32 ones.

    Args:
        epsilon: share of the norm, and of the elements, that may be lost; in (0, 1).
        probe_every: steps between probes.
        **common: arguments of the other base class, or of `StrategyGradScaler`.
    """

    probes = True

    def __init__(
        self, initial_scale: float = 2.0**15, min_scale: float = 1.0, *,
        epsilon: float = 0.05, probe_every: int = 100, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(initial_scale, min_scale, **common)
        check("epsilon", epsilon, is_positive(epsilon) and epsilon < 1, "in (0, 1)")
        check("probe_every", probe_every, is_count(probe_every), "a whole number > 0")
        self.epsilon = float(epsilon)
        self.probe_every = probe_every

    @property
    def wants_probe(self) -> bool:
        # counts clean steps: a probe whose step overflowed is repeated
        return self._steps % self.probe_every == 0


class NormRatioGradScaler(ProbingGradScaler):
    """S grows while half-precision gradients lose what fp32 ones retain; only an overflow lowers it.

    Every `probe_every` steps the norm of sampled weight gradients in fp32 is compared with their norm in half
    precision. Gradients count as lost if the ratio exceeds 1 + `epsilon`, or if a share above `epsilon` of
    the elements became zero. S then grows by one octave. A ratio below 1 has no meaning. A threshold of 8,
    which is sometimes recommended, waits until 98 % of the squared norm is lost.

    Args:
        **arguments: those of `ProbingGradScaler`.
    """

    NAME = "norm_ratio"
    STATE: ClassVar[Mapping[str, float | None]] = {"is_losing": False}

    _is_losing: bool

    def _gather(self, statistics: GradientStatistics) -> None:
        found = is_losing(statistics, self.epsilon)
        self._is_losing = self._is_losing if found is None else found

    def _wanted(self) -> float | None:
        if not self._is_losing:
            return None
        self._is_losing = False  # one octave for each probe
        return self._exponent + 1.0

    def _after_backoff(self) -> None:
        self._is_losing = False


class ProbingSettings(StrategySettings):
    """Settings of the strategies that probe gradient norms in fp32."""

    epsilon: Annotated[PositiveNumber, Field(lt=1)] = Field(
        default=0.05, description="fraction of the norm, and of the elements, that may be lost to zero"
    )
    probe_every: Count = Field(
        default=100, description="interval between probes", json_schema_extra=unit("steps")
    )


class NormRatioSettings(ProbingSettings):
    """S grows while half precision loses gradients to zero, compared with the same gradients in fp32."""

    SCALER = NormRatioGradScaler

    type: Literal["norm_ratio"] = "norm_ratio"


def is_losing(statistics: GradientStatistics, epsilon: float) -> bool | None:
    """Whether a probe found gradients lost to zero; None without a probe. NaN does not count as a loss."""
    ratio, flushed = statistics.norm_ratio, statistics.flushed_fraction
    if ratio is None and flushed is None:
        return None
    return (ratio is not None and ratio > 1.0 + epsilon) or (flushed is not None and flushed > epsilon)
