"""The first GPU hour, on a machine without a GPU: its steps run, and say what they could not check."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megalowbit as mlb
from benchmarks.first_hour import bits, memory, model, optimizer, runner
from benchmarks.first_hour import run as run_step
from benchmarks.first_hour.findings import Finding, at_least, at_most, expect, info, skip
from benchmarks.first_hour.machine import commit_of, file_system_of
from benchmarks.first_hour.report import STEP, Report
from benchmarks.first_hour.runner import STEPS, Step
from benchmarks.first_hour.session import NO_GPU, Session, device_name
from megalowbit.errors import UserError
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import EncodeRequest

HERE = ("1 × NVIDIA H200", "0a1b2c3")  # device and commit
ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "first_gpu_hour.py"
FAILING = """
import os
from benchmarks.first_hour.findings import at_most, info
def check(session):
    yield info("first", 1.0, " ms")
    {}
"""


@pytest.fixture
def here(monkeypatch):
    """Device and commit of quick tests, which need not look for them."""
    monkeypatch.setattr(runner, "found_device", lambda say: HERE[0])
    monkeypatch.setattr(runner, "commit_of", lambda root: HERE[1])


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (at_most("x", 1.0, 2.0, " µs", warn=1.5), "pass"),
        (at_most("x", 1.7, 2.0, " µs", warn=1.5), "warn"),
        (at_most("x", 2.1, 2.0, " µs", warn=1.5), "fail"),
        (at_most("x", math.nan, 2.0, " µs"), "fail"),
        (at_least("x", 0.98, 0.90, " ×", warn=0.97), "pass"),
        (at_least("x", 0.95, 0.90, " ×", warn=0.97), "warn"),
        (at_least("x", 0.80, 0.90, " ×", warn=0.97), "fail"),
        (at_least("x", math.nan, 0.9, " ×"), "fail"),
        (expect("x", True, 3, "3"), "pass"),
        (expect("x", False, 2, "3"), "fail"),
        (expect("x", False, 2, "3", is_hard=False), "warn"),
        (info("x", 2.0, " ms"), "info"),
        (skip("x", "no GPU"), "skip"),
    ],
)
def test_a_verdict_follows_from_value_and_limits(finding, status):
    assert finding.status == status


def test_figures_from_1000_on_are_written_out(tmp_path):
    report = Report(tmp_path, *HERE)
    for finding in (
        info("speed", 123456.0, " tokens/s"),
        info("ratio", 1.23456, " ×"),
        at_most("launches", 1234.5, 98765.0, " µs", warn=12345.0),
        at_least("rate", 12.0, 2.5e6, " B/s"),
        expect("bytes", True, 7654321, "whole", " bytes"),
        expect("same", True, True, "equal"),
        at_most("error", 1.5e-7, 1e-6, " relative"),
        at_most("lost", math.inf, 1e20, ""),
    ):
        report.add("bits", finding, 1.0)
    table = report.write_summary({"bits": "Bits"}).read_text(encoding="utf-8").splitlines()
    found = [line.split(" | ")[1:4] for line in table if line.startswith("| Bits")]
    assert found == [
        ["speed", "123,500 tokens/s", ""],
        ["ratio", "1.235 ×", ""],
        ["launches", "1,234 µs", "≤ 12,340, fail > 98,760 µs"],
        ["rate", "12 B/s", "≥ 2,500,000 B/s"],
        ["bytes", "7,654,321 bytes", "whole"],
        ["same", "True", "equal"],
        ["error", "1.5e-07 relative", "≤ 1e-06 relative"],
        ["lost", "inf", "≤ 1e+20"],
    ]


def test_the_summary_has_every_row_and_the_worst_status_closes_a_step(tmp_path):
    report = Report(tmp_path)
    report.add("bits", at_most("encoding", 3.0, 0.0, " different bytes", note="a | b"), 1.0)
    report.add("bits", skip("sanitizer", "not in PATH"), 0.0)
    assert report.close("bits", 2.0) == "fail"
    report.add("run", Finding("copy", "pass", 4.2, "≥ 4 TB/s", "", 1830.0, 410.2, " TB/s"), 1.0)
    with report.path.open("a") as file:
        file.write('{"step": "run", "che')  # the process was killed while it wrote
    assert not report.is_done("run")
    text = report.write_summary({"bits": "2 bits", "run": "6 a run", "memory": "7 memory"}).read_text()
    assert "| 2 bits | encoding | 3 different bytes | ≤ 0 different bytes | **fail** |  | a \\| b |" in text
    assert "| 2 bits | sanitizer |  |  | skip |  | not in PATH |" in text
    assert "| 6 a run | copy | 4.2 TB/s | ≥ 4 TB/s | pass | 1830 MHz, 410 W |  |" in text
    assert "- 1 fail: " in text
    assert "- not finished: 6 a run\n- not run: 7 memory\n" in text


def test_a_line_break_of_unicode_in_a_note_loses_no_row(tmp_path):
    report = Report(tmp_path, *HERE)
    for mark in ("\u2028", "\u2029", "\x85", "\x1e", "\v"):
        report.add("bits", Finding("encoding", "fail", note=f"a{mark}b"), 1.0)
        assert report.close("bits", 1.0) == "fail"
    assert len(report.rows()) == 10
    assert report.repair() is None


WHOLE = json.dumps(
    {
        "step": "bits", "check": "one", "status": "info", "value": 1, "limit": "", "note": "",
        "clock_mhz": None, "power_watts": None, "unit": "", "seconds": 0.0, "device": "cpu",
    }
)  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ('{"step": "bits", "che', "line 3 of 3"),  # the process was killed while it wrote
        ('{"step": "bits", "che\n', "line 3 of 3"),
        ("\x00\x00\n[1]\n", "line 3 and 1 more of 4"),
        ('{"step": "bits", "check": "of an older version"}\n', "line 3 of 3"),
        ("[" * 100_000 + "\n", "line 3 of 3"),
        (WHOLE.replace('"clock_mhz": null', '"clock_mhz": "fast"') + "\n", "line 3 of 3"),
        (WHOLE.replace('"clock_mhz": null', '"clock_mhz": 1830'), "line 3 of 3"),
        (WHOLE.replace('"info"', '"fine"') + "\n", "line 3 of 3"),
    ],
)
def test_a_damaged_report_is_kept_and_told_in_one_line(damage, line, tmp_path):
    report, said = Report(tmp_path, *HERE), []
    report.add("machine", info("driver", "1"), 0.0)
    report.close("machine", 0.0)
    with report.path.open("a") as file:
        file.write(damage)
    before = report.path.read_bytes()
    assert runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert said[:2] == [
        f"{report.path}: {line} cannot be read and is left out; report.damaged-1.jsonl has the whole file",
        "0 machine and install: 1 info (done before)",
    ]
    assert (tmp_path / "report.damaged-1.jsonl").read_bytes() == before
    assert [row["check"] for row in report.rows()] == ["driver", STEP]
    said.clear()
    assert runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert said[0] == "0 machine and install: 1 info (done before)"


def test_times_of_a_cpu_are_called_noise_and_its_counts_are_not(tmp_path):
    for device, step in (("cpu", "layer"), ("cuda", "model")):
        report = Report(tmp_path, device)
        report.add(step, info("nvfp4", 1.31, " × bf16"), 1.0)
        report.add(step, info("host reads", 3, " reads"), 1.0)
        report.add(step, at_most("encoding", 0, 0, " different bytes"), 1.0)
    text = report.write_summary({"layer": "4 one layer", "model": "9 a whole step"}).read_text()
    assert "| 4 one layer | nvfp4 | 1.31 × bf16 |  | info | CPU, noise |" in text
    assert "| 9 a whole step | nvfp4 | 1.31 × bf16 |  | info |  |" in text
    assert text.count("CPU, noise") == 2  # in the row, and what it means
    assert "no measurements" in text


def passes(report, step):
    """In place of a step."""
    report.add(step.name, expect("kernel", True, 1, "1"), 0.0)


ELSEWHERE = [
    (("cpu", HERE[1]), "on another device (cpu; this is 1 × NVIDIA H200)"),
    (("2 × NVIDIA H200", HERE[1]), "on another device (2 × NVIDIA H200; this is 1 × NVIDIA H200)"),
    ((HERE[0], "fffffff"), "at another commit (fffffff; this is 0a1b2c3)"),
    (("",), "by an earlier version of this tool, which did not keep the device"),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("elsewhere", "where"), ELSEWHERE)
def test_a_step_that_was_done_elsewhere_runs_again_and_says_why(tmp_path, monkeypatch, elsewhere, where):
    before, said = Report(tmp_path, *elsewhere), []
    before.add("machine", skip("a kernel", "no GPU"), 0.0)
    before.close("machine", 0.0)
    monkeypatch.setattr(runner, "_run_in_process", passes)
    assert runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert f"0 machine and install runs again: it was done {where}" in said
    report = Report(tmp_path, *HERE)
    assert [row["check"] for row in report.rows()] == ["a kernel", STEP, "kernel", STEP]
    assert (report.rows()[-1]["device"], report.rows()[-1]["value"]) == HERE
    summary = (tmp_path / "summary.md").read_text()
    assert "- 0 skip: " in summary
    assert "- 1 pass: " in summary
    assert "a kernel" not in summary
    said.clear()
    assert runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert "(done before)" in said[0]
    assert (
        Report(tmp_path, *elsewhere).write_summary({"machine": "0 machine"}).read_text().count("was done")
        == 1
    )


@pytest.mark.usefixtures("here")
def test_a_step_that_was_interrupted_begins_again_and_closed_attempts_stay(tmp_path, monkeypatch):
    report, said = Report(tmp_path, *HERE), []
    report.add("machine", info("first", 1), 0.0)
    report.close("machine", 0.0)
    report.add("machine", info("first", 1), 0.0)  # of a second attempt, which was interrupted
    monkeypatch.setattr(runner, "_run_in_process", passes)
    assert runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert "(done before)" not in said[0]
    assert [row["check"] for row in report.rows()] == ["first", STEP, "kernel", STEP]


def test_an_attempt_without_findings_has_not_the_status_of_the_one_before(tmp_path):
    report = Report(tmp_path, *HERE)
    report.add("machine", expect("kernel", False, 0, "1"), 0.0)
    assert report.close("machine", 0.0) == "fail"
    assert report.close("machine", 0.0) == "skip"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("findings", "status", "counts"),
    [
        (
            [expect("a", True, 1, "1"), skip("b", NO_GPU), skip("c", NO_GPU)],
            "pass",
            "1 pass, 2 skipped (no GPU)",
        ),
        ([skip("a", NO_GPU)], "skip", "1 skipped (no GPU)"),
        (
            [skip("a", NO_GPU), skip("b", "not in PATH"), info("c", 1, " reads")],
            "info",
            "1 info, 2 skipped (summary.md says why)",
        ),
        (
            [
                expect("a", False, 1, "2", is_hard=False),
                expect("b", False, 1, "2"),
                expect("c", True, 1, "1"),
            ],
            "fail",
            "1 fail, 1 warn, 1 pass",
        ),
        ([], "skip", "nothing checked"),
    ],
)
def test_the_line_of_a_step_counts_what_was_checked(tmp_path, monkeypatch, findings, status, counts):
    def run(report, step):
        for finding in findings:
            report.add(step.name, finding, 0.0)

    said = []
    monkeypatch.setattr(runner, "_run_in_process", run)
    runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert f"0 machine and install: {counts}, 0 s" in said
    lines = [line.split()[:2] for line in said if line.startswith("    ")]  # no row about the step itself
    assert lines == [[each.status, f"{each.check}:"] for each in findings if each.status in ("fail", "warn")]
    assert Report(tmp_path, *HERE).rows()[-1]["status"] == status
    said.clear()
    runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert said[0] == f"0 machine and install: {counts} (done before)"


@pytest.mark.usefixtures("here")
def test_a_step_is_announced_before_it_runs(tmp_path, monkeypatch):
    said, said_before = [], []
    monkeypatch.setattr(runner, "_run_in_process", lambda report, step: said_before.extend(said))
    runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    line = f"0 machine and install … (at most 300 s; log: {tmp_path}/logs/machine.log)"
    assert said_before == [line]
    said.clear()
    runner.run_steps(tmp_path, list(STEPS[:1]), say=said.append)
    assert line not in said


def test_figures_of_another_device_are_no_ceilings(tmp_path):
    (tmp_path / "figures.json").write_text('{"copy_bytes_per_second": 1e9}')  # of an earlier version
    here, other = Session(tmp_path, "cpu", "cpu"), Session(tmp_path, "cuda", HERE[0])
    assert here.figures == {}
    other.keep("copy_bytes_per_second", 4e12)
    other.keep("bf16_flops_per_second", 7e14)
    assert other.figures == {"copy_bytes_per_second": 4e12, "bf16_flops_per_second": 7e14}
    assert here.figures == {}
    notes = [finding.note for finding in optimizer.check(here)]
    assert any("run step 1 first" in note for note in notes)
    assert "run step 1 first" in model.utilisation(here, 64, 32, 1.0)
    here.keep("copy_bytes_per_second", 1e10)
    here.keep("bf16_flops_per_second", 1e11)
    notes = [finding.note for finding in optimizer.check(here)]
    assert not any("run step 1 first" in note for note in notes)
    assert "of the products' speed" in model.utilisation(here, 64, 32, 1.0)
    assert other.figures == {}  # the newest of each name is kept


def test_a_commit_with_changes_is_named_by_its_changes(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert commit_of(tmp_path) == "unknown"
    names = []
    git("init")
    for text in ("one", "two", "three"):
        (tmp_path / "file.py").write_text(text)
        if not names:
            git("add", ".")
            git("commit", "-m", "first")
        names.append(commit_of(tmp_path))
    assert len(set(names)) == 3
    assert [name.startswith(f"{names[0]}-dirty-") for name in names] == [False, True, True]


def test_steps_are_chosen_by_name_or_number():
    assert [step.name for step in runner.chosen_steps("3, bits,0")] == ["machine", "bits", "kernels"]
    assert len(runner.chosen_steps(None)) == len(STEPS) == 12
    for wrong in ("layers", "12", "3,nothing"):
        with pytest.raises(
            UserError, match=r"unknown step .*: known: 0 machine, 1 ceilings, .*, 11 launches$"
        ):
            runner.chosen_steps(wrong)


def test_wrong_steps_are_refused_before_torch_is_imported():
    code = (
        "import sys; sys.path.insert(0, 'tools'); import first_gpu_hour\n"
        "sys.exit(9 if first_gpu_hour.main(['--steps', '12']) != 2 or 'torch' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.usefixtures("here")
def test_the_summary_of_an_interrupted_step_says_that_it_is_not_finished(tmp_path, monkeypatch):
    def interrupted(report, step):
        passes(report, step)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_run_in_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run_steps(tmp_path, list(STEPS[:1]), say=[].append)
    summary = (tmp_path / "summary.md").read_text()
    assert "- not finished: 0 machine and install\n- not run: 1 ceilings, " in summary


def test_the_file_system_of_a_path_is_that_of_the_nearest_mount():
    assert file_system_of(Path("/proc/self/status")) == "proc"


def test_rows_of_a_run_are_those_of_its_last_attempt(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 2, "loss": 2.5}\n{"st')
    assert run_step.Run(run_step.rows_of(path), [], "").losses == {1: 3.0, 2: 2.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "row"),
    [
        (
            "raise ValueError('two\\nlines')",
            ("exception", "ValueError", "ValueError: two"),
        ),
        ("os._exit(7)", ("process", "exit code 7", "no output")),
        (
            "import time; time.sleep(60)",
            ("process", "not finished after 15 s", "no output"),
        ),
    ],
)
def test_a_step_that_ends_badly_is_a_row_and_the_next_one_runs(code, row, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(FAILING.format(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    planted = Step("planted", "11 planted", "planted", seconds=15)
    assert not runner.run_steps(tmp_path / "out", [planted, STEPS[0]])
    report = Report(tmp_path / "out")
    first, failed, closed = report.of_step("planted")
    assert first["check"] == "first"
    assert (failed["check"], failed["value"], failed["note"]) == (*row[:2], f"{row[2]}; see logs/planted.log")
    assert (closed["check"], closed["status"]) == (STEP, "fail")
    assert [row["check"] for row in report.of_step("machine")][-1] == STEP


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what is said without a GPU")
def test_every_step_runs_without_a_gpu_and_names_what_it_could_not_check(tmp_path):
    command = [sys.executable, str(TOOL), "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = Report(tmp_path / "results").rows()
    wrong = [row for row in rows if row["status"] == "fail"]
    assert not wrong, wrong
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in rows if row["check"] == STEP] == [step.name for step in STEPS]
    for step in STEPS:
        checked = [row for row in rows if row["step"] == step.name and row["check"] != STEP]
        assert any(row["status"] in ("pass", "info", "warn") for row in checked), step.name
    reasons = [row["note"] for row in rows if row["status"] == "skip" and row["check"] != STEP]
    assert all(reasons)
    assert not any("\n" in reason or "aten::" in reason or "Error" in reason for reason in reasons)
    figures = [
        row for row in rows if isinstance(row["value"], (int, float)) and not isinstance(row["value"], bool)
    ]
    assert all(row["unit"] for row in figures), figures
    summary = (tmp_path / "results" / "summary.md").read_text()
    assert "- not run: " not in summary
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.stdout.count("(done before)") == len(STEPS)


WITH_A_RUN = """
from benchmarks.first_hour import run
def check(session):
    run.sys.executable, run.ROOT = "/bin/sh", session.folder
    yield from run.pretrain(session.folder / "run", 1)
