import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit import durable_files as durable
from megalowbit.durable_files import (
    MANIFEST,
    atomic_file,
    complete_steps,
    is_step_name,
    open_regular,
    read_manifest,
    refuse_special_file,
    sha256_of,
    step_name,
    steps_in,
    verify_folder,
    write_manifest,
)
from megalowbit.errors import UserError

ROOT = Path(__file__).parents[1]
REMEDY = "use an older one"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_new_text_replaces_the_old_and_leaves_no_other_file(tmp_path):
    for text in ("one", "zwölf"):
        with atomic_file(tmp_path / "a") as file:
            file.write(text)
        assert (tmp_path / "a").read_text(encoding="utf-8") == text
    assert names_in(tmp_path) == ["a"]


def test_bytes_are_written_unchanged(tmp_path):
    with atomic_file(tmp_path / "a", "wb") as file:
        file.write(b"\0\r\n\xff")
    assert (tmp_path / "a").read_bytes() == b"\0\r\n\xff"


@pytest.mark.parametrize("mode", ["a", "w"])
def test_a_file_is_opened_in_place_and_created_if_missing(tmp_path, mode):
    for text in ("one", "zwölf"):
        with open_regular(tmp_path / "a", mode) as file:
            file.write(text)
    assert (tmp_path / "a").read_text(encoding="utf-8") == ("onezwölf" if mode == "a" else "zwölf")


def test_an_output_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "file").write_text("old")
    for name in ("file", "new", "file/below"):
        refuse_special_file(tmp_path / name, "--json")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=f"^--json .*/{name} is not a regular file: name another$"):
            refuse_special_file(tmp_path / name, "--json")
    with pytest.raises(UserError, match="^--out / is a folder: name a file$"):
        refuse_special_file(Path("/"), "--out")
    for name in ("a" * 300, "nu\0ll"):
        with pytest.raises(UserError, match="is no valid path"):
            refuse_special_file(tmp_path / name, "--json")


@pytest.mark.parametrize("mode", ["a", "w"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "pipe that is read", "folder", "device"])
def test_nothing_is_written_through_links_pipes_and_devices(tmp_path, mode, kind):
    path, target = tmp_path / "a", tmp_path / "precious"
    target.write_text("keep me")
    reader = None
    if kind == "device":
        path = Path("/dev/null")
    elif kind == "folder":
        path.mkdir()
    elif kind.startswith("pipe"):
        os.mkfifo(path)
        if kind == "pipe that is read":
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    else:
        path.symlink_to(target if kind == "link" else tmp_path / "none")
    with pytest.raises(UserError, match=r"is a link or not a regular file, .*: remove it"):
        open_regular(path, mode)
    if reader is not None:
        os.close(reader)
    assert target.read_text() == "keep me"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_no_temporary_file(tmp_path, error):
    (tmp_path / "a").write_bytes(b"old")

    def fail_in_the_middle():
        with atomic_file(tmp_path / "a", "wb") as file:
            file.write(b"half of it")
            raise error

    with pytest.raises(type(error)):
        fail_in_the_middle()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names_in(tmp_path) == ["a"]


def test_a_failed_replacement_leaves_no_temporary_file(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError), atomic_file(tmp_path / "a") as file:
        file.write("x")
    assert names_in(tmp_path) == ["a"]


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys, pathlib; from megalowbit.durable_files import atomic_file\n"
        "with atomic_file(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write('half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_writers_at_the_same_time_do_not_mix(tmp_path):
    barrier = threading.Barrier(4)

    def write(letter):
        with atomic_file(tmp_path / "a") as file:
            file.write(letter * 1000)
            barrier.wait(60)  # all drafts are open
            file.write(letter * 1000)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "wxyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (tmp_path / "a").read_text() in {letter * 2000 for letter in "wxyz"}
    assert names_in(tmp_path) == ["a"]


