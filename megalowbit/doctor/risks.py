"""Settings that a run may regret, each with the reason.

Every rule has a source: a page of docs/, a paper, or what the code does. What no run can use is not here: the
configuration's own checks refuse it. Not covered: whether the learning rate suits the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalowbit.cluster.intervals import daly_interval
from megalowbit.doctor.fits import save_seconds
from megalowbit.doctor.notices import Notice, note, problem, warning
from megalowbit.doctor.plan import RunPlan, setting
from megalowbit.doctor.target import Target
from megalowbit.layers.settings import DEFAULT_RECIPE, ROTARY_RECIPE
from megalowbit.optim.loss_scale.constant import ConstantSettings
from megalowbit.pretrain.checks import recipe_advice
from megalowbit.telemetry.columns import clock_text
from megalowbit.values import counted

HOUR = 3600.0
# one node of Llama 3's 2,048 failed every 6,334 hours (arXiv:2407.21783, section 3.3.4; docs/scaling.md)
NODE_MTBF = 6334 * HOUR
UNSAVED = HOUR  # a run that takes longer should save
MANY_STEPS = 1000  # the same, if the time of a step is unknown
LEAST_LOST = 60.0  # seconds of a run that are worth a change
MOST_LOST = 0.05  # of the training time, by a save interval, before another is suggested
SLOW_BETA2 = 0.98  # language models are trained with 0.95 (arXiv:2005.14165, appendix B; 2302.13971)


def check_risks(
    plan: RunPlan, target: Target, seconds: float | None, disk: float | None = None
) -> list[Notice]:
    """Notices about settings.

    Args:
        plan: the run.
        target: where it is to run.
        seconds: of the whole run; None: unknown.
        disk: bytes/s of the run folder's file system from all hosts together; None: unknown.
    """
    return [
        *_precision(plan),
        *_recipe(plan),
        *_optimizer(plan),
        *_schedule(plan),
        *_checkpoints(plan, target, seconds, disk),
        *_supervision(plan, target, disk),
        *_layout(plan, target),
    ]


def _precision(plan: RunPlan) -> Iterator[Notice]:
    engine = plan.config.parts.settings
    if plan.precision == "fp16" and isinstance(engine.grad_scaler, ConstantSettings):
        yield warning(
            "fp16-constant-scale",
            f"fp16 with the constant loss scale {engine.grad_scaler.scale:g}: nothing lowers it after an "
            "overflow, and nothing raises it when gradients shrink and become zero",
            setting("megalowbit.grad_scaler.type", "dynamic") + ", or precision bf16, which needs no scale",
        )
    if not plan.config.parts.deepspeed["gradient_clipping"]:
        yield warning(
            "no-clipping",
            "gradient_clipping is 0: one step with a large gradient changes the weights without a bound",
            setting("gradient_clipping", "1.0"),
        )


def _recipe(plan: RunPlan) -> Iterator[Notice]:
    splits = [each.split_grad_output for each in plan.recipe.variants]
    for split in {each for each in splits if each is not None and each.gains != "none"}:
        yield warning(
            "gradient-gains",
            f'split_grad_output has gains "{split.gains}", which multiply in each layer that the gradient '
            "passes; losses of small models leapt with them (docs/spectral.md)",
            "watch grad_norm in a short run, or leave gains out",
        )
    given = plan.config.recipe  # the other fields of a block stay, but layers would replace those of the base
    key = "recipe.base" if isinstance(given, dict) and "layers" not in given else "recipe"
    if plan.recipe.is_for_others(each.layer for each in plan.projections):
        yield warning(
            "default-of-another-family",
            f"all layers that {plan.recipe.name} gives a recipe of their own are of other model families, so "
            "the loss at the end stays further above that of bf16 (docs/experiments/loss.md)",
            f"--set megalowbit.{key}={ROTARY_RECIPE}",
        )
    advice = recipe_advice(plan.config)
    if advice is None:
        return
    reason = ""
    if plan.recipe.name == DEFAULT_RECIPE:
        reason = ": without it, the loss at the end stays above that of bf16 (docs/experiments/loss.md)"
    yield warning(
        "recipe-section-off", f"{advice}{reason}", "add the section, or set it to null to leave it off"
    )


def _optimizer(plan: RunPlan) -> Iterator[Notice]:
    betas = plan.config.parts.deepspeed["optimizer"]["params"].get("betas")
    if betas is not None and betas[1] > SLOW_BETA2:
        yield warning(
            "beta2",
            f"optimizer.params.betas has β₂ = {betas[1]:g}: the second moment averages "
            f"{1 / (1 - betas[1]):,.0f} steps and follows a sudden large gradient late. GPT-3 and LLaMA were "
            "trained with 0.95",
            f"--set 'optimizer.params.betas=[{betas[0]:g}, 0.95]'",
        )


def warmup_steps(plan: RunPlan) -> int | None:
    """Steps of warm-up; None: the schedule is torch's, which is not read here."""
    schedule = plan.config.parts.settings.lr_schedule
    if schedule is not None:
        return schedule.warmup_steps
    stock = plan.config.parts.deepspeed.get("scheduler")
    if stock is None:
        return 0
    found = stock.get("params", {}).get("warmup_num_steps")
    return found if isinstance(found, int) else None