"""


@pytest.mark.slow
def test_a_step_that_is_not_finished_in_time_ends_the_runs_that_it_has_started(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(WITH_A_RUN)
    script = tmp_path / "out" / "launch" / "pretrain.py"  # run by a shell in its place
    script.parent.mkdir(parents=True)
    script.write_text("echo $$ > pid\nexec sleep 300\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not runner.run_steps(tmp_path / "out", [Step("planted", "11 planted", "planted", seconds=25)])
    pid = int((tmp_path / "out" / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("here")
def test_a_failed_step_that_others_depend_on_stops_the_next_attempt_too(tmp_path):
    report, said = Report(tmp_path, *HERE), []
    report.add("machine", Finding("Triton", "fail"), 0.0)
    report.close("machine", 0.0)
    assert not runner.run_steps(tmp_path, list(STEPS[:2]), say=said.append)
    assert said[0] == "0 machine and install: 1 fail (done before)"
    assert said[1].startswith("stopped: ")
    assert not report.is_done("ceilings")


def test_matrices_are_decoded_as_training_decodes_them():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("nvfp4e2m1bnosr", "nvfp4e2m1bnosr:fp32_scale", "mxfp4e2m1bnosr"):
        request = EncodeRequest(x, mlb.quantizer(name).encoding)
        packed = mlb.quantizer(name).quantize(x)
        encoded = backends.encode(request)
        for decoded, transpose in zip(bits.packed_matrices(request, encoded), (False, True), strict=True):
            assert torch.equal(backends.decode(decoded), packed.operand(transpose=transpose)), name


@pytest.mark.parametrize(
    ("ratio", "status"), [(1.0, "pass"), (0.89, "warn"), (1.12, "warn"), (1.16, "fail"), (math.nan, "fail")]
)
def test_memory_above_the_estimate_is_worse_than_below(ratio, status):
    assert memory.verdict("peak", ratio, "").status == status


@pytest.mark.slow
def test_a_quick_step_runs_for_real_and_is_kept_until_it_is_run_again(tmp_path):
    said = []
    machine = STEPS[:1]
    assert runner.run_steps(tmp_path, list(machine), say=said.append)
    rows = Report(tmp_path).of_step("machine")
    if not torch.cuda.is_available():
        assert {row["check"]: row["note"] for row in rows}["compute capability"].startswith("no GPU: ")
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"].startswith(torch.__version__.split("+")[0])
    runner.run_steps(tmp_path, list(machine), say=said.append)
    assert "(done before)" in said[-2]  # the device is found, and is the same
    assert Report(tmp_path).of_step("machine")[-1]["device"] == device_name()
    assert len(Report(tmp_path).of_step("machine")) == len(rows)


@pytest.mark.parametrize("arguments", [("--steps", "3,nothing"), ("--out", str(TOOL))])
def test_a_wrong_argument_is_one_line(arguments, capsys):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import first_gpu_hour
    finally:
        sys.path.pop(0)
    assert first_gpu_hour.main(list(arguments)) == 2
    assert capsys.readouterr().err.count("\n") == 1
