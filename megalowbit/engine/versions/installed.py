"""Which versions of other packages a run may start with: those that results were verified with.

DeepSpeed's internals are used, torch's kernels decide what is computed, transformers' classes are converted.
So another version is refused at the start, unless the user names the version found in a variable: that is
consent to this one, and not to the next one that an installation may bring. For DeepSpeed consent is not
enough: the contracts that need no running engine are checked first (`contracts`), and where one is
broken the run is refused all the same. Not covered: a patched copy that keeps its version.
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

# the one place for them in the package; a test compares setup.py and constraints.txt
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
    """Refuse to start with versions that megalowbit was not verified with; quick, and asked once a process.

    Raises:
        UserError: names the version found, the supported one and the remedy; of a DeepSpeed that was allowed,
            what it breaks.
    """
    import deepspeed

    _check("torch", torch.__version__, TORCH, is_supported=torch.__version__.partition("+")[0] == TORCH)
    if _check("deepspeed", deepspeed.__version__, DEEPSPEED, is_supported=deepspeed.__version__ == DEEPSPEED):
        _check_contracts(deepspeed.__version__)
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return  # a model of the user's own needs none
    _check("transformers", found, TRANSFORMERS, is_supported=_is_in(found, TRANSFORMERS))


def _is_in(version: str, range_: str) -> bool:
    try:
        return Version(version) in SpecifierSet(range_, prereleases=True)
    except InvalidVersion:
        return False


def _check(package: str, found: str, supported: str, *, is_supported: bool) -> bool:
    """Whether another version is used with the user's consent."""
    if is_supported:
        return False
    variable = VARIABLES[package]
    allowed = os.environ.get(variable)
    exact = supported if supported[0] in "<>=" else f"=={supported}"
    if allowed == found:
        return True
    told = f"; {variable} is {shown(allowed)}, which allows no other version" if allowed is not None else ""
    checked = ", once its internals have been checked" if package == "deepspeed" else ", unchecked"
    raise UserError(
        f"{package} {found} is installed, and megalowbit is verified with {supported} alone{told}: "
        f"pip install '{package}{exact}', or set {variable}={found} to run with it{checked}"
    )


def _check_contracts(found: str) -> None:
    from megalowbit.engine.versions.contracts import broken_contracts, contracts

    broken = broken_contracts()
    if broken:
        named = "; ".join(f"{each.name} ({each.breaks})" for each in broken[:BROKEN_NAMED])
        more = f"; and {len(broken) - BROKEN_NAMED} more" if len(broken) > BROKEN_NAMED else ""
        raise UserError(
            f"deepspeed {found} breaks {len(broken)} of the {len(contracts())} contracts that megalowbit has "
            f"with it: {named}{more}: pip install 'deepspeed=={DEEPSPEED}'"
        )
    if process_group.rank() == 0:
        logger.warning(
            "deepspeed %s instead of %s: the %d contracts that are checked at the start hold, but no test "
            "has run with it",
            found,
            DEEPSPEED,
            len(contracts()),
        )
