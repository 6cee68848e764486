import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from megalowbit import c_library
from megalowbit.quantize import backends
from megalowbit.quantize.cpu import fp4 as kernels_cpu

pytestmark = pytest.mark.skipif(
    kernels_cpu.LIBRARY.why_unavailable() is not None,
    reason=f"no CPU kernel: {kernels_cpu.LIBRARY.why_unavailable()}",
)


QUICK_TO_BUILD = (("-O0", "-fopenmp"),)


def script(folder, text):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The library without optimisation, built once."""
    path = tmp_path_factory.mktemp("built") / "fp4.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c_library, "EXTRA_FLAGS", QUICK_TO_BUILD)
        deadline = time.monotonic() + c_library.COMPILE_TIMEOUT_S
        c_library._compile(c_library._compiler(), kernels_cpu.LIBRARY.source, path, deadline)
    return path


@pytest.fixture
def quick_compiler(built, monkeypatch, tmp_path):
    """A compiler that copies what the real one has built."""
    text = f"""test "$1" = --version && exec echo copying 1.0
while test "$1" != -o; do shift; done
cp {built} "$2"
"""
    monkeypatch.setenv("CC", script(tmp_path, text))


@pytest.fixture
def load(monkeypatch, tmp_path, caplog):
    """Load the library anew, in a cache folder of its own; returns reason and warnings."""
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(c_library, "EXTRA_FLAGS", QUICK_TO_BUILD)

    def load_again():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            library, reason = kernels_cpu.LIBRARY.load()
        assert (library is None) == (reason is not None)
        return reason, [record.getMessage() for record in caplog.records]

    return load_again


def test_a_missing_broken_or_hanging_compiler_is_named(load, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/nonexistent/cc")
    reason, warnings = load()
    assert "/nonexistent/cc cannot be run (No such file" in reason
    assert reason.endswith("set CC")
    assert warnings == []  # `backends` warns
    broken = 'test "$1" = --version || { echo "warm words"; echo "x.c:1: error: boom"; exit 1; }'
    monkeypatch.setenv("CC", script(tmp_path, broken))
    reason, _ = load()
    assert "(x.c:1: error: boom)" in reason
    monkeypatch.setenv("CC", script(tmp_path, "sleep 60 & wait"))
    monkeypatch.setattr(c_library, "COMPILE_TIMEOUT_S", 0.3)
    reason, _ = load()
    assert "took over 0.3 s" in reason
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler found" in load()[0]


def test_a_missing_library_is_reported_once_with_the_reason(monkeypatch, caplog):
    monkeypatch.setattr(kernels_cpu.LIBRARY, "_loaded", (None, "no C compiler found: install gcc"))
    with caplog.at_level(logging.WARNING):
        assert backends._backend_for.__wrapped__(torch.device("cpu"), "") == "torch"
    (record,) = caplog.records
    assert "plain torch operations, which is slow: no C compiler found" in record.getMessage()


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """A copy of the C files, to be changed."""
    for name in (kernels_cpu.LIBRARY.source.name, *kernels_cpu.LIBRARY.headers):
        (tmp_path / name).write_bytes(kernels_cpu.LIBRARY.source.with_name(name).read_bytes())
    monkeypatch.setattr(kernels_cpu.LIBRARY, "source", tmp_path / kernels_cpu.LIBRARY.source.name)
    return tmp_path


@pytest.mark.slow
def test_a_library_without_threads_is_used_and_reported_as_slow(load, monkeypatch):
    monkeypatch.setattr(c_library, "EXTRA_FLAGS", (("-O0",),))
    reason, warnings = load()
    assert reason is None
    assert warnings == ["fp4.c was compiled without OpenMP and uses one thread: install libgomp"]


# Where a compiler might go wrong: what is changed, and the check that notices.
FAULTS = [
    ("codes.h", "y * 0.5f + 4.0f", "y * 0.5f + 4.001f", "stochastic"),
    ("fp4.c", "v[j] = v[j] + bias[col + j]", "v[j] = v[j] - bias[col + j]", "scaling"),
    ("fp4.c", "sums[col + j] += v[j]", "sums[col + j] = v[j]", "column sums"),
    ("fp4.c", "from[j * PITCH]) >> 16", "from[j * PITCH]) >> 17", "decoding .* transposed"),
    ("fp4.c", "bits_of(from[j]) >> 16", "bits_of(from[j]) >> 17", "decoding"),
    ("codes.h", "(uint32_t)half[i] << 16", "(uint32_t)(half[i] | 1) << 16", "bfloat16 by rows"),
    ("lanes.h", "bits) * 0x1p112f", "bits) * 0x1p111f", "float16 by"),
    ("lanes.h", "out + i * out_pitch, a + i,", "out + i * out_pitch, a + (i ^ 1),", "by columns"),
    ("codes.h", "memcpy(out, from, (size_t)count * 4)", "memset(out, 0, 4)", "float32 by rows"),
]


@pytest.mark.parametrize(
    ("name", "right", "wrong", "noticed"),
    [FAULTS[0], *(pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS[1:])],
)
def test_a_library_that_computes_wrongly_is_not_used(load, sources, name, right, wrong, noticed):
    text = (sources / name).read_text()
    assert right in text
    (sources / name).write_text(text.replace(right, wrong))
    reason, _ = load()
    assert re.search(rf"fails its self-check \(.*{noticed}", reason), reason


@pytest.mark.parametrize("name", [kernels_cpu.LIBRARY.source.name, *kernels_cpu.LIBRARY.headers])
def test_a_change_in_any_source_makes_another_library(quick_compiler, load, sources, tmp_path, name):
    load()
    (sources / name).write_text((sources / name).read_text() + "/* changed */\n")
    load()
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_or_planted_library_is_built_again(quick_compiler, load, tmp_path):
    assert load() == (None, [])
    (library,) = (tmp_path / "cache").iterdir()
    whole = library.read_bytes()
    assert not library.stat().st_mode & stat.S_IWOTH
    library.unlink()
    library.write_bytes(whole[:5000])
    assert load() == (None, [])
    assert library.read_bytes()[:1000] == whole[:1000]
    assert library.stat().st_size == len(whole)
    for mode in (0o777, 0o770):
        library.chmod(mode)
        assert load() == (None, [])
        assert stat.S_IMODE(library.stat().st_mode) == 0o700
    library.rename(tmp_path / "elsewhere")
    library.symlink_to(tmp_path / "elsewhere")
    assert load() == (None, [])
    assert not library.is_symlink()


@pytest.mark.parametrize(
    "kind",
    ["writable by all", "below one writable by all", "writable by a group", "below one of a group", "a file"],
)
def test_an_unusable_or_untrusted_cache_folder_is_skipped(quick_compiler, load, monkeypatch, tmp_path, kind):
    folder = tmp_path / "shared"
    if kind == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o770 if "group" in kind else 0o777)
    if kind.startswith("below"):
        monkeypatch.setenv("MEGALOWBIT_CACHE", str(folder / "mine"))
    else:
        monkeypatch.setenv("MEGALOWBIT_CACHE", str(folder))
    reason, warnings = load()
    assert reason is None
    assert len(warnings) == 1
    assert "set MEGALOWBIT_CACHE" in warnings[0]
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
def test_processes_that_compile_at_once_all_get_the_library_on_one_openmp(tmp_path):
    code = (
        f"from megalowbit import c_library; c_library.EXTRA_FLAGS = {QUICK_TO_BUILD}; "
        "from megalowbit.quantize.cpu.fp4 import LIBRARY; "
        "assert not LIBRARY.why_unavailable(), LIBRARY.why_unavailable(); "
        "maps = open('/proc/self/maps').read().split(); "
        "print(len({m for m in maps if 'libgomp' in m or 'libomp' in m}))"
    )
    environment = {**os.environ, "MEGALOWBIT_CACHE": str(tmp_path / "cache")}
    root = Path(kernels_cpu.__file__).parents[2]
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=400)[0].strip() for process in processes] == ["1", "1"]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def test_a_compiler_error_names_cc_and_not_the_disk(load, monkeypatch, tmp_path):
    write = "output=$(echo $* | sed 's/.*-o //'); test \"$output\" = --version ||"
    garbage = script(tmp_path, f'{write} echo "no library" > "$output"')
    cases = {
        'gcc "': 'CC=gcc " cannot be parsed (No closing quotation): set CC',
        "true": "CC=true wrote no library: set CC",
        garbage: f"the library that CC={garbage} wrote cannot be loaded",
    }
    for command, expected in cases.items():
        monkeypatch.setenv("CC", command)
        reason, warnings = load()
        assert reason.startswith(expected)
        assert "MEGALOWBIT_CACHE" not in reason
        assert warnings == []
    assert not list((tmp_path / "cache").iterdir())


def test_a_tilde_means_home_and_new_folders_are_private_whatever_the_umask(
    quick_compiler, load, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEGALOWBIT_CACHE", "~/a/b")
    before = os.umask(0o002)
    try:
        assert load() == (None, [])
    finally:
        os.umask(before)
    (library,) = (tmp_path / "a" / "b").iterdir()
    for path in (library, *list(library.parents)[:2]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("owner", "mode", "is_safe"),
    [
        (os.geteuid(), 0o755, True),
        (0, 0o1777, True),
        (0, 0o777, False),
        (0, 0o775, False),
        (4294967294, 0o755, False),
        (4294967294, 0o1777, False),  # the owner of a sticky folder may rename all in it
    ],
)
def test_a_parent_is_safe_if_its_owner_is_and_others_cannot_rename_in_it(owner, mode, is_safe):
    status = os.stat_result((stat.S_IFDIR | mode, 1, 1, 2, owner, 0, 4096, 0, 0, 0))
    assert c_library._is_safe_parent(status) == is_safe


def test_the_file_that_was_checked_is_loaded_whatever_takes_its_place(
    quick_compiler, load, monkeypatch, tmp_path
):
    load()
    (built,) = (tmp_path / "cache").iterdir()
    library = tmp_path / "copied" / built.name  # loaded for the first time: loaders remember names
    library.parent.mkdir(mode=0o700)
    library.write_bytes(built.read_bytes())
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(library.parent))
    original, swaps = c_library.ctypes.CDLL, []

    def swap_and_load(path):
        swaps.append(path)
        library.unlink()
        library.write_text("planted")
        return original(path)

    monkeypatch.setattr(c_library.ctypes, "CDLL", swap_and_load)
    assert load() == (None, [])
    assert len(swaps) == 1  # nothing had to be built again
    assert library.read_text() == "planted"


def test_without_names_for_open_files_a_private_copy_is_loaded(quick_compiler, load, monkeypatch):
    original, loaded = c_library.ctypes.CDLL, []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: "/proc" not in str(path) and exists(path))
    monkeypatch.setattr(c_library.ctypes, "CDLL", lambda path: loaded.append(path) or original(path))
    assert load() == (None, [])
    assert load() == (None, [])
    assert [Path(path).name for path in loaded] == ["fp4.so"] * 2
    assert not any(exists(Path(path).parent) for path in loaded)


def test_leftovers_of_a_killed_build_are_deleted_a_day_later(quick_compiler, load, tmp_path):
    cache = tmp_path / "cache"
    for name, age in ((".build-old", 90000), (".build-new", 80000)):
        (cache / name).mkdir(parents=True)
        (cache / name / "draft").write_text("half")
        os.utime(cache / name, (time.time() - age,) * 2)
    cache.chmod(0o700)
    assert load() == (None, [])
    assert {path.name for path in cache.iterdir() if path.suffix != ".so"} == {".build-new"}


def test_no_temporary_folder_and_disks_that_forbid_programs_are_named(load, monkeypatch, tmp_path):
    monkeypatch.setattr(c_library, "_forbids_programs", lambda folder: True)
    reason, warnings = load()
    assert "forbids programs (noexec): set MEGALOWBIT_CACHE or TMPDIR" in reason
    assert len(warnings) == 1
    assert f"{tmp_path / 'cache'} forbids programs" in warnings[0]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert re.search("cannot be built .*none.*: set MEGALOWBIT_CACHE and TMPDIR", load()[0])


def test_an_interrupted_build_leaves_no_compiler_behind(monkeypatch, tmp_path):
    def interrupt(process, timeout=None):
        monkeypatch.undo()
        started.append(process)
        raise KeyboardInterrupt

    started = []
    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        c_library._run([script(tmp_path, "sleep 60")], time.monotonic() + 60)
    assert started[0].returncode == -9
