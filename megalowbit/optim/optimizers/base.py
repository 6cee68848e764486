"""The base of all mixed-precision optimizers: master weights, the parts of a step, and saved states.

`take_step` runs the parts of a step in order, for one optimizer or several; this class implements them. A
step clears the gradients, because a remaining one would be applied a second time. The subclasses in
`mixed_precision` decide which parameters have masters.

Between steps other code may change weights: use `master_of` and `state_of`, then call `masters_have_changed`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.distributed.sharded_parameters import refuse_sharded
from megalowbit.errors import UserError, shown
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.gradients.norm import (
    GradientFacts,
    Measurement,
    check_same_parameters,
    gradient_divisor,
)
from megalowbit.optim.gradients.report import LastStep, Overflow, StepReport
from megalowbit.optim.gradients.step_gradients import StepGradients, locate
from megalowbit.optim.instruments import Instruments, complete_instruments
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.optimizers.inner_step import InnerStep
from megalowbit.optim.optimizers.left_out import LeftOutParameters
from megalowbit.optim.optimizers.options import NamedParameters, StepOptions
from megalowbit.optim.optimizers.param_groups import learning_rate, refuse_changed, refuse_repeated
from megalowbit.optim.optimizers.saved_state import (
    after_load,
    before_load,
    check_inner_state,
    check_masters,
    copy_masters,
    find_key,
    with_hooks,
)
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.optim.step import clip_grad_norm, take_step
from megalowbit.optim.timers import timed

logger = logging.getLogger(__name__)

OF_FSDP = (
    "it needs whole parameters; under FSDP use torch's optimizer and an fp32 model with "
    "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
)


def not_copied(optimizer: torch.optim.Optimizer) -> UserError:
    """The error for copying or pickling an optimizer."""
    return UserError(
        f"{type(optimizer).__name__} cannot be copied or pickled, because hooks tie it to a model: build "
        "another one and use state_dict and load_state_dict"
    )


def call_closure(closure: Callable[[], object] | None) -> None:
    """Compute gradients as torch's optimizers that read them once do; a step itself needs none."""
    if closure is not None:
        with torch.enable_grad():
            closure()


def no_later_parameters() -> UserError:
    """The error for adding parameters: masters and gradient buffer are made with the optimizer."""
    return UserError(
        "add_param_group: parameters cannot be added later; build the optimizer with all of them, and "
        "set the lr of a group to 0 until it should train"
    )


