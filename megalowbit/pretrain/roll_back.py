"""A run goes back to a checkpoint from before its loss was in trouble, and leaves out the data it met since.

Within the process, on all ranks together: everything that a resumed run takes from a checkpoint is taken from
it, but for the data position, which stays where it is. The run then is bitwise the one that would be resumed
from that checkpoint further on in the data. Records and checkpoints of later steps are dropped, for these
steps come again.

A kill afterwards loses nothing of this: until the next checkpoint the resumed run goes the same way into the
same trouble and back. To keep it so whatever else has been saved, as on request before a time limit, a
checkpoint of the run's own rhythm (`checkpoint.every`) is taken first.
Not covered: settings that were changed in between.
"""

from __future__ import annotations

from pathlib import Path

from megalowbit.distributed.agreement import raised_on_all_ranks
from megalowbit.pretrain.components.loss_guard import Verdict
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.records.recorder import Recorder


def guard_loss(job: Job, recorder: Recorder, *, is_skipped: bool) -> bool:
    """Let the guard judge the step just taken, and do what it asks; every rank must call it.

    Args:
        job: the run.
        recorder: of it; the step is recorded.
        is_skipped: whether the step's update was left out.

    Returns:
        Whether the run has gone back.

    Raises:
        UserError: it cannot go on.
    """
    loss = job.totals.final_loss
    assert loss is not None  # a step was taken
    verdict = job.loss_guard.after_step(job.step, loss, is_skipped=is_skipped)
    if verdict.action == "stop":
        raise raised_on_all_ranks(f"{verdict.line}")
    if verdict.action == "roll back":
        roll_back(job, recorder, verdict)
        return True
    recorder.tell(verdict.line)
    return False


def roll_back(job: Job, recorder: Recorder, verdict: Verdict) -> None:
    """Go back as the guard's verdict asks; every rank must call it, between two steps.

    Raises:
        UserError: there is no good checkpoint to go back to.
    """
    assert verdict.since is not None  # whoever rolls back knows from what
    path = _checkpoint_before(job, verdict.since)
    if path is None:
        raise raised_on_all_ranks(
            f"{verdict.line}: there is no checkpoint from before step {verdict.since} to roll back to; train "
            "anew with a lower learning rate or other data, or lower megalowbit.checkpoint.every"
        )
    guard, step, position = job.loss_guard, job.step, job.loader.state_dict()
    made = list(guard.rollbacks)
    job.load(path)
    job.loader.load_state_dict(position)
    guard.rollbacks = [*made, {"after_step": step, "to_step": job.step, "reason": verdict.line}]
    job.store.remove_after(job.step)
    recorder.go_back()
    recorder.tell(
        f"rolled back after step {step} to step {job.step} ({verdict.line}): training goes on with the data "
        f"that come next; rollback {len(guard.rollbacks)} of {guard.settings.max_rollbacks}"
    )


def _checkpoint_before(job: Job, since: int) -> Path | None:
    """The newest good checkpoint from before a step, one of the run's own rhythm if there is any."""
    for until in dict.fromkeys((job.loss_guard.newest_refuge(since), since - 1)):
        for every in (job.checkpoint_every, 1):
            path = job.store.latest(until=until, every=every)
            if path is not None:
                return path
    return None
