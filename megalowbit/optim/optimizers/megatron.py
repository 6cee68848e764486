"""`get_megatron_optimizer`: builds the optimizer for a model from one configuration.

Names and defaults are those of Megatron-Core's `OptimizerConfig`, so the values of a launch script can be
reused: weight-decay groups, Adam or SGD, a constant or dynamic loss scale, fp32 masters of an fp16 or bf16
model. Torch's fused optimizers do the update, also on CPUs. Parameters marked `allreduce = False` (experts)
get a separate optimizer, chained to the first one under one scaler. Settings without effect and contradictory
settings are rejected.

Not covered: Megatron's distributed optimizer, offload, and its other update rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megalowbit.distributed import process_group
from megalowbit.distributed.sharded_parameters import refuse_sharded_model
from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.local_ddp import LocalDDP, is_expert
from megalowbit.optim.loss_scale.base import SCALE_RULE, GradScaler, is_scale
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.optimizers.base import OF_FSDP, MegatronOptimizer
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.optim.optimizers.options import options_in
from megalowbit.optim.optimizers.param_groups import ParameterCondition, weight_decay_groups
from megalowbit.values import is_count, require_module

UpdateRule = Literal["adam", "sgd"]
LARGEST_LOSS_SCALE = 2.0**32


def _is_number(value: object, low: float, *, is_open: bool = False) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and (low < value if is_open else low <= value) and value <= sys.float_info.max  # type: ignore[operator]


def _is_share(value: object) -> bool:
    return _is_number(value, 0) and value < 1  # type: ignore[operator]


SWITCH = (lambda value: isinstance(value, bool), "True or False")
# the check of each value, and the rule for the message; without switches
RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    **{
        name: (lambda value: _is_number(value, 0), "a finite number ≥ 0")
        for name in ("lr", "weight_decay", "adam_eps", "sgd_momentum")
    },
    "clip_grad": (lambda value: _is_number(value, 0), "a finite number ≥ 0 (0 turns clipping off)"),
    "adam_beta1": (_is_share, "from 0 to below 1"),
    "adam_beta2": (_is_share, "from 0 to below 1"),
    "loss_scale": (lambda value: value is None or is_scale(value), f"{SCALE_RULE}; or None: dynamic"),
    "initial_loss_scale": (is_scale, SCALE_RULE),
    "min_loss_scale": (is_scale, SCALE_RULE),
    "loss_scale_window": (is_count, "a whole number > 0"),
    "hysteresis": (is_count, "a whole number > 0"),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Training settings, checked together on construction.

    Attributes:
        lr: learning rate; a scheduler may write another one into the groups.
        optimizer: update rule, "adam" or "sgd".
        weight_decay: weight decay of matrices, see `weight_decay_groups`.
        fp16: the model is float16.
        bf16: the model is bfloat16. With neither, it is float32.
        loss_scale: a constant loss scale; None: dynamic with fp16, none with bf16.
        initial_loss_scale: first dynamic scale, at most 2³².
        min_loss_scale: lower bound of the dynamic scale.
        loss_scale_window: steps without overflow before the dynamic scale doubles.
        hysteresis: overflows before it is halved for the first time.
        clip_grad: largest gradient norm; 0 turns clipping off.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_eps: added to the root of the second moment.
        decoupled_weight_decay: AdamW's decay; False adds it to the gradient.
        sgd_momentum: momentum of "sgd".
        log_num_zeros_in_grad: count gradient elements that are exactly zero.
        params_have_main_grad: sum gradients in fp32; see `Float16OptimizerWithFloat16Params`.

    Raises:
        UserError: a value is out of range, or two contradict each other.
    """

    lr: float
    optimizer: UpdateRule = "adam"
    weight_decay: float = 0.01
    fp16: bool = False
    bf16: bool = False
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    sgd_momentum: float = 0.9
    log_num_zeros_in_grad: bool = False
    params_have_main_grad: bool = True

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(UpdateRule):
            raise unknown_name("optimizer", self.optimizer, get_args(UpdateRule))
        switches = [field.name for field in fields(self) if field.type == "bool"]
        for name, (is_valid, rule) in {**RULES, **dict.fromkeys(switches, SWITCH)}.items():
            if not is_valid(getattr(self, name)):
                raise UserError(f"{name} must be {rule}, not {shown(getattr(self, name))}")
        if self.fp16 and self.bf16:
            raise UserError("fp16 and bf16 are both True: choose the one that the model's parameters have")
        if self.loss_scale is not None and not (self.fp16 or self.bf16):
            raise UserError(f"loss_scale = {self.loss_scale!r} is for fp16 or bf16: leave it out in fp32")
        if not self.min_loss_scale <= self.initial_loss_scale <= LARGEST_LOSS_SCALE:
            raise UserError(
                f"initial_loss_scale = {self.initial_loss_scale!r} must be from min_loss_scale "
                f"({self.min_loss_scale!r}) to 2**32"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model's parameters must have."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32


def get_megatron_optimizer(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    config: OptimizerConfig,
    *,
    model_parallel_group: dist.ProcessGroup | None = None,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    expert_parallel_group: dist.ProcessGroup | None = None,
    training_group: dist.ProcessGroup | None = None,
    grad_scaler: GradScaler | None = None,
    instruments: Instruments | None = None,
    no_weight_decay_cond: ParameterCondition | None = None,
    scale_lr_cond: ParameterCondition | None = None,
    lr_mult: float = 1.0,
) -> MegatronOptimizer | ChainedOptimizer:
    """Build the optimizer for a model, or for the chunks of one (virtual pipeline stages).

    Args:
        model: in the dtype that `config` names; single parameters may be fp32. For data parallelism use
            `LocalDDP`, or torch's DistributedDataParallel together with `params_have_main_grad=False`.
        config: see `OptimizerConfig`.
        model_parallel_group: ranks over which norm, zeros and overflow are reduced.
        tensor_parallel_group: within it, ranks that hold copies of parameters that are not sharded; None:
            all.
        expert_parallel_group: ranks that hold different experts, over which the experts' norm is summed.
            Required on all these ranks, even on one without experts, if there are parameters with
            `allreduce = False`.
        training_group: all ranks that take each step together; None: all ranks of the job.
        grad_scaler: used instead of the one that `config` describes, such as a `MaxValueGradScaler`.
        instruments: from `Instruments.attach(model, grad_scaler)`, created before `LocalDDP` and this
            optimizer. Required for scalers that recompute gradients, for layer scaling, and for all
            strategies with LocalDDP.
        no_weight_decay_cond: selects parameters without decay, by name and parameter; default: biases and
            1-D.
        scale_lr_cond: selects parameters that learn at `lr_mult` times the learning rate.
        lr_mult: see `scale_lr_cond`.

    Raises:
        UserError: the model does not fit `config`, has no trainable parameter, or is sharded by torch.
    """
    _check_types(model, config)
    chunks = [_unwrapped(chunk) for chunk in ([model] if isinstance(model, torch.nn.Module) else model)]
    for chunk in chunks:
        refuse_sharded_model("get_megatron_optimizer", chunk, OF_FSDP)
    groups = weight_decay_groups(
        chunks,
        config.weight_decay,
        no_weight_decay_cond=no_weight_decay_cond,
        scale_lr_cond=scale_lr_cond,
        lr_mult=lr_mult,
    )
    _check_fit(model, [parameter for group in groups for parameter in group["params"]], config, grad_scaler)
    options: dict[str, Any] = {
        "instruments": instruments,
        "named_parameters": list(_named_parameters(chunks)),
        "model_parallel_group": model_parallel_group,
        "tensor_parallel_group": tensor_parallel_group,
        "training_group": training_group,
    }
    built = _with_experts(groups, config, grad_scaler or _grad_scaler(config), options, expert_parallel_group)
    _first_of(built).left_out.add_frozen(_named_parameters(chunks))
    return built


def _first_of(built: MegatronOptimizer | ChainedOptimizer) -> MegatronOptimizer:
    return built.chained_optimizers[0] if isinstance(built, ChainedOptimizer) else built


def _with_experts(
    groups: Sequence[dict[str, Any]],
    config: OptimizerConfig,
    grad_scaler: GradScaler | None,
    options: dict[str, Any],
    expert_parallel_group: dist.ProcessGroup | None,
) -> MegatronOptimizer | ChainedOptimizer:
    """One optimizer, or two if there are experts."""
    dense, experts = (_members(groups, wanted) for wanted in (False, True))
    if experts and expert_parallel_group is None and process_group.world_size(options["training_group"]) > 1:
        raise UserError(
            "the model has experts (parameters with allreduce = False), whose norm is summed over the "
            "ranks that hold different ones: pass expert_parallel_group"
        )
    if not experts and expert_parallel_group is None:
        return _mixed_precision(dense, config, grad_scaler, options)
    # chained even if this rank has no experts, because all ranks must run the same collectives
    of_experts = {**options, "model_parallel_group": expert_parallel_group}
    nothing: list[dict[str, Any]] = [{"params": []}]
    return ChainedOptimizer(
        [
            _mixed_precision(dense or nothing, config, grad_scaler, options),
            _mixed_precision(experts or nothing, config, grad_scaler, of_experts),
        ]
    )


def _check_types(model: object, config: object) -> None:
    for each in model if isinstance(model, (list, tuple)) else [model]:
        require_module(each, "get_megatron_optimizer")
    if not isinstance(config, OptimizerConfig):
        raise UserError(
            f"get_megatron_optimizer takes an OptimizerConfig second, not {shown(config)}: write "
            "mlb.OptimizerConfig(lr=…)"
        )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module, whose parameter names the user knows."""
    while isinstance(model, (LocalDDP, DistributedDataParallel)):
        model = model.module
    return model


def _named_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for index, chunk in enumerate(chunks):
        prefix = f"{index}." if len(chunks) > 1 else ""
        yield from ((prefix + name, parameter) for name, parameter in chunk.named_parameters())


def _check_fit(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    parameters: Sequence[torch.nn.Parameter],
    config: OptimizerConfig,
    grad_scaler: GradScaler | None,
) -> None:
    if grad_scaler is not None and not (config.fp16 or config.bf16):
        raise UserError(
            "grad_scaler is given, but fp16 and bf16 are off in the config: fp32 uses no loss scale"
        )
    found = {parameter.dtype for parameter in parameters}
    if config.dtype not in found or found - {config.dtype, torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        expected = str(config.dtype).removeprefix("torch.")
        raise UserError(
            f"fp16={config.fp16}, bf16={config.bf16} expects a model of {expected} and found {names}: "
            f"call model.to(torch.{expected}) first, or change fp16 and bf16"
        )
    with_main_grad = sum(hasattr(parameter, "main_grad") for parameter in parameters)
    if not config.params_have_main_grad:
        if with_main_grad:
            raise UserError(
                "params_have_main_grad=False, but the gradients are in main_grad already, as LocalDDP keeps "
                "them: leave params_have_main_grad at True"
            )
        return
    if 0 < with_main_grad < len(parameters):
        raise UserError(
            f"{with_main_grad} of {len(parameters)} parameters have a main_grad: wrap all model chunks in "
            "LocalDDP, or none"
        )
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    if any(isinstance(module, DistributedDataParallel) for chunk in chunks for module in chunk.modules()):
        # it would average nothing, because the gradient is in main_grad before DDP's hook runs
        raise UserError(
            "DistributedDataParallel averages .grad, which fp32 main_grads replace: pass "
            "params_have_main_grad=False, or wrap the model in LocalDDP instead"
        )


def _grad_scaler(config: OptimizerConfig) -> GradScaler | None:
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def _members(groups: Sequence[dict[str, Any]], wants_experts: bool) -> list[dict[str, Any]]:
    """The groups with only their experts, or without them."""
    parts = [
        {**group, "params": [each for each in group["params"] if is_expert(each) == wants_experts]}
        for group in groups
    ]
    return [part for part in parts if part["params"]]


def _mixed_precision(
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    grad_scaler: GradScaler | None,
    options: dict[str, Any],
) -> MegatronOptimizer:
    inner = _inner_optimizer(groups, config)
    if config.dtype == torch.float32:
        return FP32Optimizer(inner, **options_in(config), **options)
    return Float16OptimizerWithFloat16Params(
        inner, grad_scaler=grad_scaler, bf16=config.bf16, **options_in(config), **options
    )


def _inner_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
    adam = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    return adam(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
