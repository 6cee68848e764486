"""A tiny study, whose cells are forked."""

from studies import study

__all__ = ["study"]
