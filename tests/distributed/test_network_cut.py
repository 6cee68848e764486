"""The link between two machines goes down during training: both sides end in time with the right diagnosis.

Each rank has a network namespace and a host name of its own; a pair of virtual interfaces joins them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT = 8.0
CASE = {"kind": "0", "fault": "stay", "victims": [], "size": 2, "timeout": TIMEOUT}
ENTER = """
hostname "$NAME"
mount --bind "$RESULTS/resolv.conf" /etc/resolv.conf
exec "$@"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
        reason="makes network namespaces, which needs root, ip, unshare and nsenter",
    ),
]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_machines():
    """Names of two network namespaces with addresses 10.77.0.1 and 10.77.0.2 on `eth0`."""
    names = [f"mlb{uuid.uuid4().hex[:6]}n{number}" for number in (1, 2)]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def start(namespace, rank, folder):
    env = {
        **os.environ, "NAME": f"machine{rank}", "RESULTS": str(folder),
        "PYTHONPATH": f"{ROOT}:{HERE}:{ROOT}/tests/launch:{ROOT}/tests/families",
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    program = [sys.executable, str(HERE / "ranks_watchdog.py"), json.dumps(CASE)]
    command = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount"]
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(
            [*command, "sh", "-ec", ENTER, "sh", *program], env=env, stdout=log, stderr=subprocess.STDOUT
        )


def test_both_sides_of_a_network_cut_end_in_time_with_the_right_diagnosis(two_machines, tmp_path):
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    processes = [start(name, rank, tmp_path) for rank, name in enumerate(two_machines)]
    logs = [tmp_path / f"rank{rank}.log" for rank in (0, 1)]
    try:
        wait_for_training(processes, tmp_path)
        ip("-n", two_machines[1], "link", "set", "eth0", "down")
        cut = time.monotonic()
        codes = [process.wait(max(0.1, cut + 1.5 * TIMEOUT - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [log.read_text() for log in logs]
    assert codes == [75, 75], outputs
    here, there = ([line for line in text.splitlines() if line.startswith("error")] for text in outputs)
    assert len(here) == len(there) == 1, outputs
    assert "rank 1 (host machine1) does not answer: silent since step " in here[0]
    assert "rank 0 (host machine0) waited " in here[0]
    assert " s in all_reduce (deepspeed/runtime/" in here[0]
    assert "the main process (rank 0, at 10.77.0.1:29500) cannot be reached" in there[0]
    assert "this machine (host machine1) or that one is down or cut off the network" in there[0]
    assert "rank 1 (host machine1) waited " in there[0]
    assert not any("Traceback" in text or "gloo" in text for text in outputs), outputs


def wait_for_training(processes, folder):
    end = time.monotonic() + 120
    while len(list(folder.glob("ready*"))) < 2:
        assert all(process.poll() is None for process in processes), (folder / "rank0.log").read_text()
        assert time.monotonic() < end, "no progress"
        time.sleep(0.05)
