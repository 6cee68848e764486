"""How much memory a process will need, before any of it is allocated.

Weights, gradients and optimizer state are exact: the optimizer keeps half-precision parameters, fp32 main
gradients, fp32 masters and the inner optimizer's moments, of which ZeRO's stages leave each process a share
and may put it on the host. What is saved for backward is counted, not
modelled: the real model runs forward under PyTorch's fake tensors and a hook adds up every storage autograd
would keep, packed FP4 operands included. The device's own attention kernel may keep less than the fake one.
Not covered: temporaries inside a kernel, fragmentation, communication buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
class ZeroSharing:
    """How ZeRO divides things.

    Attributes:
        stage: 0 to 3.
        data_size: processes that share.
        is_optimizer_on_host: masters and moments are.
        are_parameters_on_host: the shares of half-precision parameters are.
    """

    stage: int = 0
    data_size: int = 1
    is_optimizer_on_host: bool = False
    are_parameters_on_host: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], data_size: int) -> ZeroSharing:
        """From a complete DeepSpeed configuration."""
        zero = config.get("zero_optimization") or {}
        on_host = [
            (zero.get(key) or {}).get("device") == "cpu" for key in ("offload_optimizer", "offload_param")
        ]
        return cls(
            stage=int(zero.get("stage") or 0),
            data_size=data_size,
            is_optimizer_on_host=on_host[0],
            are_parameters_on_host=on_host[1],
        )

    def share(self, size: int, *, from_stage: int) -> int:
        """Bytes of a process's share of what is divided from some stage on."""
        return -(-size // self.data_size) if self.stage >= from_stage else size


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes in one process, by what they hold; what is `on_the_host` is not part of the total."""

    parameters: int
    main_gradients: int
    master_parameters: int
    optimizer_moments: int
    saved_for_backward: int
    on_the_host: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts on the device, in bytes."""
        return sum(vars(self).values()) - self.on_the_host

    def __str__(self) -> str:
        parts = {name: size for name, size in vars(self).items() if name != "on_the_host"}
        rows = [*parts.items(), ("total", self.total)]
        if self.on_the_host:
            rows.append(("on the host", self.on_the_host))
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
    sharing: ZeroSharing | None = None,
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
        sharing: what ZeRO does; None: stage 0.
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
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in model.parameters()]
    count = sum(numel for numel, _ in sizes)
    moments = MOMENTS_PER_PARAMETER.get(optimizer_type.lower(), int(has_momentum))
    return _shared(
        sharing or ZeroSharing(),
        parameters=sum(numel * size for numel, size in sizes),
        gradients=count * 4,
        # ZeRO steps copies of fp32 parameters too
        masters=(count if sharing and sharing.stage else sum(parameter.numel() for parameter in halves)) * 4,
        moments=count * 4 * moments,
        saved=saved,
    )


def _shared(
    zero: ZeroSharing, *, parameters: int, gradients: int, masters: int, moments: int, saved: int
) -> MemoryEstimate:
    """The whole model's bytes, as one process has them."""
    main_gradients = zero.share(gradients, from_stage=2)
    if zero.stage == 1:  # whole sums over micro-batches, and the share that a step works on
        main_gradients += zero.share(gradients, from_stage=1)
    of_optimizer = {
        "master_parameters": zero.share(masters, from_stage=1),
        "optimizer_moments": zero.share(moments, from_stage=1),
    }
    of_parameters = {"parameters": zero.share(parameters, from_stage=3)}
    on_the_host = 0
    for parts, is_on_host in (
        (of_optimizer, zero.is_optimizer_on_host),
        (of_parameters, zero.are_parameters_on_host),
    ):
        if is_on_host:
            on_the_host += sum(parts.values())
            parts.update(dict.fromkeys(parts, 0))
    if zero.is_optimizer_on_host:  # the gradients that it reads; at stage 3 there are no others
        on_the_host += zero.share(gradients, from_stage=1)
        main_gradients = 0 if zero.stage == 3 else main_gradients
    return MemoryEstimate(
        **of_parameters,
        main_gradients=main_gradients,
        **of_optimizer,
        saved_for_backward=saved,
        on_the_host=on_the_host,
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
