"""Two ranks, of which one has data whose loss is NaN; see test_roll_back.py.

`ranks_roll_back.py CONFIG FOLDER kill`: a whole run in FOLDER/whole, then one in FOLDER/killed, all of whose
processes are gone after its rollback. `… resume`: goes on with that one.
"""

import math
import os
import signal
import sys
from pathlib import Path

from megalowbit.distributed.process_group import identify
from megalowbit.pretrain import run
from megalowbit.pretrain.config import load_config

BAD, KILLED_AT = {6, 7}, 6


def assembled_with(spoil, assemble=run.assemble):
    def assembled(*arguments, **named):
        job = assemble(*arguments, **named)
        job.engine.module.register_forward_hook(lambda module, inputs, output: spoil(job, output))
        return job

    return assembled


def main(config, folder, mode):
    identity = identify()
    config = load_config(Path(config), [], world_size=identity.world_size)

    def train(name, *, is_killed=False):
        def spoil(job, output):
            samples = job.loader.samples_per_batch * job.accumulation_steps
            batch = (job.loader.position - 1) // samples + 1
            if identity.rank == 1 and batch in BAD:
                output.loss = output.loss * math.nan
            if is_killed and job.loss_guard.rollbacks and job.step + 1 == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)

        run.assemble = assembled_with(spoil)
        run.pretrain(config, identity, run_dir=Path(folder) / name, is_resume=True)

    if mode == "kill":
        train("whole")
        train("killed", is_killed=True)
    train("killed")
    (Path(os.environ["RESULTS"]) / f"rank{identity.rank}.json").write_text("{}")


if __name__ == "__main__":
    main(*sys.argv[1:])
