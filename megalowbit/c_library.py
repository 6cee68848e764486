"""Compiles a C file on first use, caches the library, and loads it.

The cache is `$MEGALOWBIT_CACHE`, else `$XDG_CACHE_HOME/megalowbit`, else `~/.cache/megalowbit`. The name of a
library is a hash of sources, flags, compiler and CPU. The file is written by atomic rename and ends with its
checksum.

Code is loaded only from places that nobody else can write to. If others may write to the cache, a private
temporary folder is used instead. The file is checked and loaded through one descriptor, so exchanging the
file in between has no effect. If there is no library, an `UnavailableError` names the reason and the remedy.

The CPU kernels of each package use this module with their C file.
"""

from __future__ import annotations

import ctypes
import functools
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit.errors import UserError
from megalowbit.processor import cpu_lines

FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Tried in this order: not every compiler supports -march=native for its machine, or has OpenMP.
NATIVE, WIDE, THREADS = "-march=native", "-mprefer-vector-width=512", "-fopenmp"
EXTRA_FLAGS = ((NATIVE, WIDE, THREADS), (NATIVE, THREADS), (THREADS,), (NATIVE,), ())
COMPILE_TIMEOUT_S = 120.0  # for all attempts of one build
LEFTOVER = ".build-"  # prefix of build folders; one older than a day was left by a killed process
LEFTOVER_AGE_S = 86400.0
CHECKSUM_BYTES = 32  # SHA-256, appended to the library, where loaders ignore it
logger = logging.getLogger("megalowbit")


class UnavailableError(Exception):
    """There is no library; the message is a clause with the reason and the remedy."""


@dataclass
class KernelLibrary:
    """A library from a C file: compiled, checked against known bits and loaded on first use.

    Attributes:
        source: the C file; it must define `megalowbit_has_threads`.
        headers: names of the files that it includes, in the same folder.
        answers: runs the self-check of a library; returns results by name.
        known: the expected results.
        fallback: beginning of the warning that is logged without a library; None logs nothing.
    """

    source: Path
    headers: Sequence[str]
    answers: Callable[[ctypes.CDLL], Mapping[str, int]]
    known: Mapping[str, int]
    fallback: str | None = None

    def load(self) -> tuple[ctypes.CDLL | None, str | None]:
        """Compile the library, or find it in the cache; returns it, or `None` and the reason."""
        try:
            library = find_or_build(self.source, self.headers)
            with _disable_current_modes():
                answers = self.answers(library)
            for name, answer in answers.items():
                if answer != self.known[name]:
                    raise UnavailableError(f"the compiled library fails its self-check ({name}): set CC")
        except (UnavailableError, OSError) as error:  # OSError: no temporary folder
            if self.fallback is not None:
                logger.warning("%s: %s", self.fallback, error)
            return None, str(error)
        if not library.megalowbit_has_threads():
            name = self.source.name
            logger.warning("%s was compiled without OpenMP and uses one thread: install libgomp", name)
        return library, None

    @functools.cached_property
    def _loaded(self) -> tuple[ctypes.CDLL | None, str | None]:
        return self.load()

    def why_unavailable(self) -> str | None:
        """The reason and the remedy if there is no library; else `None`."""
        return self._loaded[1]

    def get(self) -> ctypes.CDLL:
        """The library; call it only if there is one."""
        library, reason = self._loaded
        assert library is not None, reason
        return library


def address(tensor: Tensor | None) -> int | None:
    """The address of the tensor's first element; `None` for `None`.

    Raises:
        UserError: the tensor's storage was freed.
    """
    if tensor is None:
        return None
    assert not tensor.is_neg(), "a negated view's memory holds other numbers"
    place = tensor.data_ptr()
    if not place and tensor.numel():
        raise UserError(
            f"a tensor of {tuple(tensor.shape)} has no memory: its storage was freed, gather it first"
        )
    return place


