"""The command line of pretraining with other options on each rank; see test_run_checks.py."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megalowbit.engine.process_start import stop_process_group
from megalowbit.pretrain.command_line import main

PATIENCE = 30  # seconds

rank = int(os.environ["RANK"])
code = main(["--ds-config", sys.argv[1], *sys.argv[2 + rank].split()])
print("left the group:", not dist.is_initialized())
# another group, which rank 1 does not leave: rank 0 must not wait for it
dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=2)
start = time.monotonic()
if rank == 0:
    stop_process_group(timedelta(seconds=1))
    print("did not wait for rank 1:", time.monotonic() - start < PATIENCE / 2)
    Path("left").touch()
else:
    while not Path("left").exists() and time.monotonic() - start < PATIENCE:
        time.sleep(0.05)
sys.stdout.flush()
os._exit(code)
