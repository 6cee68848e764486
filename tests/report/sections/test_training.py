"""Optimizer and machine: loss scale with skips, where gradients overflowed, MFU, memory, other figures."""

import re

from made_runs import write_run

from megalowbit.records.run import read_runs
from megalowbit.report.sections.curves import Drawing
from megalowbit.report.sections.training import machine, optimizer, others

SKIPPED = (3, 4, 40)


def scaling(step, record):
    record["loss_scale"] = 2.0 ** (16 + step // 30)
    record["skipped_steps"] = sum(step >= each for each in SKIPPED)
    if step in SKIPPED:
        record |= {"grad_norm": None, "skipped/tensor": f"h.{step // 10}.bias", "skipped/rank": 0}
    return record


def drawing_of(tmp_path, **more):
    return Drawing(read_runs([write_run(tmp_path / "run", 100, **more)]))


def test_the_loss_scale_is_in_powers_of_two_with_a_mark_for_each_skip(tmp_path):
    html = optimizer(drawing_of(tmp_path, rows=scaling))
    chart = html[html.index("Loss scale") :]
    assert re.findall('class="y"[^>]*>([^<]*)<', chart) == ["2¹⁶", "2¹⁷", "2¹⁸", "2¹⁹"]
    (path,) = re.findall(r'<path class="mark [^"]*" d="([^"]*)"', chart)
    assert [float(each) / 10 for each in re.findall(r"M([0-9.]+) ", path)] == list(SKIPPED)
    assert "skipped steps (3)" in chart
    assert re.findall("<td>([^<]*)</td>", chart) == ["h.0.bias", "2", "h.4.bias", "1"]


def test_a_constant_loss_scale_without_skips_has_no_chart(tmp_path):
    html = optimizer(drawing_of(tmp_path))
    assert "Loss scale" not in html
    assert "Gradient norm" in html


def test_utilisation_is_mfu_if_it_is_known(tmp_path):
    def rows(step, record):
        del record["mfu"]
        return record | {"tflops_per_device": 0.1, "device_memory_gib": 70.0, "milliseconds/unscale": 1.0}

    assert "% of the peak" in machine(drawing_of(tmp_path / "known"))
    html = machine(drawing_of(tmp_path / "unknown", rows=rows))
    assert "No MFU, because the peak of the device is not known" in html
    assert "% of the peak" not in html
    assert "GPU, peak so far" in html
    assert "host, resident" in html
    assert "Phases of the optimizer step" in html


def test_figures_without_a_section_are_shown_folded(tmp_path):
    html = others(drawing_of(tmp_path, rows=lambda step, record: record | {"num_zeros": step}))
    assert re.findall("<figcaption>([^<]*)", html) == ["num_zeros"]
    assert others(drawing_of(tmp_path / "none")) == ""
