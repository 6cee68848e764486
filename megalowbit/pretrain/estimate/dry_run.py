"""`--dry-run`: describes a run without starting it: configuration, converted layers, model size and memory.

One process is enough to describe a run of many; the others are not started. The model is built on fake
tensors, so it need not fit into this machine's memory. Nothing is written or downloaded: no run folder, cache
or data set.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from torch._subclasses.fake_tensor import FakeTensorMode

from megalowbit.data.order.blend_plan import describe_settings
from megalowbit.data.sources import is_on_hub, open_source, sources_of
from megalowbit.data.tokenize import build_tokenizer
from megalowbit.data.validation import describe_validation
from megalowbit.families.config_checks import check_fits
from megalowbit.families.vocabulary import num_tokens
from megalowbit.hf.batches.separate_documents import uses_flash_attention
from megalowbit.hf.checkpoint import build_model, read_config
from megalowbit.hf.folders.config_file import ATTENTION
from megalowbit.hf.settings import ModelSettings
from megalowbit.json_text import short_json
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.precision_switch import switched
from megalowbit.layers.layer_recipe import SPLIT_FIELDS
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.checks import (
    check_config,
    check_tokenizer,
    describe_gemms,
    recipe_advice,
    this_device,
    why_not,
)
from megalowbit.pretrain.components.late_switch import LateSwitchSettings
from megalowbit.pretrain.components.speculation import describe_speculation
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.pretrain.estimate.memory import MemoryEstimate, ModelLayout, ZeroSharing, estimate_memory
from megalowbit.pretrain.estimate.saved_tensors import largest_recipes
from megalowbit.pretrain.estimate.start_memory import estimate_start
from megalowbit.pretrain.job import check_all_projections_seen
from megalowbit.speculation.settings import SpeculationSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZED_TO_FIT = (
    ", the smallest process grid of this configuration, whatever the memory; --processes sets another number"
)

UPPER_BOUND_NOTE = (
    "\n  upper bound: saved for backward assumes the candidate precisions that keep the most memory"
)


def describe(config: PretrainConfig) -> str:
    """The report that `--dry-run` prints.

    Raises:
        UserError: model, recipe or corpus would fail in the real run.
    """
    check_config(config)
    check_tokenizer(config)
    recipe = recipe_of(config.recipe)
    text, packing = describe_validation(config.settings.data), config.settings.data.describe_packing()
    sections = {
        "processes": f"{config.grid.world_size} ({config.grid})"
        + (SIZED_TO_FIT if config.is_sized_to_fit else ""),
        "configuration": short_json(config.to_dict()),
        **_model_sections(config, recipe),
        "data": f"{_corpora(config)}; {_tokens(config)}"
        + ("" if not packing else f"\n{packing}")
        + ("" if text is None else f"\nvalidation: {text}"),
        **_memory_sections(config, recipe),
    }
    return "\n\n".join(f"== {title}\n{text}" for title, text in sections.items())


def _model_sections(config: PretrainConfig, recipe: Recipe) -> dict[str, str]:
    settings = config.settings
    with FakeTensorMode(allow_non_fake_inputs=True):  # look-up tables are real
        chosen = without_flash_attention(settings.model)
        model = build_model(chosen, seed=settings.run.seed, reads_weights=False)
        report = convert(model, recipe)
        check_all_projections_seen(model.config, report)
        layers = bit_layers(model).values()
        total = sum(parameter.numel() for parameter in model.parameters())
        converted = sum(
            parameter.numel()
            for layer in layers
            for name, parameter in layer.named_parameters(recurse=False)
            if name != "bias"
        )
    vocab_size = settings.data.vocab_size or build_tokenizer(settings.data).vocab_size
    check_fits(model.config, vocab_size=vocab_size, sequence_length=settings.data.sequence_length)
    device = this_device()
    return {
        "layers": "\n".join([str(report), *split_ranks(layers), *filter(None, [recipe_advice(config)])]),
        "products": why_not(recipe, device) or f"{describe_gemms(recipe, device)} on this machine ({device})",
        "parameters": f"{total:,}, of which {converted:,} ({converted / total:.1%}) in low-bit layers"
        + padding_text(model.config),
    }


def padding_text(config: PretrainedConfig) -> str:
    """How the vocabulary is padded, on a line after others; empty if it is not."""
    size = num_tokens(config)
    is_padded = config.vocab_size != size
    return f"\nvocabulary: {size:,} tokens, padded to {config.vocab_size:,} rows" * is_padded


def _corpora(config: PretrainConfig) -> str:
    """The corpora for training, which are opened but not read, and what each source of a blend gives."""
    settings, parts = config.settings.data, dict[str, str]()
    if settings.sources is not None:
        parts = describe_settings(
            settings,
            steps=config.settings.run.steps,
            samples_per_step=config.parts.deepspeed["train_batch_size"],
        )
    return "\n".join(
        (f"{name}: {parts[name]}, from " if name else "")
        + (f"data set {each.corpus} (not downloaded)" if is_on_hub(each) else open_source(name, each).name)
        for name, each in sources_of(settings).items()
    )


def _tokens(config: PretrainConfig) -> str:
    settings = config.settings
    tokens = config.parts.deepspeed["train_batch_size"] * settings.data.sequence_length
    count = config.grid.world_size
    return (
        f"{tokens:,} tokens per step on {count} process{'es' if count > 1 else ''}, "
        f"{tokens * settings.run.steps:,} in {settings.run.steps:,} steps"
    )


def _memory_sections(config: PretrainConfig, recipe: Recipe) -> dict[str, str]:
    """The memory of one process, with speculation, and after a late switch; that of all at the start."""
    settings = config.settings
    speculation, switch = settings.of(SpeculationSettings), settings.of(LateSwitchSettings)
    memory = estimate_run(config, recipe)
    count = config.grid.world_size  # again, because readers of the last part have scrolled past the first one
    whose = "the only process" if count == 1 else f"one of {count} processes"
    sections = {
        f"memory of {whose} (estimate)": str(memory) + (UPPER_BOUND_NOTE if speculation else ""),
        "host memory at the start (estimate)": str(
            estimate_start(config, memory, without_flash_attention(config.settings.model))
        ),
    }
    if speculation is not None:
        sections["speculation"] = describe_speculation(speculation)
    if switch is not None and recipe.quantizes:
        later = switched(recipe, switch.scope)
        sections["late switch"] = f"after step {switch.step(settings.run.steps)}: {later}"
        saved = estimate_run(config, later).saved_for_backward  # the only part that changes
        after = replace(memory, saved_for_backward=saved)
        sections["memory after the late switch (estimate)"] = "as before" if after == memory else str(after)
    return sections


def estimate_run(config: PretrainConfig, recipe: Recipe) -> MemoryEstimate:
    """Memory of one process whose layers have this recipe; with speculation, an upper bound."""
    settings, engine, deepspeed = config.settings, config.parts.settings, config.parts.deepspeed
    optimizer = deepspeed["optimizer"]
    speculation, model = settings.of(SpeculationSettings), read_config(settings.model)
    return estimate_memory(
        without_flash_attention(settings.model),
        recipe,
        largest=None if speculation is None else largest_recipes(speculation, recipe),
        precision=engine.precision,
        fp32_norms=engine.fp32_norms,
        op_classes=engine.autocast.op_classes() if engine.autocast.enabled else None,
        optimizer_type=optimizer["type"],
        has_momentum=bool(optimizer["params"].get("momentum")),
        micro_batch_size=deepspeed["train_micro_batch_size_per_gpu"],
        sequence_length=settings.data.sequence_length,
        sharing=ZeroSharing.from_config(deepspeed, config.grid.data_size),
        layout=ModelLayout.from_config(deepspeed, config.grid),
        checkpointing=engine.activation_checkpointing,
        chunks_loss=config.chunks_loss(model.vocab_size),
        has_documents=settings.data.separates_documents and not uses_flash_attention(model),
    )


def without_flash_attention(settings: ModelSettings) -> ModelSettings:
    """The same model without flash attention, which needs a GPU.

    Without a mask, `sdpa` keeps the same tensors for backward: its inputs, its output and a number for each
    row of scores.
    """
    if not uses_flash_attention(read_config(settings)):
        return settings
    return settings.model_copy(update={"overrides": {**settings.overrides, ATTENTION: "sdpa"}})


def split_ranks(layers: Collection[BitLinear]) -> list[str]:
    """For each split in the layers' recipes, a line with the smallest and largest rank over the layers."""
    lines = []
    for field in SPLIT_FIELDS:
        ranks = sorted(
            (split.rank_of(*layer.sizes), *layer.sizes)
            for layer in layers
            if (split := getattr(layer.recipe, field)) is not None
        )
        if not ranks:
            continue
        least, most = (f"{rank} ({inputs}→{outputs})" for rank, inputs, outputs in (ranks[0], ranks[-1]))
        is_one = ranks[0][0] == ranks[-1][0]
        lines.append(f"{field}: rank " + (f"{ranks[0][0]} in all layers" if is_one else f"{least} … {most}"))
    return lines
