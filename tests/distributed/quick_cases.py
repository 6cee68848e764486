"""Which cases run in `make test`; the others run in `make test-all`."""

import pytest


def marked(names, quick):
    """Parameters of a test; those that are not among the quick ones are marked slow."""
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow, id=str(name)) for name in names
    ]
