"""Hosts of a small network on one machine: each has its own name, address, processes and shared memory.

A host is a set of Linux namespaces (pid, network, host name, mounts, IPC) around `host_init.py`; files are
those of the machine, as on a cluster with a shared folder. The first host holds the switch, a bridge that the
others are plugged into. Nothing of it exists outside the namespaces but the pipes that this process holds:
addresses and ports of two networks cannot meet, and no host outlives the process that made it.

Needs root, `unshare` and `nsenter` (util-linux) and `ip` (iproute2).
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2"}
SECONDS_TO_START = 20


class Host:
    """One machine. `folder/files` holds what it sees in place of the machine's own files."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self._outer = None
        self.pid = None

    @property
    def is_on(self) -> bool:
        return self.pid is not None

    def start(self) -> None:
        """Make the namespaces; returns when the host has its name, files and loopback."""
        new = ["--pid", "--mount-proc", "--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
        first = [sys.executable, "-ISs", HERE / "host_init.py", self.name, self.folder]
        self._outer = subprocess.Popen(
            ["unshare", "--fork", "--kill-child", *new, *first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        seen, _, _ = select.select([self._outer.stdout], [], [], SECONDS_TO_START)
        if not seen or self._outer.stdout.readline() != b"ready\n":
            self._outer.kill()
            raise RuntimeError(f"host {self.name} did not start: {self._outer.stderr.read().decode()}")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def kill(self) -> None:
        """End all that runs on it at once."""
        if self._outer is None:
            return
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
        self._outer.wait()
        for pipe in (self._outer.stdin, self._outer.stdout, self._outer.stderr):
            pipe.close()
        self._outer = self.pid = None

    def inside(self, *arguments: object, cwd: Path | str = "/") -> list[str]:
        """The command line that runs `arguments` on this host."""
        if self.pid is None:
            raise RuntimeError(f"host {self.name} is off")
        spaces = ["--pid", "--net", "--uts", "--ipc", "--mount"]
        return ["nsenter", "-t", str(self.pid), *spaces, "env", f"--chdir={cwd}", *map(str, arguments)]

    def in_network(self, *arguments: object) -> None:
        """Run a program of this process's own, only with the host's network; raises if it fails."""
        command = ["nsenter", "-t", str(self.pid), "--net", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


class Network:
    """Hosts on one switch: `network["n1"]`. The first host holds the switch and cannot be cut off.

    Args:
        addresses: IPv4 address of every host by name; all in one /24.
        folder: where hosts find the files they see in place of the machine's own.
    """

    def __init__(self, addresses: dict[str, str], folder: Path) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        etc = folder / "files" / "etc"
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        # Nobody answers names that are not in it, and at once: torchrun looks up every peer's address.
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self._hosts = {name: Host(name, address, folder) for name, address in addresses.items()}
        self._switch = next(iter(self._hosts.values()))

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def start(self) -> None:
        self._switch.start()
        self._switch.in_network("ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        self._switch.in_network("ip", "addr", "add", f"{self._switch.address}/24", "dev", "switch")
        self._switch.in_network("ip", "link", "set", "switch", "up")
        for name in list(self._hosts)[1:]:
            self.power_on(name)

    def stop(self) -> None:
        for host in self._hosts.values():
            host.kill()

    def power_on(self, name: str) -> None:
        """Start a host and plug it in as `eth0`."""
        host, plug = self._hosts[name], f"to-{name}"
        host.start()
        if f" {plug}@" in self._plugs():  # of its earlier life: the kernel takes its time to remove it
            self._switch.in_network("ip", "link", "del", plug)
        peer = ["peer", "name", "eth0", "netns", host.pid]
        self._switch.in_network("ip", "link", "add", plug, "type", "veth", *peer)
        self._switch.in_network("ip", "link", "set", plug, "master", "switch", "up")
        host.in_network("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.in_network("ip", "link", "set", "eth0", "up")

    def power_off(self, name: str) -> None:
        """As a power cut: no process ends in order, and no connection is closed, peers just hear nothing."""
        self.cut(name)
        self._hosts[name].kill()

    def cut(self, name: str) -> None:
        """Pull the plug of the host's network; its processes run on."""
        self._switch.in_network("ip", "link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """Put the plug of the host's network back."""
        self._switch.in_network("ip", "link", "set", f"to-{name}", "up")

    def _plugs(self) -> str:
        command = ["nsenter", "-t", str(self._switch.pid), "--net", "ip", "link"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
