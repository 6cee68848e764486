"""Saved loss scalers of megalowbit and other libraries, read into one form: S and two counters.

Supported are the states of

- Megatron (keys `scale`, `growth_tracker`, `hysteresis_tracker`; megalowbit's are the same),
- `torch.amp.GradScaler`,
- DeepSpeed's FP16 optimizers,
- DeepSpeed's ZeRO optimizers (a pickled `DynamicLossScaler` under `loss_scaler`; the object, or its
  `__dict__`),
- older Megatron and Apex `FP16_Optimizer` (objects of the same origin),
- Apex amp (`loss_scaler0`).

Counters are converted, so the next updates are those of the original under its rule (`mode`) and arguments.
The arguments are not loaded: the configuration decides, and a warning lists arguments for which the state had
another value. The scaler itself applies its bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalowbit.errors import UserError, shown
from megalowbit.json_text import is_finite_number

logger = logging.getLogger(__name__)

STATE_KEYS = ("scale", "growth_tracker", "hysteresis_tracker")
TORCH_KEY = "_growth_tracker"
STRATEGY_KEY = "strategy"  # its value is the strategy that wrote the state
# arguments contained in another library's state, by megalowbit's name
ARGUMENT_KEYS = {
    "growth_factor": ("growth_factor", "scale_factor"),
    "growth_interval": ("growth_interval", "scale_window"),
    "backoff_factor": ("backoff_factor",),
    "hysteresis": ("delayed_shift",),
}
COUNTS = ("growth_interval", "hysteresis")
# only DeepSpeed's versions of the old Megatron scaler have one of these
DEEPSPEED_MARKS = ("dynamic_loss_scale", "dynamic", "raise_error_at_min_scale")


@dataclass(frozen=True, kw_only=True)
class SavedScaler:
    """The contents of a state.

    Attributes:
        scale: S.
        growth_tracker: clean steps that count towards the next growth.
        hysteresis_tracker: overflows left until one lowers S; None if the source keeps no count.
        arguments: arguments contained in the state, by megalowbit's names.
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_tracker: int | None = None
    arguments: dict[str, float] = field(default_factory=dict)


def read_saved_scaler(state: Mapping[str, Any]) -> SavedScaler:
    """Recognise a state by its keys and read it.

    Values may be tensors of one element.

    Raises:
        UserError: the keys belong to no known scaler, the state holds several scales, a value is not a finite
            number, or the scale is not > 0.
    """
    check_is_mapping(state)
    if _apex_keys(state):
        return _read_apex_amp(state)
    if "loss_scaler" in state:
        return _read_loss_scaler(_as_mapping(state["loss_scaler"]))
    if "cur_scale" in state or "_loss_scale" in state:
        return _read_loss_scaler(state)
    if "scale" in state and TORCH_KEY in state:
        return SavedScaler(
            scale=read_scale(state, "scale"),
            growth_tracker=_whole(state, TORCH_KEY),
            arguments=_arguments(state),
        )
    if "scale" in state and STRATEGY_KEY in state:
        return SavedScaler(scale=read_scale(state, "scale"))
    missing = [key for key in STATE_KEYS if key not in state]
    if missing:
        raise UserError(f"grad scaler state lacks {', '.join(missing)}: found only {shown_keys(state)}")
    return SavedScaler(
        scale=read_scale(state, "scale"),
        growth_tracker=_whole(state, "growth_tracker"),
        hysteresis_tracker=_whole(state, "hysteresis_tracker"),
    )


def check_is_mapping(state: object) -> None:
    """Reject a state that is not a mapping.

    Raises:
        UserError: it is not a mapping.
    """
    if not isinstance(state, Mapping):
        raise UserError(f"grad scaler state = {shown(state)} must be a mapping, as returned by state_dict()")


