"""`optimizer` and `scheduler` of a DeepSpeed configuration: names, parameters and what `"auto"` stands for.

The optimizer inside ours is always torch's fused one, on CPUs too: DeepSpeed's own CPU Adam compiles for
minutes and gains nothing here. Its name in the file stays DeepSpeed's, and so does the meaning of `Adam`,
which there is AdamW unless `adam_w_mode` is false. Not covered: Lamb, Lion, Muon and the 1-bit optimizers.

`"auto"` stands for: `lr` 3e-4, `betas` [0.9, 0.95], `eps` 1e-8, `weight_decay` 0.1, `momentum` 0;
schedulers: `warmup_min_lr` and `warmup_min_ratio` 0, `warmup_max_lr` (and `max_lr`) the optimizer's `lr`,
`warmup_num_steps` one hundredth of all steps, `cos_min_ratio` 0.1, `total_num_steps` (and torch's
`total_steps`, `total_iters`, `T_max`) all steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from megalowbit.engine.deepspeed_values import is_count, is_finite_number
from megalowbit.errors import UserError, invalid_settings, unknown_name

if TYPE_CHECKING:
    import torch


class OptimizerParams(BaseModel):
    """What `optimizer.params` of all optimizers have in common: `true` is not taken for 1.0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        is_truth_value = cls.model_fields[info.field_name or ""].annotation is bool
        if not is_truth_value and _has_truth_value(value):
            raise ValueError("write a number, not true or false")
        return value


class AdamParams(OptimizerParams):
    """`optimizer.params` of AdamW and Adam."""

    lr: float = Field(default=1e-3, allow_inf_nan=False, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, allow_inf_nan=False, gt=0)
    weight_decay: float = Field(default=0.0, allow_inf_nan=False, ge=0)
    amsgrad: bool = False
    adam_w_mode: bool = True
    bias_correction: bool = True
    torch_adam: bool = True


class SGDParams(OptimizerParams):
    """`optimizer.params` of SGD."""

    lr: float = Field(default=1e-3, allow_inf_nan=False, ge=0)
    momentum: float = Field(default=0.0, allow_inf_nan=False, ge=0, lt=1)
    dampening: float = Field(default=0.0, allow_inf_nan=False, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, allow_inf_nan=False, ge=0)
    nesterov: bool = False


OPTIMIZERS: dict[str, type[AdamParams] | type[SGDParams]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "SGD": SGDParams,
}
# known to DeepSpeed or to its users, not usable here
REPLACED_BY_ADAMW = ("FusedAdam", "CPUAdam", "DeepSpeedCPUAdam", "OneBitAdam", "ZeroOneAdam", "FusedAdamW")
OPTIMIZER_AUTO: dict[str, Any] = {
    "lr": 3e-4,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.0,
}

