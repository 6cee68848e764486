"""Losses in blocks, and what is recorded about the origin of a result."""

import hashlib
import math
import random
import statistics
import struct
from pathlib import Path

import pytest
import torch
from studies import RESULT

from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.study.results import (
    GPU_UNITS,
    VERSIONS,
    LossMeans,
    Origin,
    block_of,
    command_of,
    made_with,
    result_of,
)

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("block", [1, 5, 25])
@pytest.mark.parametrize("num_steps", [200, 188])
def test_means_of_windows_follow_from_blocks(block, num_steps):
    draw = random.Random(block)
    losses = [None if draw.random() < 0.1 else draw.uniform(1, 5) for _ in range(num_steps)]
    losses[50:100] = [None] * 50  # whole blocks without a loss
    kept = LossMeans.of(losses, block)
    for window in (25, 50, 100):
        for step in range(25, num_steps + 1, 25):
            finite = [loss for loss in losses[max(0, step - window) : step] if loss is not None]
            found = kept.mean_to(step, window)
            if finite:
                assert found == pytest.approx(statistics.fmean(finite), abs=1e-9)
            else:
                assert math.isnan(found)
    assert math.isnan(kept.mean_to(225, 25))  # after the end
    if block == 25:
        with pytest.raises(ValueError, match="step and window must be multiples of 25: 30, 25"):
            kept.mean_to(30, 25)


def test_the_sum_shows_a_change_of_one_bit_that_means_do_not():
    losses = [2.0] * 50
    changed = [*losses[:-1], math.nextafter(2.0, 3.0)]
    before, after = LossMeans.of(losses, 25), LossMeans.of(changed, 25)
    assert before.means == after.means
    assert before.sha256 != after.sha256
    assert before.sha256 == hashlib.sha256(struct.pack("<d", 2.0) * 50).hexdigest()
    assert before.sha256 == LossMeans.of(losses, 10).sha256


def test_blocks_divide_windows_marks_and_steps():
    assert block_of(150, (300, 600, 2000), 1500) == 25  # the mark at 2,000 is after the end
    assert block_of(150, (300, 600, 2000), 3000) == 25
    assert block_of(100, (), 1500) == 25
    assert block_of(12, (40,), 100) == 4
    assert block_of(7, (), 15) == 1


MEANS = {"block": 5, "steps": 8, "means": [1.0, 2.0], "lost": [], "sha256": "0" * 64}
DAMAGED = [
    ("losses", ["x"]),
    ("losses", {}),
    ("losses", {"block": 0, "steps": 0, "means": [], "lost": [], "sha256": ""}),
    ("losses", {"block": 5, "steps": 11, "means": [1.0, 1.0], "lost": [], "sha256": ""}),
    ("losses", {**MEANS, "sha256": "zz"}),
    ("losses", {**MEANS, "steps": 10**15}),
    ("losses", {**MEANS, "lost": [3, 2]}),
    ("losses", {**MEANS, "lost": [2, 2]}),
    ("losses", {**MEANS, "lost": [9]}),
    ("losses", {**MEANS, "lost": [0]}),
    ("losses", {**MEANS, "means": [1.0, None]}),
    ("losses", {**MEANS, "lost": [6, 7, 8]}),
    ("losses", {**MEANS, "means": [1.0, -1.0]}),
    ("losses", {**MEANS, "means": [1.0, 3.5e38]}),  # float32 ends at 3.403e38
    ("losses", [1.0, -1.0]),
    ("losses", [1.0, 3.5e38]),
    ("settings", {"cell": {}}),
    ("tokens", -1),
    ("tokens", True),
    ("diverged_at", 1.5),
    ("heldout", {}),
    ("heldout", {"bf16": -1.0, "own": 1.0, "tokens": 3}),
    ("heldout", {"bf16": "2", "own": 1.0, "tokens": 3}),
    ("cost", {}),
    ("cost", {**RESULT["cost"], "cpu_seconds": math.nan}),
    ("cost", {**RESULT["cost"], "wall_seconds": -1.0}),
    ("made_with", {}),
    ("made_with", {**RESULT["made_with"], "torch": None}),
    ("made_with", {**RESULT["made_with"], "gemm": "fp8"}),
]


@pytest.mark.parametrize(("key", "value"), DAMAGED, ids=str)
def test_damage_is_one_line_that_names_the_key(key, value):
    with pytest.raises(UserError) as caught:
        result_of({**RESULT, key: value}, "a/result.json", "remove it")
    message = str(caught.value)
    assert message.startswith(f"a/result.json is no result of this version ('{key}")
    assert message.endswith("' is missing or damaged): remove it")
    assert "pydantic" not in message
    assert "[" not in message
    assert "\n" not in message
    for undamaged in (
        {},
        {"losses": MEANS},
        {"losses": {**MEANS, "means": [1.0, None], "lost": [6, 7, 8]}},
        {"losses": {**MEANS, "means": [0.0, 3.4e38]}},
    ):
        result_of({**RESULT, **undamaged}, "", "")


