"""The one exception for mistakes a user can mend.

Everything else that goes wrong is a defect of ours and keeps its traceback. The command lines print a
`UserError` as a single line and exit with code 2, so its message must stand alone: it names the thing, its
value and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong name, value, file or combination, with the remedy in its message."""


def unknown_name(what: str, value: object, known: Iterable[str]) -> UserError:
    """Build the error for a name that is not in `known`, naming the nearest one.

    Args:
        what: what is being named, as the user would call it (`"recipe"`).
        value: what the user wrote.
        known: the valid names, in the order they should be listed.
    """
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {what} {value!r}: {hint}known: {', '.join(names)}")