def plain_number(value: Any) -> Any:
    """The number in a tensor or array of one element; any other value unchanged."""
    if not hasattr(value, "item") or isinstance(value, type):
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):  # several elements, or no memory
        return value


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number that fits in 64 bits."""
    return is_finite_number(value) and value == int(value) and abs(value) < 2**63  # type: ignore[call-overload,arg-type]


def damaged(name: str, value: object, rule: str) -> UserError:
    """The error for an invalid value in a saved state."""
    return UserError(
        f"{name} of the loaded grad scaler state must be {rule}, not {shown(value)}: "
        "load an earlier checkpoint, or start without the scaler's state"
    )


def read_scale(state: Mapping[str, Any], name: str) -> float:
    """S of a state.

    Raises:
        UserError: it is not a finite number > 0.
    """
    scale = plain_number(state[name])
    if not (is_finite_number(scale) and scale > 0):
        raise damaged(name, scale, "a finite number > 0")
    return float(scale)


def shown_keys(state: Mapping[Any, Any]) -> str:
    """The keys of a state for a message."""
    return shown(sorted(map(str, state))) if state else "nothing"


def _whole(state: Mapping[str, Any], name: str) -> int:
    value = plain_number(state[name])
    if not is_whole(value):
        raise damaged(name, value, "a whole number")
    return int(value)


def _apex_keys(state: Mapping[Any, Any]) -> list[str]:
    return sorted(
        key
        for key in state
        if isinstance(key, str) and key.startswith("loss_scaler") and key != "loss_scaler"
    )


def fitted_scale(scale: float, low: float, high: float) -> float:
    """`scale` clamped to [low, high], with a warning if that changes it.

    Below the minimum the next backoff would raise S.
    """
    fitted = min(max(scale, low), high)
    if fitted != scale:
        logger.warning(
            "loaded loss scale %g is outside [%g, %g]: continuing with %g", scale, low, high, fitted
        )
    return fitted


def warn_of_other_arguments(saved: SavedScaler, current: Mapping[str, float]) -> None:
    """Warn about arguments of the saved scaler that differ from the `current` ones, which are used."""
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
    names = _apex_keys(state)
    if len(names) > 1:
        raise UserError(
            f"the loaded state holds {len(names)} loss scales ({', '.join(names)}), but one is used here: "
            f'pass only {{"loss_scaler0": …}}'
        )
    return _read_loss_scaler(_as_mapping(state[names[0]]))


def _read_loss_scaler(state: Mapping[str, Any]) -> SavedScaler:
    """Read DeepSpeed's, old Megatron's and Apex's scalers, which count differently under similar names."""
    for scale_key, count_key in (("loss_scale", "unskipped"), ("_loss_scale", "_unskipped")):
        if scale_key in state and count_key in state:  # Apex
            return SavedScaler(scale=read_scale(state, scale_key), growth_tracker=_whole(state, count_key))
    if "cur_scale" not in state:
        raise UserError(f'"loss_scaler" of the loaded state holds no scale: found only {shown_keys(state)}')
    arguments = _arguments(state)
    hysteresis = _whole(state, "cur_hysteresis") if "cur_hysteresis" in state else None
    return SavedScaler(
        scale=read_scale(state, "cur_scale"),
        growth_tracker=_clean_steps(state, arguments.get("growth_interval")),
        hysteresis_tracker=hysteresis,
        arguments=arguments,
    )


def _clean_steps(state: Mapping[str, Any], interval: float | None) -> int:
    """Clean steps since the last overflow or growth, computed from iteration numbers."""
    if state.get("last_overflow_iter") is None or state.get("cur_iter") is None:
        return 0  # a constant scale counts nothing
    clean = _whole(state, "cur_iter") - _whole(state, "last_overflow_iter") - 1
    if clean <= 0 or not interval:
        return max(clean, 0)
    if any(mark in state for mark in DEEPSPEED_MARKS):
        return (clean - 1) % int(interval) + 1  # it grows one step late, see `rules`
    return clean % int(interval)


def _arguments(state: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, keys in ARGUMENT_KEYS.items():
        for key in keys:
            value = plain_number(state.get(key))
            if value is None:
                continue
            if not (is_finite_number(value) and value > 0 and (name not in COUNTS or value == int(value))):
                raise damaged(key, value, "a whole number > 0" if name in COUNTS else "a finite number > 0")
            found[name] = float(value)
    return found