def test_a_gpu_is_the_processor_of_a_cell_unless_the_run_leaves_it_unused(monkeypatch):
    cpu = made_with(ROOT)["processor"]
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert made_with(ROOT)["processor"] == "NVIDIA H100 80GB HBM3" != cpu
    assert made_with(ROOT)["units"] == GPU_UNITS
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert made_with(ROOT)["processor"] == cpu


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({}, True),
        ({"gemm": None}, True),  # of a baseline without low-bit layers
        ({"gemm": "fp32"}, False),
        ({"gemm": "fp32", "units": None}, False),
        ({"units": "avx2"}, False),
        ({"units": None}, None),  # of an earlier version, which did not record them
        ({"processor": "two"}, False),
        ({"processor": "two", "units": None}, False),
        ({"commit": None, "command": []}, True),
    ],
)
def test_places_differ_by_the_processor_its_instructions_and_the_dtype_of_gemms(other, is_same):
    origin = Origin.model_validate({**RESULT["made_with"], "gemm": "bf16", "units": "avx512f"})
    changed = origin.model_copy(update=other)
    assert origin.same_place(changed) is is_same
    assert changed.same_place(origin) is is_same
    assert origin.place() == "one (avx512f), GEMMs in bf16"


@pytest.mark.parametrize(
    ("units", "gemm", "is_same"), [("avx2", "bf16", True), ("avx2", "fp32", False), (None, "fp32", None)]
)
def test_a_cell_in_high_precision_without_a_recorded_dtype_was_multiplied_in_bf16(units, gemm, is_same):
    earlier = Origin.model_validate({**RESULT["made_with"], "units": "avx2"})
    later = earlier.model_copy(update={"gemm": gemm, "units": units})
    assert earlier.same_place(later) is is_same
    assert later.same_place(earlier) is is_same


def test_processors_of_one_name_without_recorded_instructions_may_differ():
    origin = Origin.model_validate(RESULT["made_with"])
    assert origin.same_place(origin.model_copy()) is None
    assert origin.same_place(origin.model_copy(update={"processor": "two"})) is False
    assert origin.place() == "one"


def test_gpus_of_one_name_are_of_one_kind():
    origin = Origin.model_validate({**RESULT["made_with"], "processor": "NVIDIA H100", "units": GPU_UNITS})
    assert origin.same_place(origin.model_copy()) is True
    assert origin.same_place(origin.model_copy(update={"processor": "NVIDIA H200"})) is False
    assert origin.place() == "NVIDIA H100"


def test_instructions_are_recorded_with_what_limits_them(monkeypatch, tmp_path):
    monkeypatch.setattr("megalowbit.processor.CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    for limit, flags, expected in (
        ("", "avx2", "avx2"),
        ("", "avx512f avx2", "avx512f"),
        ("", "sse", "unknown"),
        ("avx2", "avx512f avx2", "avx512f, ONEDNN_MAX_CPU_ISA=avx2"),
    ):
        (tmp_path / "cpuinfo").write_text(f"model name: One name\nflags: {flags}\n")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        made = made_with(ROOT)
        assert (made["processor"], made["units"]) == ("One name", expected)


def test_versions_are_compared_without_the_build_and_if_both_have_them():
    origin = Origin.model_validate(RESULT["made_with"])  # without numpy and DeepSpeed
    present = Origin.model_validate(made_with(ROOT))
    assert all(getattr(present, name) for name in VERSIONS)
    same = {"torch": "2.9.0+cu130", "transformers": origin.transformers, "python": "3.14", "processor": "two"}
    assert origin.other_version(present.model_copy(update=same)) is None
    other = present.model_copy(update={**same, "torch": "2.9.1+cpu"})
    assert origin.other_version(other) == ("torch", "2.9.0", "2.9.1")
    assert present.other_version(present.model_copy(update={"numpy": "1.0"})) == (
        *("numpy", present.numpy),
        "1.0",
    )


def test_a_command_has_no_folders_of_the_machine():
    root = Path("/home/somebody/megalowbit")
    study = f"{root}/configs/studies/gap.json"
    given = [f"{root}/tools/study.py", study, "--out", "/data/runs/gap", "-j", "2"]
    expected = ["study.py", "configs/studies/gap.json", "--out", "gap", "-j", "2"]
    assert command_of(given, root) == expected
    assert command_of(expected, root) == expected