def find_or_build(source: Path, headers: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the cached library, or build it; without a usable cache, in a private temporary folder.

    Args:
        source: the C file that is compiled.
        headers: names of the files that it includes, in the same folder.
    """
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    compiler = _compiler()
    try:
        version = _run([*compiler, "--version"], deadline)
        settings = repr((FLAGS, EXTRA_FLAGS, compiler, version, platform.machine(), cpu_lines())).encode()
        sources = [source.read_bytes(), *(source.with_name(header).read_bytes() for header in headers)]
        name = f"{source.stem}-{hashlib.sha256(b''.join(sources) + settings).hexdigest()[:24]}.so"
        folder = cache_folder()
        if folder is not None:
            kept = _load_cached(folder / name, source.stem) or _build_cached(
                compiler, source, folder, name, deadline
            )
            if kept is not None:
                return kept
        # A loaded library does not need its file. Some file systems keep the name for a while.
        with tempfile.TemporaryDirectory(prefix="megalowbit-", ignore_cleanup_errors=True) as private:
            if _forbids_programs(Path(private)):
                raise UnavailableError(f"{private} forbids programs (noexec): set MEGALOWBIT_CACHE or TMPDIR")
            return _build(compiler, source, Path(private) / name, deadline)
    except OSError as error:  # sources missing, no temporary folder, a full disk
        raise UnavailableError(
            f"the library cannot be built ({error}): set MEGALOWBIT_CACHE and TMPDIR"
        ) from error


def _build_cached(
    compiler: list[str], source: Path, folder: Path, name: str, deadline: float
) -> ctypes.CDLL | None:
    """Compile, then rename: others see only complete files. `None` if the folder cannot be written to."""
    try:
        for leftover in folder.glob(f"{LEFTOVER}*"):
            if time.time() - leftover.lstat().st_mtime > LEFTOVER_AGE_S:
                shutil.rmtree(leftover)
    except OSError as error:  # another process may have removed it first
        logger.info("cannot clear %s: %s", folder, error)
    try:
        with tempfile.TemporaryDirectory(prefix=LEFTOVER, dir=folder) as temporary:
            path = Path(temporary) / name
            library = _build(compiler, source, path, deadline)
            path.replace(folder / name)
        return library
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", folder, error)
        return None


def _build(compiler: list[str], source: Path, path: Path, deadline: float) -> ctypes.CDLL:
    """Compile to `path`, in a private folder, and load it."""
    draft = path.with_suffix(".draft")
    _compile(compiler, source, draft, deadline)
    command = shlex.join(compiler)
    if not draft.is_file():
        raise UnavailableError(f"CC={command} wrote no library: set CC to a C compiler")
    content = draft.read_bytes()
    draft.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content + hashlib.sha256(content).digest())
    path.chmod(0o700)  # not limited by the umask
    with path.open("rb") as file:
        try:
            return _load(file.fileno(), content, source.stem)
        except OSError as error:
            reason = f"the library that CC={command} wrote cannot be loaded ({error})"
            raise UnavailableError(f"{reason}: set CC to a C compiler of this machine") from error


def _compile(compiler: list[str], source: Path, output: Path, deadline: float) -> None:
    for extra in EXTRA_FLAGS:
        try:
            _run([*compiler, *FLAGS, *extra, str(source), "-lm", "-o", str(output)], deadline)
            return
        except UnavailableError:
            if extra == EXTRA_FLAGS[-1] or time.monotonic() >= deadline:
                raise


def _load_cached(path: Path, stem: str) -> ctypes.CDLL | None:
    """The library; `None` if it is missing, damaged, not executable, or writable by others."""
    try:
        # Do not follow a link, and do not wait for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                return None
            whole = file.read()
            content, checksum = whole[:-CHECKSUM_BYTES], whole[-CHECKSUM_BYTES:]
            if hashlib.sha256(content).digest() != checksum:
                return None  # loading a truncated library may crash the process
            return _load(descriptor, content, stem)
    except OSError:
        return None


def _load(descriptor: int, content: bytes, stem: str) -> ctypes.CDLL:
    """Load an open file by /proc/self/fd; without that folder, load a private copy of its content."""
    if Path(f"/proc/self/fd/{descriptor}").exists():
        # Loaders identify libraries by name. The descriptor stays open, so no other library gets this number.
        kept = os.dup(descriptor)
        try:
            return ctypes.CDLL(f"/proc/self/fd/{kept}")
        except OSError:
            os.close(kept)
            raise
    with tempfile.TemporaryDirectory(prefix="megalowbit-", ignore_cleanup_errors=True) as private:
        copy = Path(private) / f"{stem}.so"
        copy.write_bytes(content)
        return ctypes.CDLL(str(copy))


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user and root may change the file; any group counts as others."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_safe_parent(status: os.stat_result) -> bool:
    """Whether others cannot replace a folder inside this one."""
    # In a user namespace root may have no uid. The owner of / can change everything anyway.
    if status.st_uid not in (os.geteuid(), 0, Path("/").stat().st_uid):
        return False
    return bool(status.st_mode & stat.S_ISVTX) or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _forbids_programs(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


def cache_folder() -> Path | None:
    """The cache folder, created if missing; `None` and a warning if it cannot be used or trusted."""
    named, base = os.environ.get("MEGALOWBIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "megalowbit"
        folder = folder.expanduser().resolve()
        for missing in [each for each in (*reversed(folder.parents), folder) if not each.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)  # whatever the umask: no access for others
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        for each in (folder, *folder.parents):
            status = each.stat()
            if not (_is_ours(status) if each == folder else _is_safe_parent(status)):
                raise PermissionError(f"others may write to {each}")
        if _forbids_programs(folder):
            raise PermissionError(f"{folder} forbids programs (noexec)")
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        logger.warning("no cache for compiled kernels (%s): set MEGALOWBIT_CACHE to your own folder", error)
        return None


def _compiler() -> list[str]:
    found = filter(None, map(shutil.which, ("cc", "gcc", "clang")))
    named = os.environ.get("CC", "")
    try:
        command = shlex.split(named) or list(found)[:1]
    except ValueError as error:
        raise UnavailableError(f"CC={named} cannot be parsed ({error}): set CC to a C compiler") from error
    if not command:
        raise UnavailableError("no C compiler found: install gcc, or set CC")
    return command


def _run(command: list[str], deadline: float) -> str:
    """Run a compiler and return its output.

    Raises:
        UnavailableError: it cannot be started, fails, or runs past the deadline.
    """
    env = {**os.environ, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as output:  # a hanging child of the compiler would keep a pipe open
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
            raise UnavailableError(f"{command[0]} took over {COMPILE_TIMEOUT_S:g} s: set CC") from error
        finally:
            if process.poll() is None:  # nor does Ctrl-C reach another session
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code:
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [f"exit code {code}"]
        first = next((line for line in lines if "error" in line.lower()), lines[0])
        raise UnavailableError(f"{command[0]} failed ({first}): install gcc 9 or newer, or set CC")
    return text
