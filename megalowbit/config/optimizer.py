"""`optimizer` and `scheduler` of a DeepSpeed configuration: names, parameters and the values of `"auto"`.

The update always runs in torch's fused optimizer, also on CPUs: DeepSpeed's CPU Adam compiles for minutes and
is no faster here. Names keep DeepSpeed's meaning: `Adam` is AdamW unless `adam_w_mode` is false. Not covered:
Lamb, Lion, Muon and the 1-bit optimizers.

`OPTIMIZER_AUTO` and `SCHEDULER_AUTO` hold the values of `"auto"`. In addition, `warmup_max_lr` and `max_lr`
become the optimizer's `lr`, `warmup_num_steps` one hundredth of all steps, and `total_num_steps` and torch's
`total_steps`, `total_iters` and `T_max` all steps. `mlb.initialize` lists the values that were guessed.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError

from megalowbit.config.values import check_value, unknown_key
from megalowbit.errors import Problems, UserError, invalid_settings, shown, unknown_name
from megalowbit.json_text import is_finite_number
from megalowbit.optim.schedules.factors import auto_total_steps, needs_total_steps
from megalowbit.values import LARGEST, SettingsModel, is_count


class AdamParams(SettingsModel):
    """`optimizer.params` of AdamW and Adam."""

    lr: float = Field(default=1e-3, ge=0, description="learning rate")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="decay of the first and second moment; each in [0, 1)"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of matrices")
    amsgrad: bool = Field(default=False, description="use the maximum of all second moments so far")
    adam_w_mode: bool = Field(
        default=True,
        description="decoupled weight decay (AdamW). `false`: the decay is added to the gradient",
    )
    bias_correction: bool = Field(default=True, description="must be `true`")
    torch_adam: bool = Field(
        default=True, description="accepted for DeepSpeed; torch's fused optimizer always runs"
    )


class SGDParams(SettingsModel):
    """`optimizer.params` of SGD."""

    lr: float = Field(default=1e-3, ge=0, description="learning rate")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum")
    dampening: float = Field(default=0.0, ge=0, lt=1, description="dampening of the momentum")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of matrices")
    nesterov: bool = Field(
        default=False, description="Nesterov momentum; needs `momentum` > 0 and `dampening` 0"
    )


OPTIMIZERS: dict[str, type[AdamParams] | type[SGDParams]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "SGD": SGDParams,
}
# other names of AdamW in DeepSpeed or among its users
REPLACED_BY_ADAMW = (
    "FusedAdam",
    "CPUAdam",
    "DeepSpeedCPUAdam",
    "FusedAdamW",
    "DecoupledAdamW",
    "adamw_torch",
)
# known to DeepSpeed, torch or transformers; a user can construct them and pass them to mlb.initialize
BROUGHT_BY_USER = (
    "Muon", "Lion", "FusedLion", "DeepSpeedCPULion", "Lamb", "FusedLamb", "Adafactor", "Adagrad",
    "DeepSpeedCPUAdagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "LBFGS",
    "Shampoo", "SOAP", "Sophia", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD",
    "Adam8bit", "AdamW8bit", "ScheduleFree", "GaLore",
)  # fmt: skip
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
SWITCHES = ("cycle_momentum", "lr_range_test_staircase")  # the only boolean parameters
ALL_STEPS = ("total_num_steps", "total_steps", "total_iters", "T_max")
COUNTS = ("warmup_num_steps", *ALL_STEPS, "step_size", "T_0", "T_mult", "lr_range_test_step_size")
RATIOS = ("warmup_min_ratio", "cos_min_ratio")
LISTS = ("cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr", "max_lr", "milestones")  # or one number
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
    lower = str(name).lower()
    if lower in map(str.lower, REPLACED_BY_ADAMW):
        raise UserError(
            f'optimizer.type = {shown(name)} is not needed: use "AdamW", which is fused on CPU and GPU'
        )
    matches = [known for known in OPTIMIZERS if known.lower() == lower]
    if not matches:
        raise _unknown_optimizer(name)
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

    Call `fill_optimizer` first: some `"auto"` values become the optimizer's learning rate.

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
    problems = Problems()
    for key in params:
        if key not in (*required, *optional):
            problems.add(unknown_key("scheduler.params", key, (*required, *optional)))
    for key in required:
        if key not in params:
            problems.add(UserError(f'scheduler.params.{key} is missing: {name} needs it (or "auto")'))
    lr = _lr_of(config)
    filled: dict[str, Any] = {}
    for key, value in params.items():
        with problems.collect():
            filled[key] = _auto(key, lr, total_steps) if value == "auto" else value
            _check_scheduler_value(key, filled[key])
    problems.raise_any()
    config["scheduler"] = {"type": name, "params": filled}


def fill_lr_schedule(config: dict[str, Any], block: dict[str, Any], total_steps: int | None) -> None:
    """Fill in `total_steps` of the `lr_schedule` in the `"megalowbit"` block, if there is one, in place.

    Raises:
        UserError: DeepSpeed's `scheduler` is set too, or the number of steps is not known.
    """
    section = block.get("lr_schedule")
    if section is None:
        return
    is_auto = isinstance(section, dict) and needs_total_steps(section)
    if is_auto:
        # always a number, so that validating the section finds its other mistakes
        steps = LARGEST if total_steps is None else total_steps
        block["lr_schedule"] = {**section, "total_steps": auto_total_steps(section, steps)}
    if config.get("scheduler") is not None:
        raise UserError("scheduler and megalowbit.lr_schedule both set the learning rate: remove one of them")
    if is_auto and total_steps is None:
        raise _unknown_steps("megalowbit.lr_schedule.total_steps")


def _unknown_steps(key: str) -> UserError:
    return UserError(
        f"{key} = 'auto' needs the number of steps of the run: write a number, or pass total_steps= to "
        "mlb.initialize"
    )


def _lr_of(config: dict[str, Any]) -> float | None:
    """The learning rate in the optimizer's block; None if it is missing or invalid."""
    node: Any = config.get("optimizer")
    for key in ("params", "lr"):
        node = node.get(key) if isinstance(node, dict) else None
    return node if is_finite_number(node) else None