@given(st.binary(max_size=9_000), st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_checksum_equals_hashlib_of_the_whole(tmp_path_factory, piece, repeat):
    data = piece * (1 + repeat * 400)
    path = tmp_path_factory.mktemp("sum") / "data"
    path.write_bytes(data)
    assert sha256_of(path) == hashlib.sha256(data).hexdigest()


@pytest.fixture
def folder(tmp_path):
    """A complete checkpoint of two files, free to be damaged."""
    (tmp_path / "step" / "deep").mkdir(parents=True)
    (tmp_path / "step" / "weights").write_bytes(bytes(range(200)))
    (tmp_path / "step" / "deep" / "state").write_bytes(b"12345")
    write_manifest(tmp_path / "step")
    return tmp_path / "step"


def test_the_manifest_names_every_file_with_size_and_checksum(folder):
    expected = [
        {"name": "deep/state", "size": 5, "sha256": hashlib.sha256(b"12345").hexdigest()},
        {"name": "weights", "size": 200, "sha256": hashlib.sha256(bytes(range(200))).hexdigest()},
    ]
    assert json.loads((folder / MANIFEST).read_text()) == {"format": 1, "files": expected}
    assert [entry._asdict() for entry in read_manifest(folder, remedy=REMEDY)] == expected
    write_manifest(folder)  # does not name itself
    verify_folder(folder, remedy=REMEDY)


@given(st.binary(min_size=1, max_size=50), st.data())
@settings(max_examples=50, deadline=None)
def test_any_changed_byte_truncation_or_loss_is_found(tmp_path_factory, content, data):
    folder = tmp_path_factory.mktemp("step")
    file = folder / "weights"
    file.write_bytes(content)
    write_manifest(folder)
    verify_folder(folder, remedy=REMEDY)
    place, expected = data.draw(st.integers(0, len(content) - 1)), hashlib.sha256(content).hexdigest()
    damage = data.draw(st.sampled_from(["flip", "truncate", "remove"]))
    if damage == "flip":
        changed = bytearray(content)
        changed[place] ^= data.draw(st.integers(1, 255))
        file.write_bytes(changed)
        reason = f"has SHA-256 {hashlib.sha256(changed).hexdigest()[:12]}… instead of {expected[:12]}…"
    elif damage == "truncate":
        file.write_bytes(content[:place])
        reason = f"has {place} bytes instead of {len(content)}"
    else:
        file.unlink()
        reason = "is missing"
    with pytest.raises(UserError) as caught:
        verify_folder(folder, remedy=REMEDY)
    assert str(caught.value) == f"checkpoint {folder} is damaged: weights {reason}; {REMEDY}"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "1", "\0", '{"format": 1}', '{"files": []}', '{"format": 1, "files": [1]}',
        '{"format": 1, "files": [{"name": "x"}]}',
        '{"format": 1, "files": [{"name": "x", "size": null, "sha256": ""}]}',
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_named(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=rf"is damaged: manifest\.json cannot be read; {REMEDY}"):
        verify_folder(folder, remedy=REMEDY)


def test_a_folder_that_is_no_complete_checkpoint_is_refused(folder):
    (folder / MANIFEST).write_text('{"format": 2, "files": []}')
    with pytest.raises(UserError, match="has format 2, not 1: use the version that wrote it"):
        verify_folder(folder, remedy=REMEDY)
    (folder / MANIFEST).unlink()
    with pytest.raises(UserError, match=rf"is incomplete, it has no manifest\.json: {REMEDY}"):
        verify_folder(folder, remedy=REMEDY)
    with pytest.raises(UserError, match=f"nowhere does not exist: {REMEDY}"):
        verify_folder(folder / "nowhere", remedy=REMEDY)


@given(st.dictionaries(st.integers(0, 10**10), st.booleans(), max_size=8))
@settings(max_examples=30, deadline=None)
def test_complete_steps_are_those_with_a_manifest_in_the_order_of_their_numbers(
    tmp_path_factory, is_complete
):
    folder = tmp_path_factory.mktemp("run")
    for step, has_manifest in is_complete.items():
        (folder / step_name(step)).mkdir()
        if has_manifest:
            (folder / step_name(step) / MANIFEST).touch()
    assert steps_in(folder) == sorted(is_complete)
    assert complete_steps(folder) == sorted(
        step for step, has_manifest in is_complete.items() if has_manifest
    )


@pytest.mark.parametrize(
    "name", ["latest", "step-1", "step-000000040", "step-0000004x", "step-00000040.bak", "step-٠٠٠٠٠٠٤٠"]
)
def test_other_folder_names_are_not_steps(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / MANIFEST).touch()
    (tmp_path / "step-00000007").touch()  # a file
    assert not is_step_name(name)
    assert steps_in(tmp_path) == complete_steps(tmp_path) == []
    assert complete_steps(tmp_path / "nowhere") == []


def test_files_are_handled_without_torch():
    code = "import sys, megalowbit.durable_files; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "records.jsonl")
    thread = threading.Thread(target=durable.sync, args=(tmp_path / "records.jsonl",), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
