"""Records every collective and transfer of forked ranks, DeepSpeed's too, and compares the ranks.

`install` is a hook of forks.py. It wraps the methods of torch's ProcessGroup, which all of torch's functions
call, holds each tensor against what NCCL accepts, and at the end of the process writes the calls to the file
that the variable `COLLECTIVES` names. A process that ends by `os._exit` or a signal writes nothing.

Over gloo, ranks that issue different operations, or asynchronous ones in different order, may go on with
wrong numbers; over NCCL they hang. `problems` finds these differences. An order of calls that would only work
because some are asynchronous counts as a difference too.
"""

import atexit
import json
import os
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

FILE = "COLLECTIVES"  # the variable
# Of each method, the argument whose types and sizes all ranks share: outputs come first, inputs second.
SHARED = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv"), 0),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "scatter"), 0),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), 0),
    **dict.fromkeys(
        ("allgather", "_allgather_base", "all_gather_single", "gather", "allgather_coalesced"), 1
    ),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), 1),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), None),  # sizes may differ
    **dict.fromkeys(("barrier", "monitored_barrier"), None),
}
TRANSFERS = ("send", "recv")
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# files between a collective and the code that wants it
PLUMBING = ("/torch/", "/deepspeed/comm/", "/deepspeed/utils/", "contextlib.py", "/megalowbit/distributed/")


def install():
    """Record the calls of this process from now on, and write them when it ends."""
    from torch._C._distributed_c10d import ProcessGroup

    path, process = Path(os.environ[FILE]), os.getpid()
    record = {"rank": 0, "calls": [], "refused": []}
    for name, place in SHARED.items():
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, _recording(getattr(ProcessGroup, name), name, place, record))

    def write():
        if os.getpid() == process:
            with suppress(OSError):  # a full disk is another test's business
                path.write_text(json.dumps(record))

    atexit.register(write)


def _recording(original, name, place, record):
    import torch.distributed as dist

    from megalowbit.distributed.collectives import check
    from megalowbit.errors import UserError

    def recorded(group, *arguments, **named):
        ranks = dist.get_process_group_ranks(group)
        options = [each for each in (*arguments, *named.values()) if type(each).__name__.endswith("Options")]
        op = next((_operation(each) for each in options if hasattr(each, "reduceOp")), None)
        where = _where(sys._getframe(1))
        try:
            for each in _tensors(arguments):
                check(name, each, group, None if op is None else getattr(dist.ReduceOp, op))
        except UserError as error:
            record["refused"].append(f"{error} ({where})")
        shared = [] if place is None else list(_tensors(arguments[place]))
        root = next((each.rootRank for each in options if hasattr(each, "rootRank")), None)
        record["rank"] = dist.get_rank()
        record["calls"].append(
            {
                "group": f"{group.group_name} of ranks {ranks}",
                "ranks": ranks,
                "kind": name,
                "what": [op, root, [[str(each.dtype), each.numel()] for each in shared]],
                "peer": ranks[arguments[1]] if name in TRANSFERS else None,
                "where": where,
            }
        )
        return original(group, *arguments, **named)

    return recorded


def _operation(options):
    import torch.distributed as dist

    return next(name for name in OPERATIONS if options.reduceOp == getattr(dist.ReduceOp, name))


def _tensors(value):
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _where(frame):
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not any(part in file for part in PLUMBING):
            return f"{'/'.join(Path(file).parts[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def read(paths):
    """The records of all ranks of a run, by rank; empty if a rank has written none."""
    paths, records = list(paths), []
    for path in paths:
        with suppress(FileNotFoundError):
            records.append(json.loads(Path(path).read_text()))
    return sorted(records, key=lambda each: each["rank"]) if len(records) == len(paths) else []


def problems(records):
    """What would fail or hang on GPUs, one line each; the records of all ranks, by rank."""
    found = sorted({line for record in records for line in record["refused"]})
    found += [*_different_collectives(records), *_different_transfers(records)]
    return found or _without_an_order(records)


def _different_collectives(records):
    issued = defaultdict(lambda: defaultdict(list))  # by group and rank
    members = {}
    for rank, record in enumerate(records):
        for call in record["calls"]:
            members[call["group"]] = call["ranks"]
            if call["peer"] is None:
                issued[call["group"]][rank].append(call)
    for group, ranks in members.items():
        first = issued[group][ranks[0]]
        for rank in ranks[1:]:
            yield from _first_difference(f"group {group}", ranks[0], first, rank, issued[group][rank])


def _different_transfers(records):
    issued = defaultdict(lambda: {"send": [], "recv": []})  # by group, sender and receiver
    for rank, record in enumerate(records):
        for call in record["calls"]:
            if call["peer"] is not None:
                ends = (rank, call["peer"]) if call["kind"] == "send" else (call["peer"], rank)
                issued[call["group"], ends][call["kind"]].append({**call, "kind": "transfer"})
    for (group, (sender, receiver)), both in issued.items():
        where = f"from rank {sender} to rank {receiver} in group {group}"
        yield from _first_difference(where, sender, both["send"], receiver, both["recv"])


def _first_difference(where, rank, calls, other_rank, other_calls):
    for number, (one, other) in enumerate(zip(calls, other_calls, strict=False)):
        if (one["kind"], one["what"]) != (other["kind"], other["what"]):
            yield f"{where}, call {number}: rank {rank} {_text(one)}, rank {other_rank} {_text(other)}"
            return
    if len(calls) != len(other_calls):
        longer, more = (rank, calls) if len(calls) > len(other_calls) else (other_rank, other_calls)
        number = min(len(calls), len(other_calls))
        yield f"{where}, call {number}: rank {longer} alone {_text(more[number])}"


def _text(call):
    return f"{call['kind']} {call['what']} in {call['where']}"


def _without_an_order(records):
    """Where the ranks would come to a halt if each call waited for the others, although groups agree."""
    calls = [_events(rank, record["calls"]) for rank, record in enumerate(records)]
    positions, arrived = [0] * len(records), defaultdict(set)
    running = list(range(len(records)))
    while running:
        rank = running.pop()
        if positions[rank] == len(calls[rank]):
            continue
        event, ranks = calls[rank][positions[rank]]
        arrived[event].add(rank)
        if arrived[event] == set(ranks):
            for each in ranks:
                positions[each] += 1
            running += ranks
    waiting = [
        f"rank {rank} {_text(record['calls'][position])}"
        for rank, (record, position) in enumerate(zip(records, positions, strict=True))
        if position < len(record["calls"])
    ]
    return [f"no order of the groups suits all ranks: {', '.join(waiting)}"] if waiting else []


def _events(rank, calls):
    """For each call of a rank, a name that is the same on all ranks that take part in it, and these ranks."""
    counts, events = defaultdict(int), []
    for call in calls:
        ends = (rank, call["peer"]) if call["kind"] == "send" else (call["peer"], rank)
        name = (call["group"], None if call["peer"] is None else ends)
        events.append(((*name, counts[name]), call["ranks"] if call["peer"] is None else list(ends)))
        counts[name] += 1
    return events
