"""Benchmarks need no data and write only what is asked for; their figures follow from their times."""

import json
import os
import re
from statistics import median

import pytest
import torch

from launchers import write_config
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.process_start import CUBLAS_VARIABLE
from megalowbit.errors import UserError
from megalowbit.pretrain.command_line import main, with_profile
from megalowbit.pretrain.components.profiler import ProfileSettings
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.benchmark import BenchmarkResult, benchmark

FLOPS_PER_TOKEN = 6 * (2 * 12 * 32 * 32 + 256 * 32) + 12 * 2 * 32 * 32  # of the tiny GPT-2
TOKENS = 2 * 2 * 32  # micro-batch, micro-batches, sequence length


def files(folder):
    """All files but compiled kernels, which the first test of a process may leave in its cache."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("cache/")}


@pytest.fixture
def _algorithms_of_before():
    variable = os.environ.get(CUBLAS_VARIABLE)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    if variable is None:
        os.environ.pop(CUBLAS_VARIABLE, None)


@pytest.mark.usefixtures("_algorithms_of_before")
def test_a_benchmark_needs_no_data_and_leaves_no_files(resolve, tmp_path, capsys, monkeypatch):
    config = resolve("megalowbit.telemetry.peak_tflops=0.25", "megalowbit.run.deterministic=true")
    (tmp_path / "text.txt").unlink()
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    benchmark(config, ProcessIdentity(), steps=3, folder=tmp_path / "out")
    assert files(tmp_path) - before == {"out/benchmark.json"}
    found = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    speed = TOKENS / median(found["seconds"])
    assert len(found["seconds"]) == 3
    assert found["tokens_per_second"] == pytest.approx(speed)
    assert found["speeds"]["tflops_per_device"] == pytest.approx(FLOPS_PER_TOKEN * speed / 1e12)
    assert found["speeds"]["mfu"] == pytest.approx(FLOPS_PER_TOKEN * speed / 0.25e12)
    output = capsys.readouterr().out
    assert "random tokens" in output
    started = output.index("warm-up: 5 steps, which compile kernels and are not counted\n")
    ended = re.search(r"the warm-up took \d+\.\d s; now 3 steps are timed\n", output)
    assert started < ended.start() < output.index(" Benchmark ")
    assert " Benchmark " in output
    assert "MFU (PaLM)" in output
    assert torch.are_deterministic_algorithms_enabled()  # times are those of the configured run


@pytest.mark.slow
def test_a_profile_is_written_to_the_folder(resolve, tmp_path):
    config = resolve('megalowbit.profile={"first_step": 2, "steps": 1}')
    benchmark(config, ProcessIdentity(), steps=1, folder=tmp_path / "out")
    assert (tmp_path / "out" / "profile" / "steps-2-2-rank-0.trace.json.gz").exists()
    assert json.loads((tmp_path / "out" / "benchmark.json").read_text())["profiled_steps"] == 0  # a warm-up


def test_the_summary_says_how_many_counted_steps_were_profiled(resolve, tmp_path, capsys):
    config = resolve('megalowbit.profile={"first_step": 5, "steps": 2}', "megalowbit.profile.memory=false")
    result = benchmark(config, ProcessIdentity(), steps=2, folder=tmp_path / "out")
    assert result.profiled_steps == 1  # 5 is the last step of the warm-up
    assert "\nprofiled    1 of the 2 steps, which are slower\n" in capsys.readouterr().out


def test_a_profile_without_a_folder_is_rejected(resolve):
    config = resolve("megalowbit.profile={}")
    with pytest.raises(UserError, match="needs a folder for the trace"):
        benchmark(config, ProcessIdentity(), steps=1, folder=None)


def test_steps_to_profile_after_the_benchmark_are_rejected(resolve, tmp_path):
    config = resolve("megalowbit.run.steps=90", "megalowbit.profile.first_step=80")
    with pytest.raises(UserError, match="ends after step 7, the last of this benchmark"):
        benchmark(config, ProcessIdentity(), steps=2, folder=tmp_path / "out")


def test_the_summary_is_ascii_that_fits_a_screen():
    result = BenchmarkResult(
        seconds=(0.25, 0.5, 2.0),
        tokens_per_step=1_048_576,
        skipped_steps=1,
        profiled_steps=0,
        speeds={"tflops_per_device": 412.34, "mfu": 0.4168, "mfu_palm": 0.43},
        peak_memory=61 * 2**30,
    )
    text = result.render()
    assert text.isascii()
    assert "profiled" not in text
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "3 (1 skipped)",
        "0.5 s median",
        "0.25 to 2 s",
        "2.10M",
        "412.3 per device",
        "41.68%",
        "61.00 GiB",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, (100, 4)), (True, (100, 4)), ("20", (20, 4)), ("020:3", (20, 3))],
)
def test_the_option_profile_keeps_the_rest_of_its_section(tmp_path, text, expected):
    section = {"first_step": 100, "steps": 4, "all_ranks": True}
    given, run = f"megalowbit.profile={json.dumps(section)}", {"run": {"steps": 200}}
    without = write_config(tmp_path, block=run)
    with_section = tmp_path / "with.json"
    content = json.loads(without.read_text())
    content["megalowbit"]["profile"] = section
    with_section.write_text(json.dumps(content))
    memory = "megalowbit.profile.memory=false"
    for path, options in ((without, [given]), (without, [given, memory]), (with_section, [memory])):
        config = load_config(path, with_profile(options, text, path), world_size=1)
        found = config.settings.of(ProfileSettings)
        assert (found.first_step, found.steps) == expected
        assert found.all_ranks
        assert found.memory == (memory not in options)
    if text is not None:
        config = load_config(without, with_profile([], text, without), world_size=1)
        assert config.settings.of(ProfileSettings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmark", "0"], "--benchmark 0 must be at least 1 step"),
        (["--benchmark", "--resume", "auto"], "--benchmark and --resume auto cannot be combined"),
        (["--benchmark", "--dry-run"], "--benchmark and --dry-run cannot be combined"),
        (["--benchmark", "--profile"], "name it with --run-dir"),
        (["--profile", "late"], "--profile 'late' is not FIRST or FIRST:STEPS"),
        (["--profile", ""], "--profile '' is not FIRST or FIRST:STEPS"),
        (["--profile="], "--profile '' is not FIRST or FIRST:STEPS"),
        (["--profile", "0"], "megalowbit.profile.first_step"),
        (["--profile", "5:3"], "megalowbit.profile ends with step 7"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, arguments, message):
    assert main(["--ds-config", str(write_config(tmp_path)), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
