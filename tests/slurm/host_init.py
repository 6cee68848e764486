"""First process of a host in namespaces: makes it a machine of its own, says so, then waits for its end.

    host_init.py NAME FOLDER

Its standard input is a pipe that the test holds. When the test closes it or dies, however it dies, this
process ends, and with it everything that runs on the host: the kernel ends all processes of a pid namespace
whose first one is gone, and mounts and network interfaces go with the last of them. FOLDER/files mirrors the
files that the host sees instead of the machine's own.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    socket.sethostname(name)
    files = folder / "files"
    for path in sorted(p for p in files.rglob("*") if p.is_file()):
        subprocess.run(["mount", "--bind", path, Path("/") / path.relative_to(files)], check=True)
    for place in ("/dev/shm", "/run"):  # what two machines do not share, and programs expect to own
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", place], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGCHLD, reap)
    os.write(1, b"ready\n")
    os.close(1)
    while os.read(0, 1):
        pass


def reap(_number, _frame) -> None:
    """Daemons are nobody's children but ours."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


main()
