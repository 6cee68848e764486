"""A real SLURM of a few nodes on one machine, up in a second or two and gone with the process that made it.

The controller `ctl` and the nodes `n1`, `n2`, … are hosts of `hosts.Network`, each with its own name and
address, so that a node can be powered off or cut off the network. Daemons are those of the system's packages,
started as root and without systemd; authentication is munge with a key of the cluster's own. All files lie in
one folder.

Settings that a cluster of this kind needs and that are no defaults:
- credentials live for 5 s: SLURM holds a requeued job until those of its first start have expired (120 s);
- processes of a job are found by their parents (linuxproc), since torchrun's workers leave the process group;
- nodes claim more cores than there are, so that jobs of several tests run beside each other.

Not covered: accounting, cgroups, real GPUs (null devices stand in for them, so that SLURM hands out numbers).
"""

import os
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hosts import PROGRAMS, Network

PACKAGES = {
    **PROGRAMS, "munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client",
    "pgrep": "procps",
}  # fmt: skip
SSH_PACKAGES = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}
DAEMONS = "/usr/sbin:/sbin"  # not in the PATH of every root
SECONDS_TO_START = 30
NULL_DEVICE = os.makedev(1, 3)
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}

SLURM_CONF = """\
ClusterName=test
SlurmctldHost=ctl({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
JobRequeue=1
ReturnToService=2
SlurmdTimeout={silence}
MessageTimeout=5
KillWait=5
MinJobAge=3600
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SSHD_CONFIG = """\
HostKey {ssh}/key
AuthorizedKeysFile {ssh}/key.pub
StrictModes no
UsePAM no
PidFile none
"""
SSH_CONFIG = """\
IdentityFile {ssh}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def what_is_missing(*, ssh: bool = False) -> str:
    """Why no cluster can be made here, in words; empty if one can."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    packages = {**PACKAGES, **(SSH_PACKAGES if ssh else {})}
    path = f"{os.environ['PATH']}:{DAEMONS}"
    missing = [program for program in packages if shutil.which(program, path=path) is None]
    if missing:
        names = " ".join(sorted({packages[program] for program in missing}))
        return f"not installed: {', '.join(missing)} (apt-get install {names})"
    command = ["unshare", "--net", "--pid", "--mount", "--fork", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"this root may not make namespaces ({done.stderr.strip()})" if done.returncode else ""


class Cluster:
    """`with Cluster(nodes=3) as cluster: job = cluster.submit("job.sh", cwd=folder)`.

    Args:
        nodes: their number; they are named n1, n2, ….
        cores: of each node, for SLURM's count.
        gpus: of each node, for SLURM's count: null devices.
        silence: seconds (about) until a node that does not answer is down and its jobs are requeued.
        ssh: whether nodes run sshd, and know each other's keys.
    """

    def __init__(
        self, *, nodes: int = 2, cores: int = 8, gpus: int = 0, silence: int = 10, ssh: bool = False
    ) -> None:
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.cores, self.gpus, self.silence, self.has_ssh = cores, gpus, silence, ssh
        # Not below pytest's folder: the path of a socket has room for 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="megalowbit-slurm-"))
        addresses = {"ctl": "10.99.0.254", **{name: f"10.99.0.{i}" for i, name in enumerate(self.nodes, 1)}}
        self.hosts = Network(addresses, self.folder)

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.hosts.stop()
        shutil.rmtree(self.folder)

    def environment(self, **more: str) -> dict[str, str]:
        """Of a command on a host: this process's own, but for what launchers or a SLURM around it set."""
        ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        own = {
            k: v for k, v in os.environ.items() if k not in ranks and not k.startswith(("SLURM_", "SBATCH_"))
        }
        path = f"{own['PATH']}:{DAEMONS}"
        return {**own, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def run(
        self, *command: object, on: str = "ctl", cwd: Path | str = "/", check: bool = True, **environment: str
    ) -> str:
        """Output of a command on a host, the controller if not said otherwise.

        Raises:
            RuntimeError: it failed, and `check` is set.
        """
        done = subprocess.run(
            self.hosts[on].inside(*command, cwd=cwd),
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if check and done.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, command))} on {on}: exit code {done.returncode}\n{done.stdout}"
            )
        return done.stdout

    def submit(self, *arguments: object, cwd: Path, **environment: str) -> "Job":
        """`sbatch` with these arguments."""
        return Job(self, self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environment).split()[-1])

    def power_off(self, name: str) -> None:
        """A power cut of a node; SLURM finds out by itself, `silence` seconds later or some more."""
        self.hosts.power_off(name)

    def power_on(self, name: str) -> None:
        """Start a node that is off; it offers itself to SLURM."""
        self.hosts.power_on(name)
        self._start_node(name)

    def node_states(self) -> dict[str, str]:
        """State of every node in SLURM's words: `idle`, `mixed`, `down`, …, with flags such as `*`."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def logs(self) -> str:
        """The last lines of every daemon."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)

    def _start(self) -> None:
        self._write_files()
        self.hosts.start()
        munge = self.folder / "munge"
        places = (
            f"--{name}={munge / name}" for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")
        )
        self.run("munged", *places)
        self.run("slurmctld")
        for name in self.nodes:
            self._start_node(name)
        deadline = time.monotonic() + SECONDS_TO_START
        while (states := self.node_states()) != dict.fromkeys(self.nodes, "idle"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nodes are {states} after {SECONDS_TO_START} s\n{self.logs()}")
            time.sleep(0.05)

    def _start_node(self, name: str) -> None:
        self.run("slurmd", "-N", name, on=name)
        if self.has_ssh:
            self.run("mkdir", "-p", "/run/sshd", on=name)
            log = self.folder / f"sshd-{name}.log"
            self.run("/usr/sbin/sshd", "-f", self.folder / "ssh" / "sshd_config", "-E", log, on=name)

    def _write_files(self) -> None:
        self.folder.chmod(0o755)  # munge refuses a socket that others cannot reach
        (self.folder / "munge").mkdir(mode=0o755)
        key = self.folder / "munge" / "key-file"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._write_slurm_conf()
        if self.has_ssh:
            self._write_ssh()

    def _write_slurm_conf(self) -> None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        size = f"CPUs={self.cores} RealMemory={memory}" + (f" Gres=gpu:{self.gpus}" if self.gpus else "")
        text = SLURM_CONF.format(
            controller=self.hosts["ctl"].address, folder=self.folder, silence=self.silence
        )
        for name in self.nodes:
            text += f"NodeName={name} NodeAddr={self.hosts[name].address} {size}\n"
        if self.gpus:
            text += "GresTypes=gpu\n"
            devices = [self.folder / f"gpu{number}" for number in range(self.gpus)]
            for device in devices:  # SLURM hands out numbers of devices only
                os.mknod(device, 0o666 | stat.S_IFCHR, NULL_DEVICE)
            lines = [f"NodeName={name} Name=gpu File={device}\n" for name in self.nodes for device in devices]
            (self.folder / "gres.conf").write_text("".join(lines))
        (self.folder / "slurm.conf").write_text(text)

    def _write_ssh(self) -> None:
        ssh = self.folder / "ssh"
        ssh.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / "key"], check=True)
        (ssh / "sshd_config").write_text(SSHD_CONFIG.format(ssh=ssh))
        seen = self.folder / "files" / "etc" / "ssh"
        seen.mkdir(parents=True)
        (seen / "ssh_config").write_text(SSH_CONFIG.format(ssh=ssh))


