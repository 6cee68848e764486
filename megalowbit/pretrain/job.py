"""The job: model, data, engine and components of a run, and the state that its checkpoints hold.

Every rank builds the same job in the same order. A checkpoint's client state has two parts. `megalowbit`
holds what an exporter needs to read the weights: model configuration and recipe. `progress` holds what the
loop needs to continue exactly: data position, random stream, totals and the state of each component.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalowbit.config.pipeline import interval_of, partition_of
from megalowbit.data.loader import ShardedLoader, build_loader
from megalowbit.distributed.agreement import agree, gather, succeed_together
from megalowbit.distributed.generator_states import seed_generators
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.split import forget_lr_scales
from megalowbit.engine.pipeline.setup import pipeline_module
from megalowbit.engine.tensor_parallel.shard_model import shard_model
from megalowbit.errors import UserError, file_system_error
from megalowbit.families.config_checks import check_fits
from megalowbit.families.model_flops import ModelFlops
from megalowbit.families.registry import family
from megalowbit.hf.generation import stored_generation
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
from megalowbit.hf.start.weights import StartWeights, start_model
from megalowbit.hf.training_checkpoint import FORMAT
from megalowbit.layers.conversion.carried_state import (
    OWN_ROLES,
    SHARED_ROLES,
    forget_uses,
    has_splits,
    load_split_state_dict,
    split_state_dict,
)
from megalowbit.layers.conversion.convert import (
    ConversionReport,
    bit_layers,
    cache_weights,
    convert,
    random_stream,
)
from megalowbit.layers.conversion.report import refuse_missed
from megalowbit.layers.matmul.weight_cache import WeightCache
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.optim.timers import StepTimers
from megalowbit.pretrain.components.base import Component, Kind, RunParts, find
from megalowbit.pretrain.components.loss_guard import LossGuard
from megalowbit.pretrain.components.machine.rank_comparison import RankComparison
from megalowbit.pretrain.components.overflow_counts import OverflowCounts
from megalowbit.pretrain.components.profiler import Profiler
from megalowbit.pretrain.components.registry import COMPONENTS
from megalowbit.pretrain.components.source_losses import SourceLosses
from megalowbit.pretrain.components.static_inputs import StaticInputRecord, static_inputs_in
from megalowbit.pretrain.components.validation import Validation
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.pretrain.resume import changed_settings, check_same_model
from megalowbit.pretrain.run_folder.folder import RunFolder
from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker
from megalowbit.telemetry.summary import RunTotals

logger = logging.getLogger(__name__)


@dataclass
class Job:
    """Everything a run works with.

    Attributes:
        config: the resolved configuration.
        folder: the run folder.
        engine: DeepSpeed's engine around the converted model.
        loader: endless, resumable batches of this rank.
        report: which layers were converted and kept.
        recipe: how the layers quantise.
        store: the run's checkpoints.
        components: the enabled components, in the order in which they act.
        weight_cache: keeps quantised weights within a step that uses them more than once; None at ZeRO 3.
        totals: counters of the whole run, including the parts before it was resumed.
        skips_in_a_row: skipped steps since the last update.
        is_folder_lost: the main process has noticed that the run folder is gone.
    """

    config: PretrainConfig
    folder: RunFolder
    engine: Any
    loader: ShardedLoader
    report: ConversionReport
    recipe: Recipe
    store: CheckpointStore
    components: tuple[Component, ...]
    weight_cache: WeightCache | None = None
    totals: RunTotals = field(default_factory=RunTotals)
    skips_in_a_row: int = 0
    is_folder_lost: bool = False

    def find(self, kind: type[Kind]) -> Kind | None:
        """The component of that class; None: the run has none."""
        return find(self.components, kind)

    @property
    def loss_guard(self) -> LossGuard:
        """The component that reacts to non-finite and rising losses."""
        guard = self.find(LossGuard)
        assert guard is not None  # every run has one
        return guard

    @property
    def tracker(self) -> GradientOverflowTracker | None:
        """Saturation and underflow counts; None if telemetry or quantisation is off."""
        counts = self.find(OverflowCounts)
        return None if counts is None else counts.tracker

    @property
    def source_losses(self) -> SourceLosses | None:
        """The component that sums losses by source; None if the data is no blend."""
        return self.find(SourceLosses)

    @property
    def rank_comparison(self) -> RankComparison | None:
        """The component that compares ranks; None if there is one process, or a pipeline."""
        return self.find(RankComparison)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A named range around a phase of a step in the profiler's trace."""
        profiler = self.find(Profiler)
        return nullcontext() if profiler is None else profiler.phase(name)

    @property
    def counting_tracker(self) -> GradientOverflowTracker | None:
        """The tracker in a step that is counted, see `OverflowCounts`; None in other steps."""
        counts = self.find(OverflowCounts)
        return counts.tracker if counts is not None and counts.is_counting else None

    @property
    def step(self) -> int:
        """Optimizer steps taken so far, skipped ones included."""
        return self.totals.steps

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.config.parts.deepspeed["gradient_accumulation_steps"]

    @property
    def checkpoint_every(self) -> int:
        """Optimizer steps between two checkpoints; `run.steps` if only the end is saved."""
        return self.config.settings.checkpoint.every or self.config.settings.run.steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all data-parallel ranks."""
        return self.loader.tokens_per_batch * self.accumulation_steps

    @property
    def is_pipeline(self) -> bool:
        """Whether the engine runs pipeline stages; it then takes all micro-batches of a step at once."""
        return bool(self.engine.process_grid.pipeline_size > 1)

    def plan_data(self) -> None:
        """Plan which data the rest of the run reads, before its first step and after each `load`.

        Not collective; errors are the same on all ranks.
        """
        self.loader.plan(
            step=self.step,
            steps=self.config.settings.run.steps,
            samples_per_step=self.loader.samples_per_batch * self.accumulation_steps,
        )

    def weights_have_changed(self) -> None:
        """Clear the weight cache; layers cannot detect that the optimizer has changed their weights."""
        if self.weight_cache is not None:
            self.weight_cache.clear()

    def save(self) -> None:
        """Write a checkpoint of this step. Every rank must call it."""
        weight_splits = self._weight_splits()
        state, own = succeed_together(
            lambda: (self._state(weight_splits), split_state_dict(self.engine.module, OWN_ROLES))
        )
        self.store.save(self.engine, self.step, state, own, spare=self._retained_steps())
        agree(self._note_saved)
        self.store.name_checkpoints(self.named_checkpoints)

    @property
    def named_checkpoints(self) -> dict[str, int | None]:
        """Names of files, and the steps of the checkpoints that they name, which are kept."""
        named = (component.named_checkpoints() for component in self.components)
        return {name: step for each in named for name, step in each.items()}

    def _note_saved(self) -> None:
        try:
            self.folder.note_saved(self.step)
        except OSError as error:
            message = f"{self.folder.saved} cannot be written ({error.strerror}): free space there"
            raise file_system_error(message, error) from error

    def _retained_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints have a name or may be needed by a rollback.

        A rollback needs the newest one known to be good, and the next one, which becomes the newest good one
        if the loss stays stable.
        """
        named = tuple(step for step in self.named_checkpoints.values() if step is not None)
        until = self.loss_guard.good_until(self.step)
        if until is None:
            return named
        saved = (*self.store.steps(), self.step)
        saved = tuple(step for step in saved if step % self.checkpoint_every == 0) or saved
        good, later = [step for step in saved if step <= until], [step for step in saved if step > until]
        return (*good[-1:], *later[:1], *named)

    def _state(self, weight_splits: Mapping[str, Any]) -> dict[str, Any]:
        """The client state of a checkpoint; the engine adds weights and optimizer state."""
        of_components = {kind.key: _state_of(self.find(kind)) for kind in COMPONENTS if kind.key}
        return {
            "megalowbit": {
                "format": FORMAT,
                "step": self.step,
                "hf_config": self.engine.module.config.to_dict(),
                "recipe": self.recipe.to_dict(),
                "config": self.config.to_dict(),
                "generation": stored_generation(self.engine.module),
                "static_inputs": static_inputs_in(of_components[StaticInputRecord.key]),
            },
            "progress": {
                "loader": self.loader.state_dict(),
                "totals": self.totals.state_dict(),
                "skips_in_a_row": self.skips_in_a_row,
                "random_stream": _state_of(random_stream(self.engine.module)),
                **of_components,
                "weight_splits": weight_splits,
            },
        }

    def facts_for_card(self) -> dict[str, Any]:
        """What `model_card` reads of a checkpoint's header, without saving one."""
        return {
            "megalowbit": {
                "step": self.step,
                "hf_config": self.engine.module.config.to_dict(),
                "config": self.config.to_dict(),
                "recipe": self.recipe.to_dict(),
            },
            "progress": {
                "totals": self.totals.state_dict(),
                Validation.key: _state_of(self.find(Validation)),
            },
            "ds_version": importlib.metadata.version("deepspeed"),
        }

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint, if there is one. Every rank must call it."""
        path = self.store.latest()
        if path is None:
            return False
        self.load(path)
        return True

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, which may be of an earlier step. Every rank must call it."""
        forget_lr_scales(self.engine)
        state = self.store.load(self.engine, path)
        forget_uses(self.engine.module)  # also clears cached weights
        own = self.store.rank_state(self.engine, path)
        succeed_together(lambda: self._continue_from(path, state, own))
        self.note_checkpoints()

    def note_checkpoints(self) -> None:
        """Tell components which checkpoints there are, after a load. Every rank must call it."""
        saved_steps = agree(self.store.steps)
        for component in self.components:
            component.after_load(saved_steps)

    def _continue_from(self, path: Path, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Restore what `_state` saved, and this rank's state `own`; the engine has restored its part."""
        check_same_model(state["megalowbit"]["hf_config"], self.engine.module.config.to_dict())
        progress = state.get("progress")
        if progress is None:
            raise UserError(
                f"{path} holds weights only and cannot be resumed: "
                "start from it with megalowbit.model.checkpoint"
            )
        if not self.folder.is_started:  # otherwise compared with config.json, which may be newer
            changed_settings(state["megalowbit"]["config"], self.config.to_dict())
        for kind in COMPONENTS:
            kind.check_resumed(
                state["megalowbit"]["config"], self.config.to_dict(), step=state["megalowbit"]["step"]
            )
        self.loader.load_state_dict(progress["loader"])
        self.totals.load_state_dict(progress["totals"])
        self.skips_in_a_row = progress.get("skips_in_a_row", 0)
        stream = random_stream(self.engine.module)
        if stream is not None and progress["random_stream"] is not None:
            stream.load_state_dict(progress["random_stream"])
        self._resume_splits(path, progress.get("weight_splits", {}), own)
        for component in self.components:  # None: earlier versions saved no state for some components
            component.load_state_dict(progress.get(component.key), step=self.step, source=path)

    def _weight_splits(self) -> dict[str, Any]:
        """The state of all layers' weight splits, on every rank; collective in a pipeline."""
        own = succeed_together(lambda: split_state_dict(self.engine.module, SHARED_ROLES))
        splits_weights = any(each.split_weight is not None for each in self.recipe.variants)
        if not (self.is_pipeline and splits_weights):  # a stage alone may have no such layer
            return own
        return {name: state for stage in gather(own) for name, state in stage.items()}

    def _resume_splits(
        self, path: Path, weight_splits: Mapping[str, Any], own: Mapping[str, Any] | None
    ) -> None:
        model = self.engine.module
        local = {name: weight_splits[name] for name in bit_layers(model) if name in weight_splits}
        load_split_state_dict(model, local if self.is_pipeline else weight_splits, SHARED_ROLES)
        load_split_state_dict(model, own or {}, OWN_ROLES)
        if own is None and has_splits(model, OWN_ROLES):
            logger.warning("%s has no split directions for this rank: they are computed again", path)


def _state_of(part: Any) -> dict[str, Any] | None:
    return None if part is None else part.state_dict()


def assemble(
    config: PretrainConfig,
    identity: ProcessIdentity,
    folder: RunFolder,
    *,
    open_data: Callable[..., ShardedLoader] = build_loader,
    is_resume: bool = False,
) -> Job:
    """Build a job. Every rank must call it, in an initialised process group.

    Args:
        config: the resolved configuration.
        identity: this process.
        folder: the run folder.
        open_data: called with the arguments of `build_loader`.
        is_resume: whether `Job.resume` follows; if there is a checkpoint, initial weights are not read.

    Raises:
        UserError: model, data and batch sizes do not fit together.
    """
    settings, parts = config.settings, config.parts
    grid = ProcessGrid.from_config(parts.deepspeed, identity.rank, identity.world_size)
    loader = open_data(
        settings.data,
        micro_batch_size=parts.deepspeed["train_micro_batch_size_per_gpu"],
        rank=grid.data_rank,  # ranks with shards of the same model read the same batches
        world_size=grid.data_size,
    )
    recipe = recipe_of(config.recipe)
    store = CheckpointStore(folder.checkpoints, keep=settings.checkpoint.keep)
    has_checkpoint = is_resume and store.latest() is not None
    model, weights, report, flops = _prepared_model(
        config, recipe, loader, grid, reads_weights=not has_checkpoint
    )
    engine, _, _, _ = initialize(model=model, config=parts, weights=weights)
    # dropout differs between ranks, but is equal between runs and on tensor-parallel ranks of one model
    seed_generators(settings.run.seed, identity.rank // grid.tensor_size)
    if settings.telemetry.timers:
        engine.optimizer.timers = StepTimers(engine.device)
    components = _components(config, engine, recipe, loader, folder, flops, num_layers=len(report.swapped))
    return Job(
        config=config,
        folder=folder,
        engine=engine,
        loader=loader,
        report=report,
        recipe=recipe,
        store=store,
        weight_cache=cache_weights(engine.module) if report.swapped and _reuses_codes(engine) else None,
        components=components,
    )


def _components(
    config: PretrainConfig,
    engine: Any,
    recipe: Recipe,
    loader: ShardedLoader,
    folder: RunFolder,
    flops: ModelFlops,
    *,
    num_layers: int,
) -> tuple[Component, ...]:
    settings = config.settings
    built: list[Component] = []
    parts = RunParts(
        engine=engine,
        loader=loader,
        recipe=recipe,
        num_layers=num_layers,
        precision=config.parts.settings.precision,
        flops=flops,
        tokens_per_step=loader.tokens_per_batch * config.parts.deepspeed["gradient_accumulation_steps"],
        folder=folder.path,
        run=settings.run,
        telemetry=settings.telemetry,
        earlier=built,
    )
    for kind, of_component in settings.components():
        component = kind.build(of_component, parts)
        if component is not None:
            built.append(component)
    return tuple(built)


def _prepared_model(
    config: PretrainConfig, recipe: Recipe, loader: ShardedLoader, grid: ProcessGrid, *, reads_weights: bool
) -> tuple[Any, StartWeights, ConversionReport, ModelFlops]:
    """The model for the engine: sharded over tensor ranks, converted, and divided into stages; its FLOPs.

    Its parameters are on the meta device; the engine gives them their weights.
    """
    settings, parts = config.settings, config.parts
    model, weights = succeed_together(
        start_model, settings.model, seed=settings.run.seed, reads_weights=reads_weights
    )
    check_fits(
        model.config,
        vocab_size=loader.tokenizer.vocab_size,
        sequence_length=settings.data.sequence_length,
    )
    flops = ModelFlops.of(model, settings.data.sequence_length)  # of the full model
    shard_model(model, parts)  # before conversion: low-bit layers are built from shards
    report = convert(model, recipe, seed=settings.run.seed, rank=grid.data_rank)
    check_all_projections_seen(model.config, report)
    if config.chunks_loss(model.config.vocab_size):
        chunk_cross_entropy(model)
    if grid.pipeline_size > 1:
        model = pipeline_module(
            model,
            num_stages=grid.pipeline_size,
            partition=partition_of(parts.deepspeed),
            activation_checkpoint_interval=interval_of(parts.deepspeed),
            dynamic_shape=False,  # all batches of the loader have the same shape
        )
    return model, weights, report, flops


def _reuses_codes(engine: Any) -> bool:
    """Whether caching quantised weights helps: a step uses them more than once, and memory is not sharded."""
    is_used_again = engine.gradient_accumulation_steps() > 1 or getattr(
        engine.module, "is_activation_checkpointing", False
    )
    # stage 3 shards weights to save memory; codes of full weights on every rank would defeat that
    return bool(is_used_again and engine.zero_optimization_stage() < 3)


def check_all_projections_seen(model_config: Any, report: ConversionReport) -> None:
    """Check that every projection of the model's family was converted, or kept on purpose.

    Raises:
        UserError: a projection is neither; the run would silently quantise less than configured.
    """
    refuse_missed(report.missed, report.recipe)
    seen = {layer.name for layer in report.swapped} | {layer.name for layer in report.kept}
    expected = family(model_config.model_type).projection_names(model_config)
    missing = [name for name in expected if name not in seen]
    if missing:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UserError(
            f"projection {missing[0]}{more} has a layer type that is not supported: "
            "use a transformers version allowed by setup.py"
        )
