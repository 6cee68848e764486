"""Gives a ZeRO optimizer exact masters of an fp32 model.

DeepSpeed creates masters from the model's weights, so a model cast to half precision gets rounded masters.
Here the first rank of each data-parallel group keeps the fp32 values, usually on the host, until the engine
is built. Then it broadcasts one parameter after the other, and each rank keeps its own part.

A model that was on the meta device has no values yet. Then rank 0 of all ranks reads one parameter after the
other, and both the parameter and its master are written here.

Not covered: models built under `deepspeed.zero.Init`, which are partitioned from the start.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.config.zero import NOT_ELEMENTWISE
from megalowbit.distributed import collectives, process_group
from megalowbit.engine.model_optimizer import HALF, copies_group, step_options
from megalowbit.engine.parameters.initial_weights import InitialWeights
from megalowbit.engine.parameters.user_gradients import piece_of
from megalowbit.engine.zero.pieces import GradientPieces, PieceRegularizer
from megalowbit.engine.zero.scaler import ZeroLossScaler
from megalowbit.errors import UserError
from megalowbit.layers.regularizer import DualRangeRegularizer
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.registry import build_grad_scaler
from megalowbit.optim.optimizers.left_out import LeftOutParameters
from megalowbit.optim.optimizers.options import BeforeStep, StepOptions
from megalowbit.optim.precision.fp32_modules import is_kept_fp32

logger = logging.getLogger(__name__)

# DeepSpeed requires users to set these; here `ZeroStart.inner` checks which optimizers are possible.
ZERO_KEYS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


class ZeroStart:
    """Prepares the inner optimizer during `deepspeed.initialize`, and finishes the ZeRO optimizer after it.

    The constructor casts parameters in place, except norms kept in fp32.

    Attributes:
        left_out: parameters that are frozen, which ZeRO's optimizer cannot train later.

    Raises:
        UserError: the model is already partitioned.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parts: DeepSpeedConfigParts,
        *,
        mpu: Any,
        regularizer: DualRangeRegularizer | None,
        initial: InitialWeights | None = None,
    ) -> None:
        self.left_out = LeftOutParameters()
        self._model, self._parts, self._mpu, self._initial = model, parts, mpu, initial
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._grad_scaler = build_grad_scaler(parts.settings.grad_scaler, parts.settings.precision)
        self._instruments: Instruments | None = None
        self._regularizer = None if regularizer is None else PieceRegularizer(regularizer)
        data = None if mpu is None else mpu.get_data_parallel_group()
        self._is_source = process_group.rank(data) == 0
        self._exact: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        if parts.settings.precision in HALF:
            self._cast(HALF[parts.settings.precision])

    def _cast(self, dtype: torch.dtype) -> None:
        for parameter in self._model.parameters():
            if parameter.dtype != torch.float32 or is_kept_fp32(parameter):
                continue
            if parameter.requires_grad:
                # the others get them from the source
                self._exact.append((parameter, parameter.data if self._is_source else None))
            parameter.data = parameter.data.to(dtype)

    def inner(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Check and prepare the inner optimizer, within `deepspeed.initialize`; the model is on its device.

        Raises:
            UserError: the optimizer does not work on flat pieces, or the scaler needs unavailable statistics.
        """
        kind = type(optimizer).__name__
        if kind.lower() in NOT_ELEMENTWISE:
            raise UserError(
                f"optimizer {kind} is not elementwise, so it does not work on ZeRO's flat pieces: "
                "use zero_optimization.stage 0, or AdamW"
            )
        if optimizer.state:
            raise UserError(
                f"optimizer {kind} already has state, which ZeRO would drop: pass a new one, or use "
                "zero_optimization.stage 0"
            )
        for number, group in enumerate(optimizer.param_groups):
            self.left_out.drop_from(group, number)
        self.left_out.rename(self._names)
        # before DeepSpeed's hooks, which remove `.grad`
        self._instruments = Instruments.attach(self._model, self._grad_scaler)
        return optimizer

    def finish(self, engine: Any) -> None:
        """Replace the class of the engine's optimizer and write exact masters; collective over all ranks."""
        from megalowbit.engine.zero.optimizer import replace_optimizer_class

        options = StepOptions(
            **step_options(self._parts),
            training_group=dist.group.WORLD if process_group.world_size() > 1 else None,
            before_step=self._regularization(engine),
            instruments=self._instruments,
        )
        trained = _all_parameters(engine.optimizer)
        gradients = GradientPieces(
            trained,
            names=[self._names[id(parameter)] for parameter in trained],
            options=options,
            copies=copies_group(self._mpu),
            peers=dist.get_process_group_ranks(engine.seq_data_parallel_group),
        )
        replace_optimizer_class(engine.optimizer)
        engine.optimizer.attach(ZeroLossScaler(self._grad_scaler), gradients, options, self.left_out)
        if self._initial is None:
            self._write_masters(engine)
        else:
            rank = process_group.rank(engine.seq_data_parallel_group)
            self._initial.fill(partial(write_parameter, data_rank=rank))

    def _regularization(self, engine: Any) -> BeforeStep | None:
        regularizer, optimizer = self._regularizer, engine.optimizer
        if regularizer is None:
            return None
        group, device = engine.seq_data_parallel_group, engine.device
        return lambda scale: regularizer.add_gradients(optimizer.pieces(), scale, group=group, device=device)

    @torch.no_grad()
    def _write_masters(self, engine: Any) -> None:
        """Broadcast and write one parameter at a time; frees the fp32 values on the way."""
        from deepspeed.utils import groups

        source, group = groups._get_broadcast_src_rank(), engine.seq_data_parallel_group
        assert self._is_source == (process_group.rank() == source)
        self._exact.reverse()
        while self._exact:
            parameter, values = self._exact.pop()
            shape = getattr(parameter, "ds_shape", parameter.shape)  # stage 3 leaves an empty parameter
            full = torch.empty(shape, dtype=torch.float32, device=engine.device)
            if values is not None:
                full.copy_(values)
            if process_group.world_size(group) > 1:
                collectives.broadcast(full, source, group=group)
            write_master(parameter, full.view(-1))


def write_parameter(parameter: torch.nn.Parameter, value: torch.Tensor, *, data_rank: int) -> None:
    """Set this rank's part of a parameter, and of its master if it is trained, from the full fp32 `value`."""
    values = value.contiguous().view(-1)
    if hasattr(parameter, "ds_id"):
        piece = parameter.ds_tensor  # type: ignore[attr-defined]
        piece.copy_(piece_of(values, size=piece.numel(), rank=data_rank))
    else:
        parameter.data.copy_(value)
    if parameter.requires_grad:
        write_master(parameter, values)


def write_master(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Set this rank's part of a parameter's fp32 master from the full `values` (numel,)."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if not hasattr(parameter, "ds_id"):
        safe_set_full_fp32_param(parameter, values)
        return
    # DeepSpeed's function for full parameters fails if the last rank's piece is padded
    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    rank = parameter._z3_optimizer._get_param_partition_rank(parameter)  # type: ignore[attr-defined]
    safe_set_local_fp32_param(parameter, piece_of(values, size=size, rank=rank))


def _all_parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    """The parameters that a ZeRO optimizer trains, in its order, which is the same on every rank."""
    groups = optimizer.fp16_groups if hasattr(optimizer, "fp16_groups") else optimizer.bit16_groups
    return [parameter for group in groups for parameter in group]