# name: (required, optional) parameters; the first five are DeepSpeed's, the others torch's
SCHEDULERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "WarmupLR": ((), ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")),
    "WarmupDecayLR": (
        ("total_num_steps",),
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    ),
    "WarmupCosineLR": (
        ("total_num_steps",),
        ("warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
    ),
    "OneCycle": (
        ("cycle_min_lr", "cycle_max_lr"),
        (
            "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
            "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom",
            "decay_mom_rate",
        ),
    ),
    "LRRangeTest": (
        (),
        (
            "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
            "lr_range_test_staircase",
        ),
    ),
    "ConstantLR": ((), ("factor", "total_iters")),
    "LinearLR": ((), ("start_factor", "end_factor", "total_iters")),
    "PolynomialLR": ((), ("total_iters", "power")),
    "StepLR": (("step_size",), ("gamma",)),
    "MultiStepLR": (("milestones",), ("gamma",)),
    "ExponentialLR": (("gamma",), ()),
    "CosineAnnealingLR": (("T_max",), ("eta_min",)),
    "CosineAnnealingWarmRestarts": (("T_0",), ("T_mult", "eta_min")),
    "OneCycleLR": (
        ("max_lr",),
        ("total_steps", "pct_start", "anneal_strategy", "cycle_momentum", "div_factor", "final_div_factor"),
    ),
}  # fmt: skip
SWITCHES = ("cycle_momentum", "lr_range_test_staircase")  # the only parameters that are true or false
ALL_STEPS = ("total_num_steps", "total_steps", "total_iters", "T_max")
COUNTS = ("warmup_num_steps", *ALL_STEPS, "step_size", "T_0", "T_mult", "lr_range_test_step_size")
RATIOS = ("warmup_min_ratio", "cos_min_ratio")
LISTS = ("cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr", "max_lr", "milestones")  # or numbers
NULLABLE = ("warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count")
NAMES = {"warmup_type": ("log", "linear"), "anneal_strategy": ("cos", "linear")}
SCHEDULER_AUTO = {"warmup_min_lr": 0.0, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.1, "warmup_type": "log"}


def fill_optimizer(config: dict[str, Any]) -> None:
    """Validate `optimizer` and replace its `"auto"` values, in place.

    Raises:
        UserError: names the wrong key or value.
    """
    block = _block(config, "optimizer")
    name = block.get("type", "AdamW")
    if name in REPLACED_BY_ADAMW:
        raise UserError(
            f'optimizer.type = {name!r} is not needed: use "AdamW", which is fused on CPU and GPU'
        )
    matches = [known for known in OPTIMIZERS if known.lower() == str(name).lower()]
    if not matches:
        raise unknown_name("optimizer.type", name, OPTIMIZERS)
    model = OPTIMIZERS[matches[0]]
    params = _params(block, "optimizer")
    if "max_grad_norm" in params:
        raise UserError(
            "optimizer.params.max_grad_norm: clipping is set by the top-level gradient_clipping instead"
        )
    filled = {
        key: OPTIMIZER_AUTO.get(key, value) if value == "auto" else value for key, value in params.items()
    }
    try:
        settings = model.model_validate(filled)
    except ValidationError as error:
        raise invalid_settings(error, "optimizer.params", model) from None
    if isinstance(settings, AdamParams):
        if not all(0 <= beta < 1 for beta in settings.betas):
            raise UserError(f"optimizer.params.betas = {list(settings.betas)} must both be in [0, 1)")
        if not settings.bias_correction:
            raise UserError("optimizer.params.bias_correction = false is not supported: remove it")
    elif settings.nesterov and (settings.momentum == 0 or settings.dampening != 0):
        raise UserError("optimizer.params.nesterov = true needs momentum > 0 and dampening 0")
    config["optimizer"] = {"type": matches[0], "params": settings.model_dump(mode="json")}


def fill_scheduler(config: dict[str, Any], total_steps: int | None) -> None:
    """Validate `scheduler`, if there is one, and replace its `"auto"` values, in place.

    Args:
        config: with a filled `optimizer`, if it has one.
        total_steps: optimizer steps of the run, if known.

    Raises:
        UserError: names the wrong key or value, or an `"auto"` that needs `total_steps`.
    """
    if config.get("scheduler") is None:
        config.pop("scheduler", None)
        return
    block = _block(config, "scheduler")
    name = block.get("type")
    if not isinstance(name, str) or name not in SCHEDULERS:
        raise unknown_name("scheduler.type", name, SCHEDULERS)
    required, optional = SCHEDULERS[name]
    params = _params(block, "scheduler")
    for key in params:
        if key not in (*required, *optional):
            known = [f"scheduler.params.{one}" for one in (*required, *optional)]
            raise unknown_name("key", f"scheduler.params.{key}", known)
    for key in required:
        if key not in params:
            raise UserError(f'scheduler.params.{key} is missing: {name} needs it (or "auto")')
    lr = config.get("optimizer", {}).get("params", {}).get("lr")
    filled = {key: _auto(key, lr, total_steps) if value == "auto" else value for key, value in params.items()}
    for key, value in filled.items():
        _check_scheduler_value(key, value)
    config["scheduler"] = {"type": name, "params": filled}


def build_optimizer(block: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make the torch optimizer a filled `optimizer` block describes.

    Args:
        block: as `fill_optimizer` left it.
        groups: parameter groups; a group's own `weight_decay` wins over the block's.
    """
    import torch

    params = dict(block["params"])
    if block["type"] == "SGD":
        return torch.optim.SGD(groups, fused=True, **params)
    is_decoupled = params.pop("adam_w_mode")
    params.pop("bias_correction")
    params.pop("torch_adam")
    params["betas"] = tuple(params["betas"])
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, fused=True, **params)


def _auto(key: str, lr: float | None, total_steps: int | None) -> Any:
    if key in SCHEDULER_AUTO:
        return SCHEDULER_AUTO[key]
    if key in ("warmup_max_lr", "max_lr") and lr is not None:
        return lr
    if key in (*ALL_STEPS, "warmup_num_steps"):
        if total_steps is None:
            raise UserError(
                f"scheduler.params.{key} = 'auto' needs the number of steps of the run: write a number"
            )
        return max(1, round(total_steps / 100)) if key == "warmup_num_steps" else total_steps
    raise UserError(f"scheduler.params.{key} = 'auto' cannot be filled in: write its value")


def _block(config: dict[str, Any], name: str) -> dict[str, Any]:
    block = config[name]
    if not isinstance(block, dict):
        raise UserError(f'{name} = {block!r} must be an object such as {{"type": …, "params": {{…}}}}')
    for key in block:
        if key not in ("type", "params"):
            raise unknown_name("key", f"{name}.{key}", (f"{name}.type", f"{name}.params"))
    return block


def _params(block: dict[str, Any], name: str) -> dict[str, Any]:
    params = {} if block.get("params") is None else block["params"]
    if not isinstance(params, dict):
        raise UserError(f"{name}.params = {params!r} must be an object")
    return params


def _has_truth_value(value: Any) -> bool:
    return any(isinstance(one, bool) for one in (value if isinstance(value, (list, tuple)) else [value]))


def _check_scheduler_value(key: str, value: Any) -> None:
    what = f"scheduler.params.{key}"
    values = value if key in LISTS and isinstance(value, list) else [value]
    if key in NAMES:
        if value not in NAMES[key]:
            raise unknown_name(what, value, NAMES[key])
    elif key in SWITCHES:
        if not isinstance(value, bool):
            raise UserError(f"{what} = {value!r} must be true or false")
    elif value is None and key in NULLABLE:
        return
    elif _has_truth_value(value):
        raise UserError(f"{what} = {value!r} is not valid: write a number")
    elif not all(is_finite_number(one) and one >= 0 for one in values):
        raise UserError(f"{what} = {value!r} must be a finite number ≥ 0")
    elif key in COUNTS and not is_count(value):
        raise UserError(f"{what} = {value!r} must be a whole number ≥ 1")
    elif key in RATIOS and value > 1:
        raise UserError(f"{what} = {value!r} must be a number in [0, 1]")
