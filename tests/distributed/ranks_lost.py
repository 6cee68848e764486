"""Rank 1 does not come to a collective outside the watchdog's care; rank 0 prints the outcome."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
from megalowbit.pretrain.run import report_lost_ranks
from megalowbit.supervision.timeouts import set_group_timeouts

identity = start_process_group()
set_group_timeouts(timedelta(seconds=2))


def outcome(work):
    try:
        with report_lost_ranks(identity):
            work()
    except (UserError, RuntimeError) as error:
        return [type(error).__name__, str(error)]


def report(seen):
    """As all programs here, but without leaving together, which would wait for the other rank."""
    Path(os.environ["RESULTS"], f"rank{identity.rank}.json").write_text(json.dumps(seen))


def fail(error):
    raise error


if identity.rank == 1:
    report({})
    while not Path(os.environ["RESULTS"], "rank0.json").exists():
        time.sleep(0.05)
else:
    report(
        {
            "defect": outcome(lambda: fail(RuntimeError("odd"))),
            "mistake": outcome(lambda: fail(UserError("mend it"))),
            "lost": outcome(lambda: dist.all_reduce(torch.zeros(1))),
        }
    )
os._exit(0)  # the group is broken
