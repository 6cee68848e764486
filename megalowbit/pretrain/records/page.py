"""What a run writes for its report: a line about each attempt, and at the end the page itself.

Both are for readers only. A run never fails because of them, but a warning says what is missing and why.
"""

from __future__ import annotations

import logging
import platform
import shlex
import sys
from typing import Any

from megalowbit.engine.run_checks.ranks_agree import package_digest, version_of
from megalowbit.pretrain.components.machine.throughput import name_of
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.records.lines import num_parameters
from megalowbit.records.files import REPORT
from megalowbit.report.page import write_report

logger = logging.getLogger(__name__)

LIBRARIES = ("megalowbit", "torch", "deepspeed", "transformers", "triton")


def attempt_facts(job: Job) -> dict[str, Any]:
    """With what this attempt trains, and how much of the model is in low bits; of the main process."""
    try:
        return _attempt_facts(job)
    except Exception as error:  # anything at all: a line for readers is not worth a run
        logger.warning("attempts.jsonl lacks the environment of this attempt: %s", error)
        return {}


def _attempt_facts(job: Job) -> dict[str, Any]:
    recipe, report = job.recipe, job.report
    stage = job.engine.zero_optimization_stage()
    fields = {
        "input": "q_forward_input",
        "weight": "q_forward_weight",
        "output gradient": "q_backward_outputgrad",
    }
    recipes = dict.fromkeys(recipe.of_layer(each.name) for each in report.swapped)
    formats = {
        operand: " or ".join(dict.fromkeys(getattr(each, field) for each in recipes))
        for operand, field in fields.items()
    }
    return {
        "device": name_of(job.engine.device),
        "layout": f"{job.engine.process_grid}" + (f", ZeRO {stage}" if stage else ""),
        "python": platform.python_version(),
        **{name: version_of(name) for name in LIBRARIES},
        "code": package_digest(),
        "command": shlex.join(sys.argv),
        "parameters": num_parameters(job),
        "low_bit_layers": len(report.swapped),
        "low_bit_weights": sum(each.in_features * each.out_features for each in report.swapped),
        "kept_layers": len(report.kept),
        "formats": formats if report.swapped else {},
    }


def write_page(job: Job) -> str:
    """Write `report.html` into the run folder; call it on the main process.

    Returns:
        A line for the console: where the page is, or why there is none.
    """
    try:
        return f"report: {write_report([job.folder.path])}"
    except Exception as error:  # anything at all: a page is not worth a run
        logger.warning("no %s: %s", REPORT, error)
        return f"no {REPORT} was written: the warning above says why; try megalowbit report {job.folder.path}"
