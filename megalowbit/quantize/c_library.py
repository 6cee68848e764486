"""The C library of the CPU path: compiled on first use, kept in a folder, loaded.

It is kept in `$MEGALOWBIT_CACHE`, else `$XDG_CACHE_HOME/megalowbit`, else `~/.cache/megalowbit`. Its name is
made of sources, flags, compiler and CPU; it is written by atomic rename and ends in its own checksum. A
folder that others may write is passed over for a private temporary one: code is not loaded from there. What
cannot be had is an `UnavailableError` that names the remedy. `kernels_cpu` calls it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels_cpu.c")
HEADERS = ("kernels_cpu_codes.h", "kernels_cpu_lanes.h")  # beside it
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Tried in this order: not every compiler knows the machine it runs on, or has OpenMP.
NATIVE, WIDE, THREADS = "-march=native", "-mprefer-vector-width=512", "-fopenmp"
EXTRA_FLAGS = ((NATIVE, WIDE, THREADS), (NATIVE, THREADS), (THREADS,), (NATIVE,), ())
COMPILE_TIMEOUT_S = 120.0  # for all attempts together
CHECKSUM_BYTES = 32  # of SHA-256, behind the library, where loaders do not look
logger = logging.getLogger("megalowbit")


class UnavailableError(Exception):
    """Why there is no library; the message is a clause with the remedy."""


def find_or_build() -> ctypes.CDLL:
    """Load the cached library, or build it, in a private folder if need be."""
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    compiler = _compiler()
    version = _run([*compiler, "--version"], deadline)
    settings = repr((FLAGS, EXTRA_FLAGS, compiler, version, platform.machine(), _cpu())).encode()
    sources = [SOURCE.read_bytes(), *(SOURCE.with_name(header).read_bytes() for header in HEADERS)]
    name = f"kernels_cpu-{hashlib.sha256(b''.join(sources) + settings).hexdigest()[:24]}.so"
    folder = _cache_folder()
    if folder is not None:
        kept = _load(folder / name) or _build(compiler, folder, name, deadline)
        if kept is not None:
            return kept
    # A loaded library needs its file no more.
    with tempfile.TemporaryDirectory(prefix="megalowbit-") as private:
        library = _build(compiler, Path(private), name, deadline)
    if library is None:
        raise UnavailableError("the compiled library does not load: set MEGALOWBIT_CACHE to another disk")
    return library


def _build(compiler: list[str], folder: Path, name: str, deadline: float) -> ctypes.CDLL | None:
    """Compile, then rename, so that others see a whole file; `None` if the folder takes or loads no files."""
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as temporary:  # ours alone
            path = Path(temporary) / name
            _compile(compiler, path, deadline)
            content = path.read_bytes()
            path.write_bytes(content + hashlib.sha256(content).digest())
            path.chmod(0o700)
            path.replace(folder / name)
        return _load(folder / name)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", folder, error)
        return None


def _compile(compiler: list[str], output: Path, deadline: float) -> None:
    for extra in EXTRA_FLAGS:
        try:
            _run([*compiler, *FLAGS, *extra, str(SOURCE), "-o", str(output)], deadline)
            return
        except UnavailableError:
            if extra == EXTRA_FLAGS[-1] or time.monotonic() >= deadline:
                raise


def _load(path: Path) -> ctypes.CDLL | None:
    """The library, or `None` where there is none, or it is damaged, somebody else's or not to be executed."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
            return None
        content = path.read_bytes()
        if hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() != content[-CHECKSUM_BYTES:]:
            return None  # half a library may crash the process on loading, so look first
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & stat.S_IWOTH


def _cache_folder() -> Path | None:
    """The folder for libraries, made if need be; `None` (and a warning) if it cannot be had or trusted."""
    named, base = os.environ.get("MEGALOWBIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "megalowbit"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        is_trusted = _is_ours(folder.stat())
        for parent in folder.parents:  # whoever may rename a folder on the way may put another in its place
            mode = parent.stat().st_mode
            is_trusted = is_trusted and (not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX))
        if not is_trusted:
            raise PermissionError(f"others may write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.warning("no cache for compiled kernels (%s): set MEGALOWBIT_CACHE to a folder of yours", error)
        return None


def _compiler() -> list[str]:
    found = filter(None, map(shutil.which, ("cc", "gcc", "clang")))
    command = shlex.split(os.environ.get("CC", "")) or list(found)[:1]
    if not command:
        raise UnavailableError("no C compiler found: install gcc, or set CC")
    return command


def _cpu() -> list[str]:
    """What distinguishes this CPU from others of its architecture that share the folder."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else [platform.processor()]
    changing = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "physical id", "bogomips")
    return sorted({line for line in lines if not line.startswith(changing)})


def _run(command: list[str], deadline: float) -> str:
    """What a compiler prints; an error if it cannot be started, fails, or is not done by the deadline."""
    env = {**os.environ, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as output:  # a pipe would stay open with a hanging child of the compiler
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=env,
            )
        except OSError as error:
            raise UnavailableError(f"{command[0]} cannot be run ({error.strerror}): set CC") from error
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise UnavailableError(f"{command[0]} took over {COMPILE_TIMEOUT_S:g} s: set CC") from error
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code:
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [f"exit code {code}"]
        first = next((line for line in lines if "error" in line.lower()), lines[0])
        raise UnavailableError(f"{command[0]} failed ({first}): install gcc 9 or newer, or set CC")
    return text
