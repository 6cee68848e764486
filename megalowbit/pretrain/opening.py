"""What a run says of itself before its first step and after its last: plain text, one fact a line."""

from __future__ import annotations

from megalowbit.engine.whole_weights import whole_numel
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.kernels import describe_kernels
from megalowbit.pretrain.speculation import describe_speculation
from megalowbit.process_group import ProcessIdentity


def products_line(counts: dict[str, dict[str, int]]) -> str:
    """What low-bit products ran in, on one line: `{"output": {"fp8": 3}}` → "output 3 fp8"."""
    parts = (
        f"{product} " + " + ".join(f"{count:,} {path}" for path, count in sorted(paths.items()))
        for product, paths in counts.items()
    )
    return f"products  {', '.join(parts)}"


def cut(job: Job) -> str:
    """How the job is cut, for the opening: `" (2 × 2: data 2, tensor 2, ZeRO 1)"`; empty if it is not."""
    stage = job.engine.zero_optimization_stage()
    grid = job.engine.process_grid
    if grid.model_parallel_size == 1 and not stage:
        return ""
    return f" ({grid}" + (f", ZeRO {stage})" if stage else ")")


def opening(job: Job, identity: ProcessIdentity, *, is_resumed: bool, changes: list[str]) -> str:
    """What a run says before its first step; `changes` are settings that a resumed run changed."""
    count = sum(map(whole_numel, job.engine.module.parameters()))
    count = getattr(job.engine.module, "num_parameters_of_all_stages", count)
    settings, report = job.config.settings, job.report
    return "\n".join(
        [
            f"run       {job.folder.path}" + (f", resumed after step {job.step}" if is_resumed else ""),
            f"model     {job.engine.module.config.model_type}, {count:,} parameters, "
            f"{job.config.parts.settings.precision}",
            f"recipe    {job.recipe.name}: {len(report.swapped)} layers swapped, {len(report.kept)} kept",
            *([f"kernels   {describe_kernels(job.recipe, job.engine.device)}"] if report.swapped else []),
            f"data      {settings.data.corpus}, {job.loader.num_samples:,} sequences of "
            f"{settings.data.sequence_length} tokens ({job.loader.tokenizer.name})",
            f"batch     {job.tokens_per_step:,} tokens a step on {identity.world_size} "
            f"process{'es' if identity.world_size > 1 else ''}" + cut(job),
            *([f"switch    {job.late_switch}"] if job.late_switch is not None else []),
            *([f"ladder    {describe_speculation(settings.speculation)}"] if settings.speculation else []),
            *(f"changed   {change}" for change in changes),
            "",
        ]
    )
