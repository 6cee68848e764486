"""`python -m megalowbit`: the same as the command `megalowbit`."""

from __future__ import annotations

from megalowbit.commands.table import start

if __name__ == "__main__":
    start()
