import hashlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.engine.atomic_file import sha256_of, write_atomically


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_a_file_appears_with_its_content_and_nothing_beside_it(tmp_path):
    write_atomically(tmp_path / "a", lambda file: file.write(b"new"))
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, error):
    (tmp_path / "a").write_bytes(b"old")

    def write(file):
        file.write(b"half of it")
        raise error

    with pytest.raises(type(error)):
        write_atomically(tmp_path / "a", write)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names_in(tmp_path) == ["a"]


@given(st.binary(max_size=9_000_000 // 1000), st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_checksum_equals_hashlib_of_the_whole(tmp_path_factory, piece, repeat):
    data = piece * (1 + repeat * 400)
    path = tmp_path_factory.mktemp("sum") / "data"
    path.write_bytes(data)
    assert sha256_of(path) == hashlib.sha256(data).hexdigest()


def test_files_are_handled_without_deepspeed_or_torch():
    code = (
        "import sys, megalowbit.engine.atomic_file; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
