"""A disk that fills up during a run of two ranks: one line, exit code 2, no loss, and the run resumes."""

import os
import shutil
import subprocess

import pytest
from forked_ranks import Ranks
from soak_runs import lines

from launchers import metrics, write_config

pytestmark = pytest.mark.slow

EVERY, STEPS = 4, 16
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the configuration, at ZeRO 1: every rank writes a file of its own."""
    folder = tmp_path_factory.mktemp("full")
    block = {
        "run": {"steps": STEPS}, "checkpoint": {"every": EVERY, "keep": None}, "watchdog": {"timeout": 30.0},
    }  # fmt: skip
    write_config(folder, block=block, zero_optimization={"stage": 1})
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    with start(folder, folder / "undisturbed") as ranks:
        assert ranks.wait()
        assert ranks.codes == [0, 0], ranks.output()
    return lines(folder / "undisturbed" / "metrics.jsonl")


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small file system, as nobody would fill a real one for a test."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def start(folder, run, **options):
    return Ranks(folder, "--ds-config", folder / "tiny.json", "--run-dir", run, "--resume", "auto", **options)


def fill(disk, *, leaving=0):
    """Put a file on the disk that leaves so many bytes."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        while (free := shutil.disk_usage(disk).free - leaving) > 0:
            try:
                file.write(bytes(min(free, MIB)))
            except OSError:
                return


def saved(run):
    """Steps with a complete checkpoint, and whatever else lies beside them but for `latest`."""
    names = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != "latest")
    assert all((run / "checkpoints" / name / "manifest.json").exists() for name in names), names
    return [int(name.removeprefix("step-")) for name in names]


@pytest.fixture(scope="module")
def full_at_save(folder, disk):
    """A run on the disk, which has room for records but for no second checkpoint."""
    run = disk / "run"
    with start(folder, run) as ranks:
        ranks.wait_until(lambda: (run / "checkpoints" / f"step-{EVERY:08d}" / "manifest.json").exists())
        fill(disk, leaving=MIB // 4)
        assert ranks.wait(), ranks.output()
    (disk / "ballast").unlink()
    return ranks, run


@pytest.fixture(scope="module")
def full_at_record(full_at_save, folder, disk):
    """The same run, gone on with until no line finds room on the disk."""
    _, run = full_at_save
    with start(folder, run) as ranks:
        before = saved(run)[-1]
        ranks.wait_until(lambda: metrics(run)[-1]["step"] == before + 1)
        fill(disk)
        assert ranks.wait(), ranks.output()
    kept = saved(run)
    (disk / "ballast").unlink()
    return ranks, kept, run


@pytest.mark.slow
def test_a_full_disk_during_a_save_keeps_the_old_checkpoint_and_is_reported(full_at_save):
    ranks, run = full_at_save
    assert ranks.codes == [2, 2], ranks.output()
    (line,) = ranks.errors
    step = metrics(run)[-1]["step"]
    assert step % EVERY == 0
    assert f"checkpoint step-{step:08d} was not written (rank " in line
    assert "No space left on device; free space" in line
    assert "(earlier checkpoints are untouched)" in line
    assert saved(run) == list(range(EVERY, step, EVERY))
    assert "Traceback" not in ranks.output()


@pytest.mark.slow
def test_a_full_disk_under_the_records_ends_the_run_with_one_line(full_at_record):
    ranks, kept, run = full_at_record
    assert ranks.codes[0] == 2, ranks.output()
    assert ranks.codes[1] != 0
    (line,) = [line for line in ranks.errors if line.startswith("error: ")]
    assert f"cannot be recorded in {run} (No space left on device): free space" in line
    assert f"continue from the checkpoint of step {kept[-1]} with --resume auto" in line
    assert "Traceback" not in ranks.logs[0].read_text()


@pytest.mark.slow
def test_after_space_is_freed_the_run_resumes_bitwise(full_at_record, undisturbed, folder):
    _, _, run = full_at_record
    with start(folder, run) as ranks:
        assert ranks.wait(), ranks.output()
        assert ranks.codes == [0, 0], ranks.output()
    assert lines(run / "metrics.jsonl") == undisturbed
    assert (run / "DONE").exists()
    assert saved(run) == [4, 8, 12, 16]


def test_a_full_disk_on_the_second_rank_only_names_that_rank(folder):
    run = folder / "second"
    with start(folder, run, file_sizes={1: 100_000}) as ranks:
        assert ranks.wait(), ranks.output()
    assert ranks.codes == [2, 2], ranks.output()
    (line,) = ranks.errors
    assert f"checkpoint step-{EVERY:08d} was not written (rank 1): " in line
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt: File too large; free space" in line
    assert saved(run) == []
