"""Builds the wheel and the source distribution with setuptools, and makes their bytes reproducible.

pyproject.toml names this file as the build backend. setuptools decides what is in the archives. Both are then
written again with the names sorted, one date, one mode for files and one for programs, and no owner: two
builds of the same files are equal, whatever the folder, the umask and the date. SOURCE_DATE_EPOCH sets the
date; by default it is the earliest one that a wheel can have. Not covered: another version of setuptools
writes other metadata, so pyproject.toml pins it, and another zlib may compress to other bytes.

    python tools/build_backend.py dist     # from a checkout: both archives, into the folder dist
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

EARLIEST = 315532800  # 1980-01-01: ZIP files cannot express earlier dates
LATEST = 4354819199  # 2107-12-31, nor later ones
Settings = Mapping[str, object] | None


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """As the build interface of PEP 517 defines it."""
    epoch = source_date()
    shutil.rmtree("build", ignore_errors=True)  # setuptools would pack what an earlier build has left there
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    normalise_wheel(Path(wheel_directory) / name, epoch)
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """As the build interface of PEP 517 defines it."""
    epoch = source_date()
    Path("megalowbit.egg-info/SOURCES.txt").unlink(missing_ok=True)  # setuptools would add files listed there
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    normalise_sdist(Path(sdist_directory) / name, epoch)
    return name


def source_date() -> int:
    """The date of all files, in seconds since 1970.

    Raises:
        SystemExit: SOURCE_DATE_EPOCH is not a number of seconds that a ZIP file can express.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", str(EARLIEST))
    if not (text.isascii() and text.isdigit() and len(text) < 12 and EARLIEST <= int(text) <= LATEST):
        raise SystemExit(
            f"SOURCE_DATE_EPOCH={text!r} is not a date from 1980 to 2107 in seconds since 1970: correct it, "
            "or leave it out"
        )
    return int(text)


def normalise_wheel(path: Path, epoch: int) -> None:
    """Write a wheel again, with sorted names except for its metadata, which stay last, as pip prefers."""
    with zipfile.ZipFile(path) as wheel:
        members = [(info, wheel.read(info)) for info in wheel.infolist()]
    members.sort(key=lambda member: (".dist-info/" in member[0].filename, member[0].filename))
    date = time.gmtime(epoch)[:6]
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for old, data in members:
            new = zipfile.ZipInfo(old.filename, date)
            new.external_attr = (stat.S_IFREG | mode_of(old.external_attr >> 16)) << 16
            new.create_system = 3  # Unix, where the modes have a meaning
            wheel.writestr(new, data, zipfile.ZIP_DEFLATED, 9)
    path.write_bytes(written.getvalue())


def normalise_sdist(path: Path, epoch: int) -> None:
    """Write a source distribution again, with sorted names."""
    with tarfile.open(path) as archive:
        members = [
            (info, data.read() if (data := archive.extractfile(info)) else None)
            for info in archive.getmembers()
        ]
    members.sort(key=lambda member: member[0].name)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for old, data in members:
            new = tarfile.TarInfo(old.name)
            new.type, new.size, new.mtime = old.type, old.size, epoch
            new.mode = 0o755 if old.isdir() else mode_of(old.mode)
            archive.addfile(new, None if data is None else io.BytesIO(data))
    path.write_bytes(gzip.compress(plain.getvalue(), 9, mtime=epoch))


def mode_of(mode: int) -> int:
    """The mode of a file that everybody may read, and execute if its owner may."""
    return 0o755 if mode & stat.S_IXUSR else 0o644


def main(arguments: list[str]) -> None:
    """Build both archives of the checkout that this file is in; prints their paths."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit("usage: python tools/build_backend.py FOLDER")
    target = Path(arguments[0]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    os.chdir(Path(__file__).resolve().parent.parent)
    output = sys.stdout
    sys.stdout = sys.stderr  # setuptools lists each file
    names = [build_sdist(str(target)), build_wheel(str(target))]
    output.write("".join(f"{target / name}\n" for name in names))


if __name__ == "__main__":
    main(sys.argv[1:])