def _unknown_optimizer(name: object) -> UserError:
    """How to pass an optimizer that a configuration cannot name; the nearest name if it is unknown."""
    remedy = (
        "remove the block and pass a torch optimizer, or a callable from parameters to one, as optimizer= "
        "to mlb.initialize"
    )
    if str(name).lower() in map(str.lower, BROUGHT_BY_USER):
        return UserError(
            f"optimizer.type = {shown(name)} is not among those that a configuration can name "
            f"({', '.join(OPTIMIZERS)}): use one of them, or {remedy}"
        )
    return UserError(f"{unknown_name('optimizer.type', name, OPTIMIZERS)}; for another one, {remedy}")


def _auto(key: str, lr: float | None, total_steps: int | None) -> Any:
    if key in SCHEDULER_AUTO:
        return SCHEDULER_AUTO[key]
    if key in ("warmup_max_lr", "max_lr") and lr is not None:
        return lr
    if key in (*ALL_STEPS, "warmup_num_steps"):
        if total_steps is None:
            raise _unknown_steps(f"scheduler.params.{key}")
        return max(1, round(total_steps / 100)) if key == "warmup_num_steps" else total_steps
    raise UserError(f"scheduler.params.{key} = 'auto' cannot be filled in: write its value")


def _block(config: dict[str, Any], name: str) -> dict[str, Any]:
    block = config[name]
    check_value(name, block, isinstance(block, dict), 'an object such as {"type": …, "params": {…}}')
    for key in block:
        if key not in ("type", "params"):
            raise unknown_key(name, key, ("type", "params"))
    return block


def _params(block: dict[str, Any], name: str) -> dict[str, Any]:
    params = {} if block.get("params") is None else block["params"]
    check_value(f"{name}.params", params, isinstance(params, dict), "an object")
    return params


def _has_boolean(value: Any) -> bool:
    return any(isinstance(one, bool) for one in (value if isinstance(value, (list, tuple)) else [value]))


def _check_scheduler_value(key: str, value: Any) -> None:
    what = f"scheduler.params.{key}"
    values = value if key in LISTS and isinstance(value, list) else [value]
    if key in NAMES:
        if value not in NAMES[key]:
            raise unknown_name(what, value, NAMES[key])
    elif key in SWITCHES:
        check_value(what, value, isinstance(value, bool), "true or false")
    elif value is None and key in NULLABLE:
        return
    elif _has_boolean(value):
        raise UserError(f"{what} = {shown(value)} is not valid: write a number")
    else:
        is_number = all(is_finite_number(one) and one >= 0 for one in values)
        check_value(what, value, is_number, "a finite number ≥ 0")
        check_value(what, value, key not in COUNTS or is_count(value), "a whole number ≥ 1")
        check_value(what, value, key not in RATIOS or value <= 1, "a number in [0, 1]")