def _schedule(plan: RunPlan) -> Iterator[Notice]:
    deepspeed, schedule = plan.config.parts.deepspeed, plan.config.parts.settings.lr_schedule
    if schedule is None and deepspeed.get("scheduler") is None:
        yield warning(
            "no-schedule",
            "the learning rate is constant, without warm-up and decay: most of what a decay gains at the end "
            "of a run is lost (docs/schedules.md)",
            f"""--set 'megalowbit.lr_schedule={{"type": "cosine", "warmup_steps": {_needed(plan)}}}'""",
        )
        return
    found, needed = warmup_steps(plan), _needed(plan)
    if found is not None and found < needed and deepspeed["optimizer"]["type"].lower().startswith("adam"):
        yield warning(
            "warmup",
            f"a warm-up of {found} steps is shorter than 2 / (1 − β₂) = {needed}: until then Adam's second "
            "moment has not settled (Ma and Yarats, arXiv:1910.04209)",
            setting("megalowbit.lr_schedule.warmup_steps", needed) if schedule is not None else "lengthen it",
        )
    is_long = found is not None and found > plan.steps
    if is_long:
        yield warning(
            "schedule-length",
            f"the warm-up of {found:,} steps is longer than the run's {plan.steps:,}: it ends before its "
            "full learning rate",
            setting("megalowbit.lr_schedule.warmup_steps", needed) if schedule is not None else "shorten it",
        )
    total = getattr(schedule, "total_steps", None)
    is_auto = is_long and total == found  # see `auto_total_steps`
    if total is not None and total != plan.steps and not is_auto:
        when = "before" if total < plan.steps else "after"
        yield warning(
            "schedule-length",
            f"the schedule ends at step {total:,}, {when} the run's {plan.steps:,} steps"
            + ("" if total < plan.steps else ": the decay is cut off"),
            f"leave out lr_schedule.total_steps, or set it to {plan.steps}",
        )


def _needed(plan: RunPlan) -> int:
    betas = plan.config.parts.deepspeed["optimizer"]["params"].get("betas") or (0.9, 0.95)
    return min(math.ceil(2 / (1 - betas[1]) - 1e-9), plan.steps)


def _checkpoints(
    plan: RunPlan, target: Target, seconds: float | None, disk: float | None
) -> Iterator[Notice]:
    every, hosts = plan.config.settings.checkpoint.every, target.hosts(plan.processes)
    is_long = plan.steps >= MANY_STEPS if seconds is None else seconds > UNSAVED
    if seconds is None:
        if not every and is_long:
            yield _never_saved(f"{plan.steps:,} steps", hosts, setting_of=plan.steps // 20)
        return
    step, mtbf = seconds / plan.steps, NODE_MTBF / hosts
    save = save_seconds(plan, disk)
    best = max(1, round(daly_interval(save, mtbf) / step))
    if not every:
        if is_long:
            yield _never_saved(clock_text(seconds), hosts, setting_of=min(best, plan.steps))
        return
    interval = min(every, plan.steps) * step
    lost = save / interval + interval / 2 / mtbf  # saves, and work since the last one
    least = save / (best * step) + best * step / 2 / mtbf
    if lost > MOST_LOST and lost > 1.5 * least and lost * seconds > LEAST_LOST:
        how_long = clock_text(interval) if interval >= 10 else f"{interval:.2g} s"
        yield warning(
            "checkpoint-interval",
            f"a checkpoint every {counted(every, 'step')} ({how_long}) costs about {lost:.0%} of the "
            f"time: a save takes some {save:,.1f} s, and {hosts} host{'s fail' if hosts > 1 else ' fails'} "
            f"every {clock_text(mtbf)} at Llama 3's rate",
            f"{setting('megalowbit.checkpoint.every', min(best, plan.steps))} (docs/scaling.md; megalowbit "
            "goodput simulates it)",
        )


def _never_saved(how_long: str, hosts: int, setting_of: int) -> Notice:
    is_sure = hosts > 1  # a job of several hosts usually has a time limit, and more that fails
    make = problem if is_sure else warning
    return make(
        "no-checkpoints",
        f"checkpoint.every is 0, so the run of {how_long} saves only after its last step: a failure, or a "
        "time limit that gives no signal, loses all of it",
        setting("megalowbit.checkpoint.every", max(1, setting_of)),
    )


def _supervision(plan: RunPlan, target: Target, disk: float | None) -> Iterator[Notice]:
    watchdog, hosts = plan.config.parts.settings.watchdog, target.hosts(plan.processes)
    if plan.processes == 1:
        return
    if watchdog.timeout is None:
        make = problem if hosts > 1 else warning
        yield make(
            "watchdog-off",
            f"watchdog.timeout is null: if one of {plan.processes} ranks hangs, the others wait for 30 "
            "minutes or for ever, and no rank is named (docs/faults.md)",
            setting("megalowbit.watchdog.timeout", 600),
        )
        return
    if watchdog.silence is None:
        yield warning(
            "watchdog-silence",
            "watchdog.silence is null: NCCL does not notice that a rank is gone, so a lost one ends the run "
            f"only after watchdog.timeout ({watchdog.timeout:g} s)",
            setting("megalowbit.watchdog.silence", 15),
        )
    save = save_seconds(plan, disk)
    if save > watchdog.timeout:
        yield problem(
            "watchdog-save",
            f"a save takes some {save:,.1f} s, more than watchdog.timeout ({watchdog.timeout:g} s), "
            "which would end the run during its first one",
            setting("megalowbit.watchdog.timeout", math.ceil(2 * save)),
        )


def _layout(plan: RunPlan, target: Target) -> Iterator[Notice]:
    size = plan.config.grid.tensor_size
    if size > target.domain and not target.is_cpu:
        yield warning(
            "tensor-parallel-network",
            f"tensor parallelism over {size} ranks, and {target.domain} devices share a fast link: four sums "
            "of activations in each block and micro-batch go over the network",
            setting("tensor_parallel.autotp_size", target.domain),
        )
    if plan.config.settings.run.deterministic and not target.is_cpu:
        yield note(
            "deterministic",
            "run.deterministic takes slower kernels on GPUs; no time below includes that",
        )