class MegatronOptimizer(StepOptions, LastStep, torch.optim.Optimizer):
    """Base of both optimizers; a torch `Optimizer`, so any learning-rate scheduler accepts it.

    `param_groups` and `state` are those of the inner optimizer. A group may hold `lr_scale`, by which its
    learning rate is multiplied at each step. Schedulers write `lr` and do not see it; it is saved with the
    group. Options are attributes; `before_step` may be set at any time.

    Args:
        optimizer: the inner optimizer, over the model's parameters.
        grad_scaler: scaler of the loss; None: no loss scale.
        options: see `StepOptions`.

    Raises:
        UserError: `optimizer` is not one of torch's, torch has sharded its parameters, or one occurs twice.

    Attributes:
        report: the last step's report; None before the first.
        gradients: the gradients of the model's parameters.
        grad_buffer: made by this optimizer; None if the gradients are stored elsewhere.
        left_out: parameters that were frozen when the optimizer was built. It cannot train them later.
    """

    instruments: Instruments

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, grad_scaler: GradScaler | None, **options: Any
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"{type(self).__name__} takes a torch optimizer first, not {shown(optimizer)}: build one "
                "over the model's parameters, or call mlb.get_megatron_optimizer(model, config)"
            )
        StepOptions.__init__(self, **options)
        self.optimizer = optimizer
        self.grad_scaler = grad_scaler
        self.report: StepReport | None = None
        self._are_gradients_cleared = False
        self.left_out = LeftOutParameters()
        self._replace_by_masters()
        self._names = self._name_all(self.named_parameters)
        self.left_out.rename(self._names)
        self.named_parameters = None  # may reference the model
        named = ((self._names[id(parameter)], parameter) for parameter, _ in self._pairs)
        refuse_sharded(type(self).__name__, named, OF_FSDP)
        self._find_gradients()
        self._inner_step = InnerStep(
            optimizer,
            {master: model for model, master in self._pairs if master is not model},
            gradient_of=lambda master: self.gradients.to_apply(self._models[id(master)]),
        )
        if self.gradient_norm == "sum_of_norms":
            check_same_parameters(len(self._pairs), self.model_parallel_group)

    def _replace_by_masters(self) -> None:
        """Replace the parameters in the inner optimizer's groups by masters, and use these groups here."""
        self.float16_groups: list[list[torch.nn.Parameter]] = []
        self.fp32_from_float16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp32_groups: list[list[torch.nn.Parameter]] = []
        refuse_repeated(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            self._replace_group_params(group)
        groups, state = self.optimizer.param_groups, self.optimizer.state
        # required by torch's step hooks; adds the same groups again
        torch.optim.Optimizer.__init__(self, groups, self.optimizer.defaults)
        self.state = state
        self._pairs = list(self._model_and_master())
        self._models = {id(master): model for model, master in self._pairs}
        self._masters = {id(model): master for model, master in self._pairs}

    def _find_gradients(self) -> None:
        named = [(self._names[id(model)], model) for model, _ in self._pairs]
        # before the buffer, whose hooks remove `.grad`
        self.instruments = complete_instruments(self.instruments, self.grad_scaler, named)
        self.grad_buffer = self._make_grad_buffer() if self.params_have_main_grad else None
        self.gradients = StepGradients(
            self._pairs,
            names=self._names,
            has_main_grad=self.params_have_main_grad,
            copies=self.tensor_parallel_group or self.model_parallel_group,
            layer_scaling=self.layer_scaling,
        )

    # A property, because loading a state gives the inner optimizer new objects.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the inner optimizer; their `params` are the fp32 masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State of the inner optimizer, keyed by master."""
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.optimizer.state = state

    @property
    def loss_scale(self) -> float:
        """S by which the loss of the coming backward is multiplied; 1 without a scaler."""
        return self.grad_scaler.scale if self.grad_scaler is not None else 1.0

    def get_loss_scale(self) -> torch.Tensor:
        """`loss_scale` as Megatron-LM returns it: an fp32 tensor of shape (1,), on the parameters' device."""
        device = self._pairs[0][0].device if self._pairs else None
        return torch.tensor([self.loss_scale], dtype=torch.float32, device=device)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by S, in fp32, because S may not be representable in half precision."""
        return loss.float() * self.loss_scale

    @property
    def layer_scaling(self) -> LayerScaling | None:
        """Factors by block; None without layer scaling."""
        return self.instruments.layer_scaling

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """All ranks that take each step together; None for a single process."""
        if self._training_group is None and process_group.is_initialized():
            return dist.group.WORLD
        return self._training_group

    @training_group.setter
    def training_group(self, group: dist.ProcessGroup | None) -> None:
        self._training_group = group

    @property
    def all_instruments(self) -> Sequence[Instruments]:
        """See `Steppable`: this optimizer's instruments."""
        return [self.instruments]

    def step(self, closure: Callable[[], float] | None = None) -> StepReport:  # type: ignore[override]
        """Apply the accumulated gradients, or skip the step if any is infinite or NaN.

        Collective over the model-parallel and the training group. Gradients must already be averaged over
        data parallel. `before_step` is called first, with S. What it adds to the gradients is checked,
        clipped and, on overflow, dropped with them. If there is no gradient since the last step, moments and
        weight decay still change the weights, except those that no longer require a gradient. The host reads
        the device once, after the update has been launched. If the inner optimizer cannot skip on the device
        (torch's fused ones can), the read comes before the update.

        Args:
            closure: computes gradients and is called first, once; Lightning passes one. Its result is not
                used.

        Returns:
            A tuple `(True, norm, num_zeros)`, or `(False, None, None)` for a skipped step, which leaves
            masters, moments and step counts unchanged. `StepReport` has further attributes.

        Raises:
            UserError: a parameter that was frozen when the optimizer was built requires a gradient, or
                parameters were removed from the groups or added to them.
        """
        call_closure(closure)
        return take_step(self)

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale the accumulated gradients down to a norm of at most `clip_grad`, as in Megatron-LM.

        For loops that clip between backward and step. A step with the option `clip_grad` needs no call, and
        reads the device once less. What `before_step` adds is not clipped here. Collective, as `step` is.

        Returns:
            The norm before, without the loss scale; inf if a gradient is not finite. Such a step is skipped.

        Raises:
            UserError: `clip_grad` is not a positive number.
        """
        return clip_grad_norm(self, [self.gradients], clip_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # torch's signature
        """Clear the gradients of model and masters; `.grad`s always become None, `main_grad`s zero.

        Where a CUDA graph adds to a `main_grad`, `.grad` becomes these zeros.

        `zero_grad` of the model, or of a part of it, does the same for its parameters; where a CUDA graph
        adds to their gradients, only with `set_to_none=False`.
        """
        self.gradients.zero()

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Time a phase of the step, if there are timers."""
        return timed(self.timers, phase)

    def begin_step(self, loss_scale: float) -> None:
        """Prepare the gradients to be measured."""
        refuse_changed(self.param_groups, self._models)
        self.left_out.check()
        self.gradients.check_factors()
        self.gradients.collect()
        self._are_gradients_cleared = False
        if self.before_step is not None:
            self.before_step(loss_scale)

    def measure(self, *, is_exact: bool = False) -> Measurement:
        """Measure the scaled gradients; collective over model parallel."""
        return self.gradients.measure(
            self.gradient_norm,
            count_zeros=self.log_num_zeros_in_grad,
            group=self.model_parallel_group,
            is_exact=is_exact,
        )

    @property
    def can_defer_host_read(self) -> bool:
        """Whether the inner optimizer can skip a step on the device."""
        return self._inner_step.can_defer_host_read

    def update(self, measured: Measurement, facts: GradientFacts | None) -> None:
        """Update masters and model; without `facts` the device skips if the flag is set."""
        self.gradients.release_held()
        self._are_gradients_cleared = self._inner_step.run(
            gradient_divisor(measured.norm, self.loss_scale, self.clip_grad),
            (measured.flag > 0).float() if facts is None else None,  # fused optimizers need exactly 0 or 1
            [learning_rate(group) for group in self.param_groups],
            clears_gradients=self.params_have_main_grad,
        )

    def locate(self) -> Overflow | None:
        """Locate overflowed gradients; collective over the training group."""
        return locate([self.gradients], self.training_group)

    def end_step(self, report: StepReport) -> None:
        """Clear the gradients, unless the update has cleared them while reading them."""
        self.report = report
        if report.is_applied and self._are_gradients_cleared:
            self.gradients.mark_zeroed()
        else:
            self.gradients.zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported after construction, because masters and gradient buffer already exist.

        Raises:
            UserError: always, if called by a user.
        """
        if hasattr(self, "_inner_step"):
            raise no_later_parameters()
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied(self)

    def state_dict(self) -> dict[str, Any]:
        """`optimizer`, `grad_scaler` (if there is one) and `fp32_from_fp16_params` (masters by group)."""
        return with_hooks(self, self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        state["fp32_from_fp16_params"] = [
            [master.detach() for master in group] for group in self.fp32_from_float16_groups
        ]
        if self.layer_scaling is not None:
            state["layer_scaling"] = self.layer_scaling.state_dict()
        return state

    def check_state_dict(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Check whether `load_state_dict` accepts this state; changes nothing and calls no hooks.

        Raises:
            UserError: keys, groups or shapes do not fit.
        """
        inner, masters, scaler, factors = self._parts_of(state_dict)
        if load_optimizer_states:
            check_inner_state(inner, self.optimizer)
        check_masters(masters, self.fp32_from_float16_groups)
        if self.layer_scaling is not None and factors is not None:
            self.layer_scaling.check_state_dict(factors)
        if self.grad_scaler is not None and scaler:
            self.grad_scaler.check_state_dict(scaler)

    def load_state_dict(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Continue from a saved state; model parameters are restored from the masters.

        Megatron's older keys `optimizer_state_dict` and `fp32_from_fp16` are supported. If the state has no
        scaler, the scaler keeps its initial value, with a warning.

        Args:
            state_dict: from `state_dict`.
            load_optimizer_states: False loads masters and scaler but no moments.

        Raises:
            UserError: keys, groups or shapes do not fit; then nothing has changed.
        """
        self.load_checked(before_load(self, state_dict), load_optimizer_states)

    def load_checked(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """`load_state_dict` after its hooks before a load."""
        self.check_state_dict(state_dict, load_optimizer_states)
        inner, masters, scaler, factors = self._parts_of(state_dict)
        self._load_scales(scaler, factors)
        copy_masters(masters, self.fp32_from_float16_groups)
        if load_optimizer_states:
            self.optimizer.load_state_dict(inner)
        self.masters_have_changed()
        after_load(self)

    def reload_model_params(self) -> None:
        """Copy the model to the masters, after other code has written to the model; its rounding remains."""
        with torch.no_grad():
            for model, master in self._pairs:
                if master is not model:
                    master.copy_(model)

    @torch.no_grad()
    def matches_model(self) -> bool:
        """Whether the model's weights are the rounded masters; not after other code has written to the model.

        Reads the device.
        """
        halves = [(model, master) for model, master in self._pairs if master is not model]
        return all(torch.equal(model, master.to(model.dtype)) for model, master in halves)

    def master_of(self, model_parameter: torch.Tensor) -> torch.Tensor:
        """The fp32 tensor that a step updates: the parameter's master, or the parameter itself.

        Raises:
            UserError: this optimizer does not train the parameter.
        """
        master = self._masters.get(id(model_parameter))
        if master is None:
            raise UserError(
                f"a parameter of shape {tuple(model_parameter.shape)} is not trained by this optimizer: "
                "pass one of the model's parameters that it was built with"
            )
        return master

    def state_of(self, model_parameter: torch.Tensor) -> dict[str, Any]:
        """The inner optimizer's live state of a parameter (moments, step); empty before its first step.

        Raises:
            UserError: this optimizer does not train the parameter.
        """
        return self.state[self.master_of(model_parameter)]

    def has_gradient(self, model_parameter: torch.Tensor) -> bool:
        """Whether a trained parameter has a gradient for the next step. Reads the device."""
        self.gradients.collect()
        gradient = self.gradients.of(model_parameter)
        return gradient is not None and bool(gradient.any())

    @torch.no_grad()
    def masters_have_changed(self) -> None:
        """Copy the masters to the model, after other code has written to the masters."""
        halves = [(model, master) for model, master in self._pairs if master is not model]
        if halves:
            torch._foreach_copy_([model for model, _ in halves], [master for _, master in halves])

    def _replace_group_params(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _parts_of(self, state_dict: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        """Inner state, masters, scaler and layer factors of a state; the last two may be None."""
        inner = find_key(state_dict, ("optimizer", "optimizer_state_dict"))
        default: list[Any] | None = None if any(self.fp32_from_float16_groups) else []
        masters = find_key(state_dict, ("fp32_from_fp16_params", "fp32_from_fp16"), default=default)
        return inner, masters, state_dict.get("grad_scaler"), state_dict.get("layer_scaling")

    def _load_scales(self, saved: Mapping[str, Any] | None, factors: Mapping[str, Any] | None) -> None:
        if self.layer_scaling is not None:
            if factors is not None:
                self.layer_scaling.load_state_dict(factors)
            else:
                logger.warning("the state holds no layer scaling: continuing with factors of 1")
        if self.grad_scaler is None:
            return
        if saved:
            self.grad_scaler.load_state_dict(saved)
            self.instruments.prepare(self.grad_scaler)
        elif self.grad_scaler.state_dict():
            logger.warning("the state holds no grad scaler: continuing with loss scale %g", self.loss_scale)

    def _model_and_master(self) -> Iterator[tuple[Any, Any]]:
        groups = zip(
            self.float16_groups, self.fp32_from_float16_groups, self.fp32_from_fp32_groups, strict=True
        )
        for halves, masters, fp32 in groups:
            yield from zip(halves, masters, strict=True)
            yield from ((parameter, parameter) for parameter in fp32)

    def _make_grad_buffer(self) -> GradBuffer | None:
        models = [model for model, _ in self._pairs]
        if models and all(hasattr(model, "main_grad") for model in models):
            return None  # other code keeps the gradients, like Megatron's DDP
        return GradBuffer(models, factor_of=self.instruments.factor_of)

    def _name_all(self, named_parameters: NamedParameters | None) -> dict[int, str]:
        """Names for reports; an unnamed parameter gets its position. Other names are ignored."""
        names = {id(parameter): name for name, parameter in named_parameters or ()}
        for number, (half, fp32) in enumerate(
            zip(self.float16_groups, self.fp32_from_fp32_groups, strict=True)
        ):
            for index, model in enumerate([*half, *fp32]):
                names.setdefault(id(model), f"parameter {index} of group {number}")
        return names
