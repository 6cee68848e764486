"""Lines that a run prints before, between and after its steps; one fact a line."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.parameters.full_weights import full_numel
from megalowbit.layers.settings import ROTARY_RECIPE
from megalowbit.optim.gradients.report import StepReport
from megalowbit.optim.optimizers.param_groups import learning_rate
from megalowbit.pretrain.checks import describe_kernels, recipe_advice
from megalowbit.pretrain.job import Job
from megalowbit.telemetry.columns import scale_text
from megalowbit.values import counted

# How to make the learning rate of a scheduler's first steps positive. DeepSpeed's warm-up schedulers use
# their first value twice: for step 1, before they are stepped, and for step 2. WarmupCosineLR always uses 0
# for step 1.
REMEDIES = MappingProxyType(
    {
        "WarmupLR": "set scheduler.params.warmup_min_lr above 0",
        "WarmupDecayLR": "set scheduler.params.warmup_min_lr above 0",
        "WarmupCosineLR": "set scheduler.params.warmup_min_ratio above 0 to lose step 1 only",
        "OneCycle": "set scheduler.params.cycle_min_lr above 0",
        "LRRangeTest": "set scheduler.params.lr_range_test_min_lr above 0",
    }
)
WARM_UPS = {
    "WarmupLR": "warmup_min_lr",
    "WarmupDecayLR": "warmup_min_lr",
    "WarmupCosineLR": "warmup_min_ratio",
}


def products_line(counts: dict[str, dict[str, int]]) -> str:
    """The precisions of low-bit products on one line: `{"output": {"fp8": 3}}` → "output 3 fp8"."""
    parts = (
        f"{product} " + " + ".join(f"{count:,} {path}" for path, count in sorted(paths.items()))
        for product, paths in counts.items()
    )
    return f"products  {', '.join(parts)}"


def layout_text(job: Job) -> str:
    """The layout for the startup lines: `" (2 × 2: data 2, tensor 2, ZeRO 1)"`; empty for plain DP."""
    stage = job.engine.zero_optimization_stage()
    grid = job.engine.process_grid
    if grid.model_parallel_size == 1 and not stage:
        return ""
    return f" ({grid}" + (f", ZeRO {stage})" if stage else ")")


def zero_rate_warning(job: Job) -> str | None:
    """A warning if the schedule gives the first step a learning rate of 0; otherwise None."""
    scheduler = job.config.parts.deepspeed.get("scheduler")
    rates = [learning_rate(group) for group in job.engine.optimizer.param_groups]
    if job.step or scheduler is None or any(rates):
        return None
    kind = scheduler["type"]
    is_warm_up = kind in WARM_UPS and not (scheduler.get("params") or {}).get(WARM_UPS[kind])
    if kind == "WarmupCosineLR" and not is_warm_up:
        return (
            f"step 1 has no effect: {kind} always gives it a learning rate of 0; to avoid that, use "
            "WarmupDecayLR with warmup_min_lr above 0"
        )
    first = "steps 1 and 2 have no effect" if is_warm_up else "step 1 has no effect"
    remedy = REMEDIES.get(kind, "start the schedule above 0")
    return f"{first}: {kind} gives a learning rate of 0; {remedy}"


def startup_lines(job: Job, identity: ProcessIdentity, *, is_resumed: bool, changes: list[str]) -> str:
    """The lines printed before the first step; `changes` are the settings that a resumed run changed."""
    data = job.config.settings.data
    packing, padding = data.describe_packing(), job.loader.dataset.padding_share
    packing += f" ({padding:.2%} padding)" if padding else ""
    tokens = data.sequence_length * job.loader.num_samples
    epochs = job.config.settings.run.steps * job.tokens_per_step / tokens
    # sources of a blend are read differently often; `source_losses` has a line for each
    often = "" if job.source_losses is not None else f", read {epochs:.3g} times in the whole run"
    return "\n".join(
        [
            f"run       {job.folder.path}" + (f", resumed after step {job.step}" if is_resumed else ""),
            *job_lines(
                job,
                identity,
                f"{data.corpus}, {job.loader.num_samples:,} sequences of {data.sequence_length} tokens "
                f"({job.loader.tokenizer.name})" + (f", {packing}" if packing else "") + often,
            ),
            *([f"advice    {advice}"] if (advice := recipe_advice(job.config)) and not is_resumed else []),
            *([f"schedule  {warning}"] if (warning := zero_rate_warning(job)) is not None else []),
            *(f"changed   {change}" for change in changes),
            "",
        ]
    )


def job_lines(job: Job, identity: ProcessIdentity, data: str) -> list[str]:
    """Lines that describe model, recipe, data and components."""
    count = num_parameters(job)
    report = job.report
    return [
        f"model     {job.engine.module.config.model_type}, {count:,} parameters, "
        f"{job.config.parts.settings.precision}",
        f"recipe    {job.recipe.name}: {counted(len(report.swapped), 'layer')} converted, "
        f"{len(report.kept)} kept{_of_another_family(job)}",
        *([f"kernels   {describe_kernels(job.recipe, job.engine.device)}"] if report.swapped else []),
        f"data      {data}",
        f"batch     {job.tokens_per_step:,} tokens per step on {identity.world_size} "
        f"process{'es' if identity.world_size > 1 else ''}" + layout_text(job),
        *filter(None, (component.startup_line() for component in job.components)),
    ]


def _of_another_family(job: Job) -> str:
    """What is said about layers that the recipe names and the model has not."""
    names = [each.name for each in job.report.swapped] + [each.name for each in job.report.kept]
    if job.recipe.is_for_others(names):
        return (
            f"; its special layers are of other families, {ROTARY_RECIPE} is for this one (docs/recipes.md)"
        )
    return "; keep_if_present names none of them" if job.report.unmatched else ""


def num_parameters(job: Job) -> int:
    """Parameters of the full model, of all pipeline stages and tensor-parallel ranks."""
    count = sum(map(full_numel, job.engine.module.parameters()))
    return int(getattr(job.engine.module, "num_parameters_of_all_stages", count))


def skip_line(step: int, report: StepReport, loss_scale: float, *, verb: str = "skipped") -> str | None:
    """`step 7 skipped: overflow in … on rank 5; loss scale 2^16 → 2^15`; None if the update was applied.

    Args:
        step: counted from 1.
        report: of this step, or of one attempt at it.
        loss_scale: for the next step or attempt.
        verb: what happened to the step.
    """
    if report.is_applied:
        return None
    where = str(report.overflow) if report.overflow is not None else "gradients were not finite"
    change = ""
    if loss_scale != report.loss_scale:
        change = f"; loss scale {scale_text(report.loss_scale)} → {scale_text(loss_scale)}"
    return f"step {step} {verb}: {where}{change}"


def splits_line(counts: Mapping[str, int]) -> str | None:
    """How often this process's splits computed or reused their factors, on one line; `None` if never."""
    shown = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return f"splits    {', '.join(shown)}" if shown else None
