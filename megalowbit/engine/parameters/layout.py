"""Makes parameters contiguous, and rejects those that DeepSpeed and its ZeRO stages cannot handle.

DeepSpeed broadcasts every parameter as bytes, flattens it and casts it to the run's precision. For an
unsupported parameter it would fail somewhere in between. Only strides can be fixed: values are copied to
contiguous memory, unless another tensor shares the old memory. Not covered: contiguous parameters that
overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from megalowbit.errors import UserError


def make_parameters_contiguous(model: torch.nn.Module, *, stage: int) -> None:
    """Reject parameters that cannot be trained at this ZeRO stage; make the others contiguous, in place.

    Call it before DeepSpeed gets the model. If it raises, nothing has changed.
    """
    # parameters with ds_id were partitioned by deepspeed.zero.Init; they are rejected elsewhere
    parameters = [(name, each) for name, each in model.named_parameters() if not hasattr(each, "ds_id")]
    for name, parameter in parameters:
        _check_kind(name, parameter)
        if stage == 3:
            _check_pieces(name, parameter)
    strided = [(name, each) for name, each in parameters if not each.is_contiguous()]
    if not strided:
        return
    holders: dict[int, list[str]] = defaultdict(list)
    for name, each in _tensors(model):
        holders[each.untyped_storage().data_ptr()].append(name)
    for name, parameter in strided:
        _check_strides(name, parameter, holders[parameter.untyped_storage().data_ptr()])
    for _, parameter in strided:
        parameter.data = parameter.data.contiguous()


def _check_kind(name: str, parameter: Tensor) -> None:
    if parameter.is_meta:
        raise UserError(f"parameter {name} is on the meta device and has no values: load or initialise it")
    if parameter.layout != torch.strided:
        kind = str(parameter.layout).removeprefix("torch.")
        raise UserError(
            f"parameter {name} is {kind}: DeepSpeed trains dense parameters only, call to_dense() first"
        )
    if parameter.ndim == 0:
        raise UserError(
            f"parameter {name} has no dimensions, so DeepSpeed cannot broadcast it: give it the shape (1,)"
        )
    if parameter.requires_grad and not parameter.is_floating_point():
        kind = str(parameter.dtype).removeprefix("torch.")
        raise UserError(
            f"parameter {name} is {kind}, which cannot be trained: "
            "keep real and imaginary parts as two parameters"
        )


def _check_pieces(name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        kind = str(parameter.dtype).removeprefix("torch.")
        raise UserError(
            f"parameter {name} is {kind}, which zero_optimization.stage 3 cannot partition: "
            "register it as a buffer, or set stage to 2"
        )
    if not parameter.numel():
        raise UserError(
            f"parameter {name} of shape {tuple(parameter.shape)} has no elements, which "
            "zero_optimization.stage 3 cannot partition: remove it from the model, or set stage to 2"
        )


def _check_strides(name: str, parameter: Tensor, holders: list[str]) -> None:
    others = [each for each in holders if each != name]
    if others:
        raise UserError(
            f"parameter {name} is not contiguous and shares its memory with {others[0]}: "
            "use one parameter in both places, or clone() it"
        )
    if any(step == 0 and size > 1 for size, step in zip(parameter.shape, parameter.stride(), strict=True)):
        raise UserError(f"parameter {name} repeats its elements (expand): call contiguous() or clone() first")


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.layout == torch.strided:
            yield name, each
