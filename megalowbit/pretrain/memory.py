"""How much memory a process will need, before any of it is allocated.

Weights, gradients and optimizer state are exact: the optimizer keeps half-precision parameters, fp32 main
gradients, fp32 masters and the inner optimizer's moments. What is saved for backward is counted, not
modelled: the real model runs forward under PyTorch's fake tensors and a hook adds up every storage autograd
would keep, packed FP4 operands included. The device's own attention kernel may keep less than the fake one.
Not covered: temporaries inside a kernel, fragmentation, communication buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.surgery import bit_layers, convert
from megalowbit.optim.autocast import attach_autocast
from megalowbit.optim.fp32_modules import is_kept_fp32, keep_fp32
from megalowbit.optim.op_classes import OpClasses

HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MOMENTS_PER_PARAMETER = {"adamw": 2, "adam": 2}
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes in one process at ZeRO stage 0, by what they hold."""

    parameters: int
    main_gradients: int
    master_parameters: int
    optimizer_moments: int
    saved_for_backward: int

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        rows = [*vars(self).items(), ("total", self.total)]
        return "\n".join(f"  {name.replace('_', ' '):<20} {size / GIB:9.3f} GiB" for name, size in rows)


def estimate_memory(
    model_settings: ModelSettings,
    recipe: Recipe,
    *,
    precision: str,
    fp32_norms: bool = False,
    op_classes: OpClasses | None = None,
    optimizer_type: str,
    has_momentum: bool,
    micro_batch_size: int,
    sequence_length: int,
) -> MemoryEstimate:
    """Estimate the memory of one process.

    Args:
        model_settings: which model.
        recipe: its low-bit recipe.
        precision: `"fp16"`, `"bf16"` or `"fp32"`.
        fp32_norms: whether norms keep fp32 parameters, which have no master.
        op_classes: of autocast, under which more is kept in fp32; None where it is off.
        optimizer_type: DeepSpeed's `optimizer.type`.
        has_momentum: whether SGD keeps a momentum buffer.
        micro_batch_size: sequences per forward pass.
        sequence_length: tokens per sequence.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # look-up tables are real
        model = build_model(model_settings, seed=0)
        convert(model, recipe)
        for layer in bit_layers(model).values():
            layer.is_split = recipe.parameter_split is not None  # the larger of the two states
        if fp32_norms:
            keep_fp32(model)
        half = HALF_DTYPES.get(precision)
        halves = [] if half is None else [p for p in model.parameters() if not is_kept_fp32(p)]
        for parameter in halves:
            parameter.data = parameter.data.to(half)
        if op_classes is not None:
            attach_autocast(model, precision, "cpu", op_classes)
        saved = saved_for_backward(model, micro_batch_size, sequence_length)
    count = sum(parameter.numel() for parameter in model.parameters())
    moments = MOMENTS_PER_PARAMETER.get(optimizer_type.lower(), int(has_momentum))
    return MemoryEstimate(
        parameters=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        main_gradients=count * 4,
        master_parameters=sum(parameter.numel() for parameter in halves) * 4,
        optimizer_moments=count * 4 * moments,
        saved_for_backward=saved,
    )


def saved_for_backward(model: nn.Module, micro_batch_size: int, sequence_length: int) -> int:
    """Bytes autograd keeps between one forward and its backward, parameters not counted.

    Args:
        model: a causal language model that takes `input_ids` and `labels`; fake tensors serve as well.
        micro_batch_size: sequences in the batch.
        sequence_length: tokens per sequence.
    """
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holds the storages alive, so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    tokens = torch.zeros(micro_batch_size, sequence_length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    del loss
    return sum(storage.nbytes() for storage in kept.values())
