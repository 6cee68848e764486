"""Writes the report of one or several runs: a page of one file that needs no network.

Pictures are SVG and PNG inside the page, see `drawing/` and docs/decisions/0025. A report of 100,000 steps
has about 0.5 MB.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from megalowbit.durable_files import atomic_file, refuse_special_file
from megalowbit.errors import UserError, file_system_error
from megalowbit.records.files import REPORT
from megalowbit.records.run import RunRecords, read_runs
from megalowbit.report.drawing.chart import NUM_STYLES
from megalowbit.report.drawing.document import document, paragraphs, part
from megalowbit.report.sections import losses, precision, quantisation, settings, training
from megalowbit.report.sections.curves import Drawing
from megalowbit.report.sections.head import head

DOCTYPE = b"<!doctype html"  # a page begins with it
MOST_RUNS = NUM_STYLES  # more lines could not be told apart


def write_report(folders: Sequence[Path], out: Path | None = None, *, spectra: str = "") -> Path:
    """Write the report of some runs, the first of which is the reference.

    Args:
        folders: run folders.
        out: the page; None: `report.html` in the folder of the only run.
        spectra: HTML of the section about singular values.

    Returns:
        the page.

    Raises:
        UserError: a folder is not that of a run with recorded steps, there are too many, the page cannot be
            written, or there is a file in its place that is no page.
    """
    if len(folders) > MOST_RUNS:
        raise UserError(f"{len(folders)} runs are too many for one page: name at most {MOST_RUNS}")
    if out is None and len(folders) > 1:
        raise UserError("the page of several runs belongs to none of their folders: name it with --out FILE")
    path = _page_path(folders[0] / REPORT if out is None else out)
    text = page(read_runs(folders), spectra=spectra)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # JSON may have halves of characters
    try:
        with atomic_file(path.resolve()) as file:  # the target of a link, which stays
            file.write(text)
    except OSError as error:
        remedy = "name another file with --out" if error.errno else "free space"
        raise file_system_error(f"{path} cannot be written ({error.strerror}): {remedy}", error) from error
    return path


def _page_path(path: Path) -> Path:
    """The path of a page; what is there may be replaced only if it is a page, not a run's records."""
    refuse_special_file(path, "--out")
    try:
        with path.open("rb") as file:
            head = file.read(len(DOCTYPE))
    except FileNotFoundError:
        return path
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): name another file with --out"
        raise file_system_error(message, error) from error
    if head.lower() != DOCTYPE:
        raise UserError(f"{path} exists and is no HTML page: name another file with --out, or remove it")
    return path


def page(runs: Sequence[RunRecords], *, spectra: str = "") -> str:
    """The report as HTML."""
    drawing = Drawing(runs)
    sections = {
        "Loss": losses.losses(drawing),
        "Gap": losses.gaps(drawing),
        "Optimizer": training.optimizer(drawing),
        "Speed and memory": training.machine(drawing),
        "Precision": precision.precisions(drawing),
        "Quantisation": quantisation.rates(drawing) + quantisation.maps(drawing),
        "Spectra": spectra,
        "What differs": settings.differences(drawing),
        "Environment": settings.environment(drawing),
        "Configuration": training.others(drawing) + settings.configurations(drawing),
    }
    shown = {title: content for title, content in sections.items() if content}
    anchors = {title: title.lower().replace(" ", "-") for title in shown}
    links = "".join(f'<a href="#{anchors[title]}">{escape(title)}</a>' for title in shown)
    body = "".join(part(title, content, anchor=anchors[title]) for title, content in shown.items())
    title = runs[0].label if len(runs) == 1 else " · ".join(run.label for run in runs)
    return document(title, f"{head(drawing)}<nav>{links}</nav>{body}{_footer(drawing)}", is_live=True)


def _footer(drawing: Drawing) -> str:
    """How the page was made, and what its curves leave out."""
    lines = [
        f"Curves with more than {2 * drawing.bins:,} steps are drawn through the lowest and the highest "
        f"value of each of {drawing.bins:,} bins of equal width; means are over all steps. Values under the "
        "pointer are read from the picture, so they are exact to about a thousandth of the range.",
        f"Written by megalowbit report on {time.strftime('%Y-%m-%d at %H:%M %Z')}.",
    ]
    return f"<footer>{paragraphs(lines, 'note')}</footer>"
