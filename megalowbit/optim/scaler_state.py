"""Saved loss scalers, ours and other libraries', read as one thing: S and two counters.

Read are the states of Megatron (keys `scale`, `growth_tracker`, `hysteresis_tracker`; ours are the same),
`torch.amp.GradScaler`, DeepSpeed's FP16 optimizers, its ZeRO optimizers (a pickled `DynamicLossScaler` under
`loss_scaler`; the object, or its `__dict__`), older Megatron and Apex `FP16_Optimizer` (objects of the same
descent) and Apex amp (`loss_scaler0`). Counters are translated, so that the next updates are those of the
original under the rule (`mode`) and the arguments it had. Those arguments are not taken over: the
configuration decides, and a warning says where the state had another value. The bounds are the scaler's own
business.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalowbit.errors import UserError, shown

logger = logging.getLogger(__name__)

STATE_KEYS = ("scale", "growth_tracker", "hysteresis_tracker")
TORCH_KEY = "_growth_tracker"
STRATEGY_KEY = "strategy"  # its value names the strategy of scale_strategies that wrote the state
# arguments that a foreign state carries, by our name
ARGUMENT_KEYS = {
    "growth_factor": ("growth_factor", "scale_factor"),
    "growth_interval": ("growth_interval", "scale_window"),
    "backoff_factor": ("backoff_factor",),
    "hysteresis": ("delayed_shift",),
}
# only DeepSpeed's descendants of the old Megatron scaler have one of these
DEEPSPEED_MARKS = ("dynamic_loss_scale", "dynamic", "raise_error_at_min_scale")


@dataclass(frozen=True, kw_only=True)
class SavedScaler:
    """What a state says.

    Attributes:
        scale: S.
        growth_tracker: clean steps that count towards the next growth.
        hysteresis_tracker: overflows left until one lowers S; None where the source keeps no count.
        arguments: arguments that the state carries, by our names.
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_tracker: int | None = None
    arguments: dict[str, float] = field(default_factory=dict)


def read_saved_scaler(state: Mapping[str, Any]) -> SavedScaler:
    """Recognise a state by its keys and read it.

    Values may be tensors of one element.

    Raises:
        UserError: the keys are those of no known scaler, or the state holds several scales.
    """
    if any(key.startswith("loss_scaler") and key != "loss_scaler" for key in state):
        return _read_apex_amp(state)
    if "loss_scaler" in state:
        return _read_loss_scaler(_as_mapping(state["loss_scaler"]))
    if "cur_scale" in state or "_loss_scale" in state:
        return _read_loss_scaler(state)
    if "scale" in state and TORCH_KEY in state:
        return SavedScaler(
            scale=float(state["scale"]),
            growth_tracker=int(state[TORCH_KEY]),
            arguments=_arguments(state),
        )
    if "scale" in state and STRATEGY_KEY in state:
        return SavedScaler(scale=float(state["scale"]))
    missing = [key for key in STATE_KEYS if key not in state]
    if missing:
        raise UserError(
            f"grad scaler state lacks {', '.join(missing)}: found only {sorted(state) or 'nothing'}"
        )
    return SavedScaler(
        scale=float(state["scale"]),
        growth_tracker=int(state["growth_tracker"]),
        hysteresis_tracker=int(state["hysteresis_tracker"]),
    )


def fitted_scale(scale: float, low: float, high: float) -> float:
    """`scale` clamped to [low, high], with a warning where that changes it.

    Below the minimum the next backoff would raise S.

    Raises:
        UserError: it is not a finite number > 0.
    """
    if not 0 < scale < float("inf"):
        raise UserError(
            f"scale of the loaded grad scaler state must be a finite number > 0, not {scale!r}: "
            "load an earlier checkpoint, or start without the scaler's state"
        )
    fitted = min(max(scale, low), high)
    if fitted != scale:
        logger.warning(
            "loaded loss scale %g lies outside [%g, %g]: continuing with %g", scale, low, high, fitted
        )
    return fitted


def warn_of_other_arguments(saved: SavedScaler, current: Mapping[str, float]) -> None:
    """Say which arguments of the saved scaler differ from the `current` ones, which hold."""
    for name, value in saved.arguments.items():
        if name in current and current[name] != value:
            logger.warning(
                "the loaded grad scaler had %s = %g: continuing with %g", name, value, current[name]
            )


def _as_mapping(scaler: Any) -> Mapping[str, Any]:
    if isinstance(scaler, Mapping):
        return scaler
    if hasattr(scaler, "__dict__"):
        return vars(scaler)
    raise UserError(f'"loss_scaler" of the loaded state = {shown(scaler)} is neither a scaler nor its state')


def _read_apex_amp(state: Mapping[str, Any]) -> SavedScaler:
    names = sorted(key for key in state if key.startswith("loss_scaler"))
    if len(names) > 1:
        raise UserError(
            f"the loaded state holds {len(names)} loss scales ({', '.join(names)}), and one is used here: "
            f'pass {{"loss_scaler0": …}} alone'
        )
    return _read_loss_scaler(_as_mapping(state[names[0]]))


def _read_loss_scaler(state: Mapping[str, Any]) -> SavedScaler:
    """DeepSpeed's, old Megatron's and Apex's scalers, which count differently under similar names."""
    for scale_key, count_key in (("loss_scale", "unskipped"), ("_loss_scale", "_unskipped")):
        if scale_key in state and count_key in state:  # Apex
            return SavedScaler(scale=float(state[scale_key]), growth_tracker=int(state[count_key]))
    if "cur_scale" not in state:
        raise UserError(
            f'"loss_scaler" of the loaded state holds no scale: found only {sorted(state) or "nothing"}'
        )
    arguments = _arguments(state)
    hysteresis = int(state["cur_hysteresis"]) if "cur_hysteresis" in state else None
    return SavedScaler(
        scale=float(state["cur_scale"]),
        growth_tracker=_clean_steps(state, arguments.get("growth_interval")),
        hysteresis_tracker=hysteresis,
        arguments=arguments,
    )


def _clean_steps(state: Mapping[str, Any], interval: float | None) -> int:
    """Clean steps since the last overflow or growth, from the numbers of iterations."""
    if state.get("last_overflow_iter") is None or state.get("cur_iter") is None:
        return 0  # a constant scale counts nothing
    clean = int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 1
    if clean <= 0 or not interval:
        return max(clean, 0)
    if any(mark in state for mark in DEEPSPEED_MARKS):
        return (clean - 1) % int(interval) + 1  # it grows one step late: see the rule
    return clean % int(interval)


def _arguments(state: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, keys in ARGUMENT_KEYS.items():
        for key in keys:
            if state.get(key) is not None:
                found[name] = float(state[key])
    return found
