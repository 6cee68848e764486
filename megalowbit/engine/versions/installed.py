"""Checks the versions of DeepSpeed, torch and transformers when a run starts.

We use DeepSpeed's internals, torch's kernels determine the results, and we convert transformers' classes. A
run therefore starts only with the versions that results were verified with, unless the user names the
installed version in an environment variable. This allows that version only, not a later one. For DeepSpeed
the
variable is not enough: the contracts that need no running engine are checked (`contracts`), and a broken one
raises. Not covered: a patched copy with an unchanged version.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from functools import cache

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megalowbit.distributed import process_group
from megalowbit.errors import UserError, shown

logger = logging.getLogger(__name__)

# the package defines versions only here; a test compares setup.py and constraints.txt
DEEPSPEED = "0.19.8"
TORCH = "2.13.0"
TRANSFORMERS = ">=5.20,<6"
VARIABLES = {
    "deepspeed": "MEGALOWBIT_ALLOW_DEEPSPEED",
    "torch": "MEGALOWBIT_ALLOW_TORCH",
    "transformers": "MEGALOWBIT_ALLOW_TRANSFORMERS",
}
BROKEN_NAMED = 12


@cache
def check_installed() -> None:
    """Reject versions that megalowbit was not verified with; checked once per process.

    Raises:
        UserError: names the installed version, the supported one and the remedy; for an allowed DeepSpeed,
            the contracts that it breaks.
    """
    import deepspeed

    _check("torch", torch.__version__, TORCH, is_supported=torch.__version__.partition("+")[0] == TORCH)
    if _check("deepspeed", deepspeed.__version__, DEEPSPEED, is_supported=deepspeed.__version__ == DEEPSPEED):
        _check_contracts(deepspeed.__version__)
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return  # the user's model does not need transformers
    _check("transformers", found, TRANSFORMERS, is_supported=_is_in(found, TRANSFORMERS))


def _is_in(version: str, range_: str) -> bool:
    try:
        return Version(version) in SpecifierSet(range_, prereleases=True)
    except InvalidVersion:
        return False


def _check(package: str, found: str, supported: str, *, is_supported: bool) -> bool:
    """Whether an unsupported version is used because the user allowed it."""
    if is_supported:
        return False
    variable = VARIABLES[package]
    allowed = os.environ.get(variable)
    exact = supported if supported[0] in "<>=" else f"=={supported}"
    if allowed == found:
        return True
    note = f"; {variable} is {shown(allowed)}, which allows no other version" if allowed is not None else ""
    checked = ", once its internals have been checked" if package == "deepspeed" else ", unchecked"
    raise UserError(
        f"{package} {found} is installed, but megalowbit is verified only with {supported}{note}: "
        f"pip install '{package}{exact}', or set {variable}={found} to run with it{checked}"
    )


def _check_contracts(found: str) -> None:
    from megalowbit.engine.versions.contracts import broken_contracts, contracts

    broken = broken_contracts()
    if broken:
        named = "; ".join(f"{each.name} ({each.breaks})" for each in broken[:BROKEN_NAMED])
        more = f"; and {len(broken) - BROKEN_NAMED} more" if len(broken) > BROKEN_NAMED else ""
        raise UserError(
            f"deepspeed {found} breaks {len(broken)} of the {len(contracts())} contracts that megalowbit "
            f"depends on: {named}{more}: pip install 'deepspeed=={DEEPSPEED}'"
        )
    if process_group.rank() == 0:
        logger.warning(
            "deepspeed %s instead of %s: the %d contracts that are checked at the start hold, but this "
            "version has not been tested",
            found,
            DEEPSPEED,
            len(contracts()),
        )
