"""Checks the additional sbatch options in a cluster's file: the job script sets some options itself.

If an option is given twice, SLURM uses the last one. A user's option could therefore turn off requeueing, or
move the log to another place. An `#SBATCH` line may contain several options, but in the cluster's file each
string must be one option, so that each can be checked. Like sbatch, this accepts abbreviated long options.
"""

from __future__ import annotations

import re
import shlex

from megalowbit.errors import UserError, shown

# long option: (short option, key of the cluster's file that sets it; None: it cannot be changed)
OWN_OPTIONS: dict[str, tuple[str | None, str | None]] = {
    "partition": ("p", "partition"),
    "account": ("A", "account"),
    "qos": ("q", "qos"),
    "reservation": (None, "reservation"),
    "constraint": ("C", "constraint"),
    "exclude": ("x", "exclude"),
    "time": ("t", "time"),
    "nodes": ("N", "nodes"),
    "ntasks": ("n", "tasks_per_node"),
    "ntasks-per-node": (None, "tasks_per_node"),
    "cpus-per-task": ("c", "cpus_per_task"),
    "gres": (None, "gpus_per_node"),
    "gpus": ("G", "gpus_per_node"),
    "gpus-per-node": (None, "gpus_per_node"),
    "mem": (None, "memory"),
    "job-name": ("J", "job_name"),
    "signal": (None, "signal_seconds"),
    "array": ("a", None),
    "chdir": ("D", None),
    "output": ("o", None),
    "error": ("e", None),
    "open-mode": (None, None),
    "requeue": (None, None),
    "no-requeue": (None, None),
    "wrap": (None, None),
    # with these, sbatch queues no job or does not print its id at once
    "test-only": (None, None),
    "wait": ("W", None),
    "quiet": ("Q", None),
    "help": ("h", None),
    "usage": (None, None),
    "version": ("V", None),
}
SHORT_FLAGS = "HOhksQvVW"  # flags without a value: further letters in the same word are further options
LONG_OF_SHORT = {short: long for long, (short, _) in OWN_OPTIONS.items() if short is not None}


def check_sbatch_option(option: str) -> None:
    """Reject a string that is not one sbatch option (`"--mail-type=END"`), or is one that the script sets."""
    match = re.fullmatch(r"--?(?P<name>[A-Za-z][\w-]*)[^\x00-\x1f\x7f]*", option)
    if match is None:
        raise UserError(f"{shown(option)} is not an option on one line: write it like '--mail-type=END'")
    if not _is_one(option):
        raise UserError(
            f"{shown(option)} is more than one option, or its value has spaces: write each option as a "
            "separate string, and quote spaces"
        )
    written = match["name"] if option.startswith("--") else LONG_OF_SHORT.get(match["name"][0])
    names = [] if written is None else [each for each in OWN_OPTIONS if each.startswith(written)]
    if names:
        _, key = OWN_OPTIONS[written if written in names else names[0]]
        remedy = f"use the key {key!r}" if key is not None else "leave it out, because it cannot be changed"
        raise UserError(f"{shown(option)} is set by the script: {remedy}")


def _is_one(option: str) -> bool:
    """Whether the string is a single option: one word, or `-x` or `--name` followed by a value."""
    try:
        name, *rest = shlex.split(option)
    except ValueError:  # an unclosed quote
        return False
    is_long = name.startswith("--")
    is_flag = not is_long and name[1] in SHORT_FLAGS
    if is_flag and name[2:]:
        return False
    if not rest:
        return True
    takes_word = "=" not in name and not is_flag and (is_long or len(name) == 2)
    return takes_word and len(rest) == 1 and not rest[0].startswith(("-", "#"))
