"""What pip installs into an image whose torch must stay: requirements and constraints of megalowbit.

    python requirements.py BASE OURS REQUIREMENTS CONSTRAINTS

Reads the requirements of the installed megalowbit, the constraints of the base image and ours; writes two
files for pip. torch is not among the requirements, because the base has its own build, which no requirement
`torch==2.13.0` accepts; its release must be the one that megalowbit requires. Other packages of the base keep
their versions if megalowbit works with them, because the base was tested with them. Where the base's version
does not fit, our constraint replaces it, with a line. Not covered: requirements of requirements that
contradict the base; pip names those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

TORCH = "torch"


def main(arguments: list[str]) -> None:
    """Run the command line."""
    if len(arguments) != 4:
        raise SystemExit("usage: python requirements.py BASE OURS REQUIREMENTS CONSTRAINTS")
    base, ours, requirements, constraints = map(Path, arguments)
    wanted = required(metadata.requires("megalowbit") or [])
    check_torch(wanted.pop(TORCH), metadata.version(TORCH))
    merged, lines = merge(read(base), read(ours), wanted)
    for line in lines:
        print(line)
    requirements.write_text("".join(f"{each}\n" for each in wanted.values()), encoding="utf-8")
    constraints.write_text("".join(f"{each}\n" for each in merged), encoding="utf-8")


def required(texts: Iterable[str]) -> dict[str, Requirement]:
    """Requirements by name: those of no extra, for this Python and system."""
    found = [Requirement(text) for text in texts]
    return {
        canonicalize_name(each.name): each
        for each in found
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }


def read(path: Path) -> dict[str, Requirement]:
    """The constraints of a file, by name.

    Raises:
        SystemExit: a line is not a constraint.
    """
    lines = [line.partition(" #")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    try:
        return required(line for line in lines if line and not line.startswith("#"))
    except InvalidRequirement as error:
        raise SystemExit(f"{path} has a line that is not a constraint ({error}): remove it") from None


def check_torch(wanted: Requirement, found: str) -> None:
    """Reject a base whose torch is a build of another release than the required one.

    Raises:
        SystemExit: it is.
    """
    release = Version(found).base_version
    if not wanted.specifier.contains(release):
        raise SystemExit(
            f"the base has torch {found}, a build of {release}, and megalowbit requires {wanted}"
        )


def merge(
    base: dict[str, Requirement], ours: dict[str, Requirement], wanted: dict[str, Requirement]
) -> tuple[list[Requirement], list[str]]:
    """Constraints for pip, and a line for each of the base that is replaced.

    The base's constraint holds unless it excludes what megalowbit requires; torch's always holds.
    """
    merged, lines = dict(base), []
    for name, constraint in ours.items():
        if name == TORCH:
            continue
        if name in base and not contradicts(base[name], wanted.get(name)):
            continue
        if name in base:
            lines.append(f"{base[name]} of the base is replaced by {constraint}: {wanted[name]} is required")
        merged[name] = constraint
    for name in sorted(wanted.keys() & (base.keys() - ours.keys())):
        if contradicts(base[name], wanted[name]):
            lines.append(f"{base[name]} of the base is dropped: {wanted[name]} is required")
            del merged[name]
    for constraint in merged.values():
        constraint.marker = None  # those that do not hold here are left out already
    return list(merged.values()), lines


def contradicts(constraint: Requirement, wanted: Requirement | None) -> bool:
    """Whether a constraint to one version excludes the requirement; others are left to pip."""
    pins = [each.version for each in constraint.specifier if each.operator == "=="]
    return wanted is not None and any(
        not pin.endswith(".*") and not wanted.specifier.contains(pin, prereleases=True) for pin in pins
    )


if __name__ == "__main__":
    main(sys.argv[1:])
