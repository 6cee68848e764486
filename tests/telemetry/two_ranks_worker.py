"""One of two ranks of a gloo job: does a scenario with a tracker and prints what it saw as JSON."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker
from megalowbit.telemetry.step_facts import reduce_step_facts


def observe(tracker, layer, role, *counts, error=(1.0, 100.0)):
    tracker.observe(layer, role, torch.tensor(counts), torch.tensor(error, dtype=torch.float64))


def table(tracker):
    return [[row.layer, row.role, asdict(row.counts)] for row in tracker.reduce_layers()]


def unlike_layers(rank):
    """Rank 0 meets a then b; rank 1 meets c then b; weights only on rank 1."""
    tracker = GradientOverflowTracker()
    first = "ac"[rank]
    observe(tracker, first, "grad_output", 16, 1 + rank, 2, 3, 0, 1, 0, 0)
    observe(tracker, "b", "grad_output", 32, 10 * rank, 4, 5, 0, 2, 0, 0, error=(0.5, 8.0))
    if rank == 1:
        observe(tracker, "b", "weight", 64, 0, 0, 0, 0, 4, 0, 1)
    step = tracker.end_step()
    return {"facts": step.facts(), "table": table(tracker), "again": table(tracker)}


def one_small_all_reduce(rank):
    """Counts the collectives of a step and their bytes."""
    sizes = []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    tracker = GradientOverflowTracker()
    for layer in range(50):
        observe(tracker, f"layer{layer}", "grad_output", 2**40, 1 + rank, 0, 0, 0, 1, 0, 0)
    facts = reduce_step_facts(torch.tensor([2.0, 5.0][rank]), weight=[3, 1][rank], tracker=tracker)
    return {"sizes": sizes, "loss": facts.loss, "facts": facts.overflow.facts()}


def one_rank_is_asked_to_stop(rank):
    """Twice with a tracker, whose counts must stay exact, and twice without."""
    seen = []
    for is_asked in (False, rank == 1):
        tracker = GradientOverflowTracker()
        observe(tracker, "a", "grad_output", 2**40, 3, 0, 0, 0, 1, 0, 0)
        for each in (tracker, None):
            facts = reduce_step_facts(torch.tensor(2.0), tracker=each, is_stop_asked=is_asked)
            overflows = None if each is None else facts.overflow.step.quantizations_with_overflow
            seen.append([facts.is_stop_asked, facts.loss, overflows])
    return seen


def nan_loss_on_one_rank(rank):
    facts = reduce_step_facts(torch.tensor([2.0, float("nan")][rank]))
    return {"loss": repr(facts.loss)}


def one_rank_has_no_loss(rank):
    """As the first stage of a pipeline."""
    losses = ([0.0, 5.0], [0.0, float("nan")])
    return [repr(reduce_step_facts(torch.tensor(each[rank]), weight=rank).loss) for each in losses]


def nothing_seen_on_one_rank(rank):
    tracker = GradientOverflowTracker()
    if rank == 1:
        observe(tracker, "late stage", "input", 16, 1, 1, 1, 0, 1, 0, 0)
    tracker.end_step()
    return {"table": table(tracker)}


def resume_on_two_ranks(rank):
    """Saves on two ranks and loads the same state on both: totals must not double."""
    tracker = GradientOverflowTracker()
    observe(tracker, "a", "grad_output", 16, 1, 1, 1, 0, 1, 0, 0)
    tracker.end_step()
    state = tracker.state_dict()
    resumed = GradientOverflowTracker()
    resumed.load_state_dict(state)
    observe(resumed, "a", "grad_output", 16, 2, 2, 2, 0, 1, 0, 0)
    step = resumed.end_step()
    return {"state": state, "run": asdict(step.run), "table": table(resumed)}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        unlike_layers,
        one_small_all_reduce,
        one_rank_is_asked_to_stop,
        nan_loss_on_one_rank,
        one_rank_has_no_loss,
        nothing_seen_on_one_rank,
        resume_on_two_ranks,
    )
}


def main():
    name, rank, rendezvous = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    print(json.dumps(SCENARIOS[name](rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
