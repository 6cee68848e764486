"""The run that a configuration describes, as the checks read it: products, FLOPs, sizes and memory.

The model is built once, without weights, as rank 0's shard. Memory is the estimate of `pretrain --dry-run`
(`pretrain/estimate`), and FLOPs are those of a run's MFU (`families/model_flops.py`): nothing is counted
twice in two ways.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.config.pipeline import interval_of, stages_of
from megalowbit.config.zero import zero_stage
from megalowbit.data.tokenize import build_tokenizer
from megalowbit.engine.tensor_parallel.shard_model import keep_first_shard
from megalowbit.families.config_checks import check_fits
from megalowbit.families.model_flops import ModelFlops
from megalowbit.families.registry import family
from megalowbit.hf.batches.separate_documents import uses_flash_attention
from megalowbit.hf.checkpoint import build_model, read_config
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.conversion.kept_layers import linear_layers
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.checks import check_config, check_tokenizer
from megalowbit.pretrain.components.late_switch import LateSwitchSettings, Phase, phases
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.pretrain.estimate.dry_run import estimate_run, without_flash_attention
from megalowbit.pretrain.estimate.memory import GIB, HALF_DTYPES, MOMENTS_PER_PARAMETER, MemoryEstimate
from megalowbit.pretrain.estimate.start_memory import StartEstimate, estimate_start

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Projection(NamedTuple):
    """Linear layers of the same name and size in all blocks, as one rank has them.

    Attributes:
        name: of the module, with `*` for the block.
        out_features, in_features: of a rank's part.
        layers: of the whole model.
        is_lowbit: whether they are converted.
        is_head: whether it is the output projection.
        layer: the name of one of them, whose recipe all have.
    """

    name: str
    out_features: int
    in_features: int
    layers: int
    is_lowbit: bool
    is_head: bool
    layer: str


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run before it starts.

    Attributes:
        config: checked.
        model: its configuration in transformers.
        projections: linear layers; the output projection is the last one.
        flops: of a token.
        parameters: of the whole model.
        rank_parameters: of a rank's part; in a pipeline of the average stage.
        memory: of one process.
        start: of all processes, on hosts.
        phases: in order; shares of the steps.
    """

    config: PretrainConfig
    model: PretrainedConfig
    projections: tuple[Projection, ...]
    flops: ModelFlops
    parameters: int
    rank_parameters: int
    memory: MemoryEstimate
    start: StartEstimate
    phases: tuple[Phase, ...]

    @property
    def recipe(self) -> Recipe:
        """That of the run's start."""
        return self.phases[0].recipe

    @property
    def precision(self) -> str:
        """Of the model: `"bf16"`, `"fp16"` or `"fp32"`."""
        return self.config.parts.settings.precision

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self.config.settings.data.sequence_length

    @property
    def micro_batch(self) -> int:
        """Samples in a forward pass of one rank."""
        return int(self.config.parts.deepspeed["train_micro_batch_size_per_gpu"])

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return int(self.config.parts.deepspeed["gradient_accumulation_steps"])

    @property
    def micro_tokens(self) -> int:
        """Tokens in a forward pass of one rank."""
        return self.micro_batch * self.sequence_length

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return int(self.config.parts.deepspeed["train_batch_size"]) * self.sequence_length

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.config.settings.run.steps

    @property
    def processes(self) -> int:
        """Of the run."""
        return self.config.grid.world_size

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return zero_stage(self.config.parts.deepspeed)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return len(self.flops.spans)

    @property
    def has_mask(self) -> bool:
        """Whether attention takes a mask, so that kernels cannot skip what is after a token."""
        return self.config.settings.data.separates_documents and not uses_flash_attention(self.model)

    @property
    def recomputed_share(self) -> float:
        """Share of the blocks that run forward twice."""
        if stages_of(self.config.parts.deepspeed) > 1:
            return 1.0 if interval_of(self.config.parts.deepspeed) else 0.0
        settings = self.config.parts.settings.activation_checkpointing
        return sum(map(settings.is_recomputed, range(self.num_blocks))) / self.num_blocks

    @property
    def weight_bytes(self) -> int:
        """Of a weight in the model's precision."""
        return 2 if self.precision in HALF_DTYPES else 4

    @property
    def checkpoint_bytes(self) -> int:
        """Of a checkpoint of all ranks: weights, masters and moments (docs/scaling.md)."""
        optimizer = self.config.parts.deepspeed["optimizer"]
        has_momentum = bool(optimizer["params"].get("momentum"))
        moments = MOMENTS_PER_PARAMETER.get(optimizer["type"].lower(), int(has_momentum))
        has_masters = self.weight_bytes == 2 or self.zero_stage > 0
        weights = 0 if self.zero_stage == 3 else self.weight_bytes
        return self.parameters * (weights + 4 * has_masters + 4 * moments)

    def host_bytes(self, processes: int) -> int:
        """Host memory of the host of rank 0 with so many of the run's processes on it, each with a GPU."""
        return self.start.tensor + self.start.reading + processes * self.start.offloaded

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "processes": self.processes,
            "grid": str(self.config.grid),
            "is_sized_to_fit": self.config.is_sized_to_fit,
            "zero_stage": self.zero_stage,
            "precision": self.precision,
            "recipe": self.recipe.name,
            "parameters": self.parameters,
            "sequence_length": self.sequence_length,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "tokens_per_step": self.step_tokens,
            "steps": self.steps,
            "tokens": self.step_tokens * self.steps,
            "flops_per_token": self.flops.counted,
            "flops_per_token_palm": self.flops.palm,
            "checkpoint_gib": self.checkpoint_bytes / GIB,
        }