@dataclass(frozen=True)
class Job:
    """A job of a cluster; `id` may name one task of an array (`7_1`)."""

    cluster: Cluster
    id: str

    def facts(self) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode, NodeList, …."""
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def restarts(self) -> int:
        """How often it was put back into the queue."""
        return int(self.facts()["Restarts"])

    def wait(self, seconds: float) -> str:
        """Its last state, when it has ended for good.

        Raises:
            TimeoutError: it has not; with SLURM's facts and the daemons' logs.
        """
        deadline = time.monotonic() + seconds
        while (facts := self.facts())["JobState"] not in OVER:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.id} after {seconds} s: {facts}\n{self.cluster.logs()}")
            time.sleep(0.5)
        return facts["JobState"]

    def cancel(self) -> None:
        self.cluster.run("scancel", self.id)

    def requeue(self) -> None:
        self.cluster.run("scontrol", "requeue", self.id)

    def signal_script(self, name: str) -> None:
        """Send the batch script a signal, as SLURM does for `--signal=B:` before the time limit."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.id)

    def signal_steps(self, name: str) -> None:
        """Send the programs that srun started a signal, as SLURM does for `--signal=` without `B:`."""
        self.cluster.run("scancel", f"--signal={name}", self.id)


def _open_shell() -> None:
    """A cluster to look around in: a shell on its controller, and its end with that of the shell."""
    if reason := what_is_missing():
        raise SystemExit(reason)
    with Cluster(nodes=3) as cluster:
        print(f"nodes {' '.join(cluster.nodes)}; configuration and logs in {cluster.folder}; exit ends it")
        shell = cluster.hosts["ctl"].inside("bash", "--norc", cwd=Path.cwd())
        subprocess.run(shell, env=cluster.environment(PS1="ctl# "))


if __name__ == "__main__":
    _open_shell()
