"""Estimates the memory of one process before anything is allocated.

The sizes of weights, gradients and optimizer state are exact: half-precision parameters, fp32 main gradients,
fp32 master weights and the inner optimizer's moments. ZeRO leaves each process a share of them, and may keep
it on the host. The tensors saved for backward are counted, not modelled: the model runs forward on PyTorch's
fake tensors, and a hook adds up each storage that autograd would keep, packed FP4 operands included. The
device's attention kernel may keep less than the fake one. For tensor parallelism the actual shard is built;
for a pipeline, the estimate is that of the largest stage. Temporaries of loss and layers, and what the device
needs beside tensors, are calculated in `temporaries.py`.

Not covered: fragmentation, padding, and parameters that ZeRO 3 gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.config.pipeline import interval_of, partition_of, stages_of
from megalowbit.config.zero import zero_stage
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.engine.pipeline.parts import parts_of
from megalowbit.engine.pipeline.stage_bounds import stage_bounds
from megalowbit.engine.tensor_parallel.shard_model import keep_first_shard
from megalowbit.families.registry import family
from megalowbit.hf.activation_checkpointing import recompute_blocks
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
from megalowbit.hf.settings import ModelSettings
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.settings import ActivationCheckpointingSettings
from megalowbit.optim.precision.autocast import attach_autocast
from megalowbit.optim.precision.fp32_modules import is_kept_fp32, keep_fp32
from megalowbit.optim.precision.op_classes import OpClasses
from megalowbit.pretrain.estimate.saved_tensors import LargestRecipes, saved_by_stage, saved_for_backward
from megalowbit.pretrain.estimate.temporaries import outside_tensors, temporaries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MOMENTS_PER_PARAMETER = {"adamw": 2, "adam": 2}
REDUCE_BUCKET_SIZE = 500_000_000  # DeepSpeed's default, in elements
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """How tensor and pipeline parallelism divide the model.

    Attributes:
        tensor_size: tensor-parallel processes; each holds a shard of each projection and all other
            parameters.
        num_stages: pipeline stages.
        partition: how the model's parts are distributed over stages.
        interval: blocks per recomputed segment of a stage; 0: no recomputation.
        micro_batches: micro-batches of an optimizer step.
    """

    tensor_size: int = 1
    num_stages: int = 1
    partition: str = "parameters"
    interval: int = 0
    micro_batches: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], grid: ProcessGrid) -> ModelLayout:
        """From a complete DeepSpeed configuration."""
        return cls(
            tensor_size=grid.tensor_size,
            num_stages=grid.pipeline_size,
            partition=partition_of(config),
            interval=interval_of(config),
            micro_batches=config["gradient_accumulation_steps"],
        )


@dataclass(frozen=True, kw_only=True)
class ZeroSharing:
    """How ZeRO divides the training state.

    Attributes:
        stage: 0 to 3.
        data_size: data-parallel processes.
        is_optimizer_on_host: whether master weights and moments are on the host.
        are_parameters_on_host: whether the shares of half-precision parameters are on the host.
        bucket_elements: total number of elements in the buffers for reducing gradients.
    """

    stage: int = 0
    data_size: int = 1
    is_optimizer_on_host: bool = False
    are_parameters_on_host: bool = False
    bucket_elements: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], data_size: int) -> ZeroSharing:
        """From a complete DeepSpeed configuration."""
        zero, stage = config.get("zero_optimization") or {}, zero_stage(config)
        on_host = [
            (zero.get(key) or {}).get("device") == "cpu" for key in ("offload_optimizer", "offload_param")
        ]
        num_buckets = 0
        if stage and zero.get("contiguous_gradients", True):
            # two with overlap_comm; a pipeline at stage 1 allocates a second one in each step
            is_pipeline = stages_of(config) > 1
            num_buckets = 2 if is_pipeline or (stage < 3 and zero.get("overlap_comm")) else 1
        return cls(
            stage=stage,
            data_size=data_size,
            is_optimizer_on_host=on_host[0],
            are_parameters_on_host=on_host[1],
            bucket_elements=num_buckets * int(zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE)),
        )

    def share(self, size: int, *, from_stage: int) -> int:
        """Bytes per process of something that ZeRO divides at `from_stage` and above."""
        return -(-size // self.data_size) if self.stage >= from_stage else size

    def reduction_buffers(self, precision: str) -> int:
        """Bytes of the buffers for reducing gradients; only stage 2 has them in the model's precision."""
        return self.bucket_elements * (2 if self.stage == 2 and precision in HALF_DTYPES else 4)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one process by purpose; the total does not include `on_the_host`."""

    parameters: int
    main_gradients: int
    master_parameters: int
    optimizer_moments: int
    saved_for_backward: int
    temporaries: int = 0
    reduction_buffers: int = 0
    context_and_communication: int = 0
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
        on_cpus = (self.total - self.context_and_communication) / GIB
        notes = {
            "context_and_communication": " (of CUDA and NCCL; none on CPUs)",
            "total": f" ({on_cpus:.3f} GiB on CPUs)",
        }
        return "\n".join(
            f"  {name.replace('_', ' '):<25} {size / GIB:9.3f} GiB{notes.get(name, '')}"
            for name, size in rows
        )


def estimate_memory(
    model_settings: ModelSettings,
    recipe: Recipe,
    *,
    largest: LargestRecipes | None = None,
    precision: str,
    fp32_norms: bool = False,
    op_classes: OpClasses | None = None,
    optimizer_type: str,
    has_momentum: bool,
    micro_batch_size: int,
    sequence_length: int,
    sharing: ZeroSharing | None = None,
    layout: ModelLayout | None = None,
    checkpointing: ActivationCheckpointingSettings | None = None,
    chunks_loss: bool = False,
    has_documents: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of one process; in a pipeline, of a process in the stage that needs the most.

    Args:
        model_settings: the model.
        recipe: its low-bit recipe.
        largest: the recipes that keep the most, if recipes change during the run; None: always `recipe`.
        precision: `"fp16"`, `"bf16"` or `"fp32"`.
        fp32_norms: whether norms keep fp32 parameters, which have no master weights.
        op_classes: the op classes of autocast, which keeps more tensors in fp32; None if it is off.
        optimizer_type: DeepSpeed's `optimizer.type`.
        has_momentum: whether SGD keeps a momentum buffer.
        micro_batch_size: sequences per forward pass.
        sequence_length: tokens per sequence.
        sharing: how ZeRO divides the training state; None: stage 0.
        layout: how the model is divided; None: not at all.
        checkpointing: which blocks are recomputed in backward; None: none.
        chunks_loss: whether the loss is computed in chunks of the vocabulary.
        has_documents: whether sequences consist of separate documents.

    Raises:
        UserError: the model cannot be divided in this way.
    """
    layout, zero = layout or ModelLayout(), sharing or ZeroSharing()
    with FakeTensorMode(allow_non_fake_inputs=True):  # look-up tables are real
        model = _converted(model_settings, recipe, layout, precision, fp32_norms=fp32_norms)
        if op_classes is not None:
            attach_autocast(model, precision, "cpu", op_classes)
        if checkpointing is not None:
            recompute_blocks(model, checkpointing)
        if chunks_loss:
            chunk_cross_entropy(model)
        stages = _stages(
            model, layout, micro_batch_size, sequence_length, largest, has_documents=has_documents
        )
        of_operations = temporaries(model, micro_batch_size * sequence_length, chunks_loss=chunks_loss)
    axes = (layout.tensor_size, layout.num_stages, zero.data_size)
    beside = {"temporaries": of_operations, "context_and_communication": outside_tensors(axes)}
    moments = MOMENTS_PER_PARAMETER.get(optimizer_type.lower(), int(has_momentum))
    estimates = [
        replace(_of_stage(zero, parameters, saved, precision, moments), **beside)
        for parameters, saved in stages
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def _converted(
    model_settings: ModelSettings, recipe: Recipe, layout: ModelLayout, precision: str, *, fp32_norms: bool
) -> PreTrainedModel:
    """The model of one process before it is divided into stages."""
    model = build_model(model_settings, seed=0, reads_weights=False)
    keep_first_shard(model, layout.tensor_size)
    convert(model, recipe)
    for layer in bit_layers(model).values():
        # a weight that is not split yet keeps as much
        layer.is_split = layer.recipe.parameter_split is not None
    if fp32_norms:
        keep_fp32(model)
    half = HALF_DTYPES.get(precision)
    for parameter in model.parameters():
        if half is not None and not is_kept_fp32(parameter):
            parameter.data = parameter.data.to(half)
    return model


def _stages(
    model: PreTrainedModel,
    layout: ModelLayout,
    micro_batch_size: int,
    sequence_length: int,
    largest: LargestRecipes | None,
    *,
    has_documents: bool,
) -> list[tuple[list[nn.Parameter], int]]:
    """For each stage: its parameters (a tied one in every stage that has it) and its bytes for backward."""
    if layout.num_stages == 1:
        blocks = list(model.get_submodule(family(model.config.model_type).blocks).children())
        saved = saved_for_backward(
            model,
            micro_batch_size,
            sequence_length,
            largest,
            blocks=blocks,
            has_documents=has_documents,
        )
        return [(list(model.parameters()), saved)]
    parts = parts_of(model)
    bounds = stage_bounds(parts, layout.num_stages, layout.partition)
    found = []
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        own = parts[start:stop]
        saved = saved_by_stage(
            model,
            own,
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            interval=layout.interval,
            # 1F1B schedule: earlier stages have more micro-batches in flight
            num_in_flight=min(layout.num_stages - stage, layout.micro_batches),
            largest=largest,
            has_documents=has_documents,
        )
        found.append((list(dict.fromkeys(p for part in own for p in part.parameters())), saved))
    return found


def _of_stage(
    zero: ZeroSharing, parameters: list[nn.Parameter], saved: int, precision: str, moments: int
) -> MemoryEstimate:
    """The estimate for a process with these parameters and `saved` bytes for backward."""
    count = sum(parameter.numel() for parameter in parameters)
    gradients = 4 * count
    # ZeRO keeps master weights for fp32 parameters, too
    with_masters = (p for p in parameters if zero.stage or p.dtype != torch.float32)
    main_gradients = zero.share(gradients, from_stage=2)
    if zero.stage == 1:  # full gradients summed over micro-batches, plus the share that the update uses
        main_gradients += zero.share(gradients, from_stage=1)
    of_optimizer = {
        "master_parameters": zero.share(4 * sum(p.numel() for p in with_masters), from_stage=1),
        "optimizer_moments": zero.share(4 * count * moments, from_stage=1),
    }
    sizes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    of_parameters = {"parameters": zero.share(sizes, from_stage=3)}
    on_the_host = 0
    for parts, is_on_host in (
        (of_optimizer, zero.is_optimizer_on_host),
        (of_parameters, zero.are_parameters_on_host),
    ):
        if is_on_host:
            on_the_host += sum(parts.values())
            parts.update(dict.fromkeys(parts, 0))
    if zero.is_optimizer_on_host:  # a copy of the gradients for the update; at stage 3 the only one
        on_the_host += zero.share(gradients, from_stage=1)
        main_gradients = 0 if zero.stage == 3 else main_gradients
    return MemoryEstimate(
        **of_parameters,
        main_gradients=main_gradients,
        **of_optimizer,
        saved_for_backward=saved,
        reduction_buffers=zero.reduction_buffers(precision),
        on_the_host=on_the_host,
    )