def plan_run(config: PretrainConfig) -> RunPlan:
    """Describe the run of a configuration; nothing is read but the model's and the tokenizer's files.

    Raises:
        UserError: a line for each mistake that a run or a dry run would report.
    """
    check_config(config)
    check_tokenizer(config)
    recipe, settings = recipe_of(config.recipe), config.settings
    chosen = without_flash_attention(settings.model)
    with FakeTensorMode(allow_non_fake_inputs=True):  # look-up tables are real
        model = build_model(chosen, seed=settings.run.seed, reads_weights=False)
        flops = ModelFlops.of(model, settings.data.sequence_length)
        parameters = sum(each.numel() for each in model.parameters())
        keep_first_shard(model, config.grid.tensor_size)
        of_rank = sum(each.numel() for each in model.parameters()) // config.grid.pipeline_size
        convert(model, recipe)
        projections = _projections(model, recipe)
    vocab_size = settings.data.vocab_size or build_tokenizer(settings.data).vocab_size
    check_fits(model.config, vocab_size=vocab_size, sequence_length=settings.data.sequence_length)
    memory = estimate_run(config, recipe)
    return RunPlan(
        config=config,
        model=read_config(settings.model),
        projections=projections,
        flops=flops,
        parameters=parameters,
        rank_parameters=of_rank,
        memory=memory,
        start=estimate_start(config, memory, chosen),
        phases=phases(settings.of(LateSwitchSettings), recipe, settings.run.steps),
    )


def _projections(model: Any, recipe: Recipe) -> tuple[Projection, ...]:
    """The linear layers of a converted model; equal ones of several blocks together."""
    head = family(model.config.model_type).head
    found: dict[tuple[Projection, Recipe], list[str]] = defaultdict(list)
    layers: dict[str, Any] = linear_layers(model)
    for name, layer in layers.items():
        is_conv = not isinstance(layer, BitLinear) and type(layer).__name__ == "Conv1D"
        shape = layer.weight.shape[::-1] if is_conv else layer.weight.shape
        kind = Projection(
            name=re.sub(r"(?<![^.])\d+(?![^.])", "*", name),
            out_features=int(shape[0]),
            in_features=int(shape[1]),
            layers=0,
            is_lowbit=isinstance(layer, BitLinear),
            is_head=name == head,
            layer="",
        )
        found[kind, recipe.of_layer(name)].append(name)
    projections = [each._replace(layers=len(names), layer=names[0]) for (each, _), names in found.items()]
    return tuple(sorted(projections, key=lambda each: each.is_head))


def setting(key: str, value: object) -> str:
    """`--set` with a value, as a shell takes it."""
    return f"--set {key}={value}"
