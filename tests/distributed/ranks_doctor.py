"""One of two ranks, each of which takes itself for a host; the clock of the second one is 7 s ahead."""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from megalowbit.distributed.agreement import gather
from megalowbit.doctor import disk, machine, network
from megalowbit.doctor.examine import Request, examine, look_around
from megalowbit.doctor.hosts import sees_marks
from megalowbit.engine.process_start import start_process_group, stop_process_group
from megalowbit.pretrain.config import load_config

AHEAD = 7.0
config, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
start_process_group(timeout=timedelta(seconds=60), checks_versions=False)
socket.gethostname = lambda: f"n{rank}"
clock = SimpleNamespace(perf_counter=time.perf_counter, time=lambda: time.time() + AHEAD * rank)
network.time = clock
network.SIZES, disk.MOST_BYTES = (2**16, 2**20), disk.CHUNK
if rank:
    machine.driver_version = lambda: "1.2.3"

request = Request(config=load_config(config, [], world_size=2), folder=folder / "shared")
around = look_around(request)
own = folder / f"of-rank-{rank}"
own.mkdir()
apart = sees_marks(own)
found = examine(request, around) if rank == 0 else None
gather(None)  # both have removed their marks
result = {
    "hosts": [[host.name, host.ranks] for host in around.hosts],
    "network": around.network.to_dict(),
    "findings": [each.to_dict() for each in around.notices],
    "apart": apart,
    "of_run": None if found is None else [each.code for each in found.notices],
    "devices_of_host": None if found is None else found.target.devices_of_host,
    "left": gather(sorted(map(str, folder.rglob(".megalowbit*")))),
}
(Path(os.environ["RESULTS"]) / f"rank{rank}.json").write_text(json.dumps(result))
stop_process_group()
