"""DeepSpeed's ZeRO optimizers with our loss scale, gradient measurement and step report.

ZeRO partitions fp32 masters, gradients and moments. DeepSpeed still reduces, updates and gathers them. Our
code decides about the step:

- One pass and one message over all ranks measure the pieces. Inf and NaN are found in every precision, also
  on model-parallel ranks, and the norm counts every parameter once.
- The loss scale changes only after the step it belongs to.
- `take_step` orders a step as at stage 0; DeepSpeed's step is the update, and gets the measured norm.
- DeepSpeed keeps gradients of unused parameters in its buffers, and all gradients after `zero_grad`. They are
  cleared here, because they would otherwise be applied again.

The engine builds DeepSpeed's class; `replace_optimizer_class` then gives the object one of the two classes
below. Not covered: locating an overflow before gradients are averaged over ranks.
engine/versions/internals.py lists what is used of DeepSpeed, and what breaks without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from deepspeed.utils import safe_set_full_grad, safe_set_local_grad
from torch import Tensor

from megalowbit.engine.parameters.user_gradients import NO_GRADIENTS, drop_from_host, piece_of
from megalowbit.engine.zero.pieces import GradientPieces, Piece
from megalowbit.engine.zero.scaler import ZeroLossScaler
from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import check_fit
from megalowbit.optim.gradients.norm import GradientFacts, Measurement
from megalowbit.optim.gradients.report import LastStep, Overflow, StepReport
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.optimizers.base import no_later_parameters
from megalowbit.optim.optimizers.inner_step import stepping_at
from megalowbit.optim.optimizers.left_out import LeftOutParameters
from megalowbit.optim.optimizers.options import StepOptions
from megalowbit.optim.optimizers.param_groups import learning_rate
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.optim.step import take_step
from megalowbit.optim.timers import StepTimers, timed


class PhaseTimers:
    """DeepSpeed's timers, plus our timers by phase."""

    def __init__(self, deepspeed_timers: Any) -> None:
        self.deepspeed_timers = deepspeed_timers
        self.ours: StepTimers | None = None

    def __call__(self, name: str) -> Any:
        return self.deepspeed_timers(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.deepspeed_timers, name)

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds per phase; empty if no timers are set."""
        return self.ours.milliseconds() if self.ours is not None else {}


class ZeroSurface(LastStep):
    """The common part of both classes: a step, and the interface of our optimizer at stage 0.

    Attributes:
        report: of the last step; None before the first.
        gradients: measures this rank's pieces.
        layer_scaling: always None at these stages.
        left_out: parameters that were frozen when the engine was built. It cannot train them later.
    """

    is_flag_shared = True  # pieces are measured over all ranks
    can_defer_host_read = False  # DeepSpeed's step decides on the host

    gradients: GradientPieces
    left_out: LeftOutParameters
    _loss_scaler: ZeroLossScaler
    _options: StepOptions
    _has_sums: bool  # since the last step, of any micro-batch
    _has_gradients: bool  # of all micro-batches, or set by hand
    _is_stepping: bool
    is_gradient_accumulation_boundary: Callable[[], bool]
    _timers: PhaseTimers
    _norm: Tensor  # of the scaled gradients, 0-dim float64 on the host; infinite where the step is skipped
    layer_scaling: LayerScaling | None = None
    overflow: bool
    param_groups: list[dict[str, Any]]
    _global_grad_norm: float | None

    def attach(
        self,
        loss_scaler: ZeroLossScaler,
        gradients: GradientPieces,
        options: StepOptions,
        left_out: LeftOutParameters,
    ) -> None:
        """Replace DeepSpeed's attributes of the same names; call it once, right after the constructor."""
        self.left_out = left_out
        self._loss_scaler, self.gradients, self._options = loss_scaler, gradients, options
        self._timers = PhaseTimers(self.__dict__.pop("timers"))
        for name in ("loss_scaler", "dynamic_loss_scale"):
            self.__dict__.pop(name, None)
        self.report = None
        self._has_sums = self._has_gradients = self._is_stepping = False

    @property
    def grad_scaler(self) -> GradScaler | None:
        return self._loss_scaler.grad_scaler

    @property
    def all_instruments(self) -> Sequence[Instruments]:
        """The run's instruments, as in `Steppable`."""
        assert self._options.instruments is not None
        return [self._options.instruments]

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """All ranks, which take each step together; None if there is one process."""
        return self._options.training_group

    @property
    def log_num_zeros_in_grad(self) -> bool:
        """Whether each step counts exact zeros."""
        return self._options.log_num_zeros_in_grad

    @property
    def loss_scaler(self) -> ZeroLossScaler:
        """The object from which DeepSpeed reads the loss scale."""
        return self._loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, saved: Any) -> None:
        # DeepSpeed assigns the object from a checkpoint; keep ours and load its state
        if saved is not self._loss_scaler:
            self._loss_scaler.load_state_dict(saved)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale can change."""
        return self._loss_scaler.dynamic

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, saved: bool) -> None:
        """Ignored: a checkpoint does not change it."""

    @property
    def timers(self) -> PhaseTimers:
        """DeepSpeed's timers, and ours if they are set."""
        return self._timers

    @timers.setter
    def timers(self, timers: StepTimers | None) -> None:
        self._timers.ours = timers

    def needs_scaler(self) -> bool:
        """Whether the loss must be scaled before backward."""
        return self.grad_scaler is not None

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Replaces DeepSpeed's check of the gradients; `measure` does it."""

    def pieces(self) -> Iterator[Piece]:
        """This rank's gradients, multiplied by the loss scale."""
        raise NotImplementedError

    def _deepspeed_step(self) -> None:
        """DeepSpeed's step with `_norm`: clips by it, or skips the update if it is infinite."""
        raise NotImplementedError

    def _clear(self) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop reduced gradients; DeepSpeed's `zero_grad` only drops `.grad`."""
        raise NotImplementedError

    def _set_by_hand(self, hand_set: list[torch.nn.Parameter]) -> None:
        """Copy `.grad` to the buffers that the step reads."""
        raise NotImplementedError

    def _after_reduction(self) -> None:
        self._has_sums = True
        self._has_gradients = self._has_gradients or self.is_gradient_accumulation_boundary()

    def _clear_grads(self, deepspeed_zero_grad: Callable[[], object]) -> None:
        deepspeed_zero_grad()
        if self._has_sums and not self._is_stepping:  # DeepSpeed also calls it in the middle of its step
            self._forget()
            self._clear()
            self._has_sums = self._has_gradients = False

    def _take_in(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Use gradients that were set after backward, which itself leaves no `.grad`."""
        hand_set = [each for each in parameters if each.grad is not None]
        for parameter in hand_set:
            assert parameter.grad is not None
            name, shape = self.gradients.name_of(parameter), getattr(parameter, "ds_shape", parameter.shape)
            check_fit(name, parameter.grad, shape, parameter.device)
        if hand_set:
            self._set_by_hand(hand_set)
            self._has_sums = self._has_gradients = True
        for parameter in hand_set:
            parameter.grad = None

    def step(self, closure: object = None) -> StepReport:
        """See `MegatronOptimizer.step`; collective over all ranks."""
        self.left_out.check()
        return take_step(self, closure)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Time the measurement; DeepSpeed times its update itself."""
        return timed(self._timers.ours if phase == "inspect" else None, phase)

    def begin_step(self, loss_scale: float) -> None:
        """Prepare the gradients for the measurement."""
        if not self._has_gradients:
            raise UserError(NO_GRADIENTS)
        if self._options.before_step is not None:
            self._options.before_step(loss_scale)

    def measure(self, *, is_exact: bool = False) -> Measurement:
        """Measure the scaled gradients; collective over all ranks."""
        return self.gradients.measure(list(self.pieces()), is_exact=is_exact)

    def update(self, measured: Measurement, facts: GradientFacts | None) -> None:  # noqa: ARG002
        assert facts is not None, "the host decides first"
        self._step_by(facts.norm)

    def locate(self) -> Overflow | None:
        """Locate the overflow; collective over all ranks."""
        return self.gradients.locate(list(self.pieces()))

    def end_step(self, report: StepReport) -> None:
        """Clear the gradients. A skipped step also runs DeepSpeed's step, which skips the update."""
        if not report.is_applied:
            self._step_by(math.inf)
        self._clear()
        self.report = report
        self.overflow, self._global_grad_norm = not report.is_applied, report.grad_norm

    def _step_by(self, norm: float) -> None:
        self._norm = torch.tensor(norm, dtype=torch.float64)
        self._is_stepping = True
        try:
            with stepping_at(self.param_groups, [learning_rate(group) for group in self.param_groups]):
                self._deepspeed_step()
        finally:
            self._is_stepping = False
        self._has_sums = self._has_gradients = False

    def detach_instruments(self) -> None:
        """Remove the hooks on the model's gradients."""
        for each in self.all_instruments:
            each.detach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        """Always raises: parameters cannot be added later."""
        raise no_later_parameters()


class ZeroOptimizer(ZeroSurface, DeepSpeedZeroOptimizer):
    """`DeepSpeedZeroOptimizer` (stages 1 and 2) with our step."""

    def attach(self, *parts: Any) -> None:
        super().attach(*parts)
        self.check_grad_overflow = True  # otherwise bf16 steps are applied even if the norm is infinite

    def begin_step(self, loss_scale: float) -> None:
        if not self.ready_for_gradients:  # otherwise `.grad`s are from a backward and not reduced yet
            self._take_in(parameter for group in self.bit16_groups for parameter in group)
        self._wait_for_offload_copies()
        super().begin_step(loss_scale)

    def _deepspeed_step(self) -> None:
        was_linked: bool = self._hp_optimizer_states_linked  # type: ignore[has-type]
        DeepSpeedZeroOptimizer.step(self)
        if not was_linked and self._hp_optimizer_states_linked:  # type: ignore[has-type]
            # DeepSpeed linked them after the first group's update, when the other groups had no states yet
            self._hp_optimizer_states_linked = False
            self._lazy_init_hp_params_optimizer_state()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # torch's signature
        """Clear all gradients since the last step."""
        self._clear_grads(lambda: DeepSpeedZeroOptimizer.zero_grad(self, set_to_none=True))

    def independent_gradient_partition_epilogue(self) -> None:
        """Called by DeepSpeed after gradients were reduced."""
        DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue(self)
        self._after_reduction()

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:  # noqa: ARG002
        """Whether gradients are summed in DeepSpeed's fp32 buffer; without it an fp32 run loses the sum."""
        return bool(self.gradient_accumulation_dtype == torch.float32)

    def scaled_global_norm(self, norm_type: float = 2) -> Tensor:  # noqa: ARG002
        """Called by DeepSpeed's step, which skips the update if the norm is infinite, else clips by it."""
        return self._norm

    def average_tensor(self, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """Reduce a bucket in fp32; at stage 2 DeepSpeed would divide by the ranks in half precision."""
        if tensor.dtype in (torch.float16, torch.bfloat16) and communication_data_type == torch.float32:
            streams = self.ipg_buckets[communication_data_type].copy_streams
            if streams:  # with overlap, gradients were copied into the bucket on these streams
                current = get_accelerator().current_stream()
                for stream in streams:
                    current.wait_stream(stream)
                streams.add(current)
            tensor = tensor.float()
        DeepSpeedZeroOptimizer.average_tensor(self, tensor, communication_data_type)

    def load_state_dict(self, *arguments: Any, **named: Any) -> None:
        """Load with DeepSpeed's method, but keep the configured clipping."""
        clip_grad: float = self.clip_grad  # type: ignore[has-type]
        DeepSpeedZeroOptimizer.load_state_dict(self, *arguments, **named)
        self.clip_grad = clip_grad
        if self._hp_optimizer_states_linked:  # to tensors that the load has replaced
            self._hp_optimizer_states_linked = False
            self._lazy_init_hp_params_optimizer_state()

    def destroy(self) -> None:
        """Called when the engine is destroyed."""
        self.detach_instruments()
        DeepSpeedZeroOptimizer.destroy(self)

    def pieces(self) -> Iterator[Piece]:
        for group, parameters in enumerate(self.params_in_partition):
            gradients = self._gradients_of(group, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=False):
                start = parameter._hp_mapping.lp_fragment_address.start
                yield Piece(parameter, gradient, start)

    def _gradients_of(self, group: int, parameters: list[Tensor]) -> list[Tensor]:
        if not self.cpu_offload:
            return [
                each for each in self.averaged_gradients[group] if not getattr(each, "_zero_padding", False)
            ]
        flat = self.single_partition_of_fp32_groups[group].grad.view(-1)
        places = [self.grad_position[self.get_param_id(each)] for each in parameters]
        return [flat.narrow(0, int(offset), int(count)) for _, _, offset, count in places]

    def _forget(self) -> None:
        self.micro_step_id = INITIAL_MICRO_STEP_ID  # the next backward is the first
        for group in range(len(self.bit16_groups)):
            self.averaged_gradients[group] = self.all_grad_tensors[group] = None
        if self.cpu_offload:
            self._offload_accumulated_param_ids.clear()
            self.reset_cpu_buffers()

    def _set_by_hand(self, hand_set: list[torch.nn.Parameter]) -> None:
        for group in range(len(self.bit16_groups)):
            if not self.cpu_offload and self.averaged_gradients.get(group) is None:
                self.averaged_gradients[group] = self._build_compact_grad_partition_buffer(group)
        for parameter in hand_set:
            assert parameter.grad is not None
            values, parameter.grad = parameter.grad, None
            safe_set_full_grad(parameter, values)

    def _clear(self) -> None:
        if self.cpu_offload:
            for partition in self.single_partition_of_fp32_groups:
                partition.grad.zero_()
            # with offload DeepSpeed does not clear them on a skip, and the next step would add to infinities
            for group in self.averaged_gradients:
                self.averaged_gradients[group] = None


class ZeroOptimizerStage3(ZeroSurface, DeepSpeedZeroOptimizer_Stage3):
    """`DeepSpeedZeroOptimizer_Stage3` with our step."""

    def begin_step(self, loss_scale: float) -> None:
        self._take_in(parameter for group in self.fp16_groups for parameter in group)
        super().begin_step(loss_scale)

    def _deepspeed_step(self) -> None:
        DeepSpeedZeroOptimizer_Stage3.step(self)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # torch's signature
        """Clear all gradients since the last step."""
        drop_from_host(parameter for group in self.fp16_groups for parameter in group)
        self._clear_grads(lambda: DeepSpeedZeroOptimizer_Stage3.zero_grad(self, set_to_none=True))

    def independent_gradient_partition_epilogue(self) -> None:
        """Called by DeepSpeed after each backward."""
        DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue(self)
        self._after_reduction()

    def destroy(self) -> None:
        """Called when the engine is destroyed."""
        self.detach_instruments()
        DeepSpeedZeroOptimizer_Stage3.destroy(self)

    def _get_norm_groups(self) -> list[Tensor]:
        return [self._norm]

    def pieces(self) -> Iterator[Piece]:
        for group, parameters in enumerate(self.fp16_groups):
            flat = self.fp32_partitioned_groups_flat[group].grad if self.offload_optimizer else None
            for index, parameter in enumerate(parameters):
                size = parameter.partition_numel()
                start = size * self._get_param_partition_rank(parameter)
                count = min(max(parameter.ds_numel - start, 0), size)  # the rest is padding
                if flat is None:
                    gradient = self.averaged_gradients[group][index]
                else:
                    gradient = flat.narrow(0, self.grad_position[self.get_param_id(parameter)][1], size)
                if count:
                    yield Piece(parameter, gradient.view(-1).narrow(0, 0, count), start)

    def _forget(self) -> None:
        self.averaged_gradients.clear()
        self._offload_boundary_param_ids.clear()
        self.reset_cpu_buffers()

    def _set_by_hand(self, hand_set: list[Any]) -> None:
        if not self._has_gradients:  # without a backward, the lists that the step reads do not exist yet
            self.independent_gradient_partition_epilogue()
        for parameter in hand_set:
            assert parameter.grad is not None
            rank, values = self._get_param_partition_rank(parameter), parameter.grad.float().view(-1)
            safe_set_local_grad(parameter, piece_of(values, size=parameter.partition_numel(), rank=rank))

    def _clear(self) -> None:
        self.grad_partitions_flat_buffer.zero_()
        if self.offload_optimizer:
            for partition in self.fp32_partitioned_groups_flat:
                partition.grad.zero_()


def replace_optimizer_class(optimizer: Any) -> None:
    """Change the class of the engine's ZeRO optimizer to ours, in place, because model hooks hold the object.

    Call `ZeroSurface.attach` afterwards.
    """
    classes: dict[type, type] = {
        DeepSpeedZeroOptimizer: ZeroOptimizer,
        DeepSpeedZeroOptimizer_Stage3: ZeroOptimizerStage3,
    }
    found = classes.get(type(optimizer))
    if found is None:
        raise UserError(
            f"zero_optimization selects DeepSpeed's {type(optimizer).__name__}, which is not supported: "
            "remove the option that selects it"
        )
    optimizer.__class__ = found
