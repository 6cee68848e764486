"""The package's lines about builds."""

import logging

import pytest

from megalowbit.data.cache.build_lines import reported_builds
from megalowbit.data.cache.built_files import cached_file


def test_lines_of_all_folders_of_the_package_are_repeated_while_it_builds(tmp_path):
    lines = []
    package = logging.getLogger("megalowbit.data")
    before = package.level, list(package.handlers)

    def build(path):
        logging.getLogger("megalowbit.data.packing").info("tokenising %d documents", 3)
        logging.getLogger("megalowbit.data.packing").debug("detail")
        logging.getLogger("megalowbit.engine").warning("of another package")
        path.write_bytes(b"tokens")

    path = tmp_path / "file"
    with reported_builds(lines.append):
        cached_file(path, build)
        path.write_bytes(b"tokenS")
        cached_file(path, build)
    damaged = f"WARNING: {path} is damaged (it does not match its manifest): building it again"
    assert lines == ["data      tokenising 3 documents", damaged, "data      tokenising 3 documents"]
    with reported_builds(lines.append, is_first=False):  # another process of the node has said it
        logging.getLogger("megalowbit.data.packing").info("tokenising %d documents", 3)
    with pytest.raises(RuntimeError), reported_builds(lines.append):
        raise RuntimeError
    package.warning("after it")
    assert (package.level, list(package.handlers)) == before
    assert len(lines) == 3
