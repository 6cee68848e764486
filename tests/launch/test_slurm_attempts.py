"""How attempts of a job script end and what follows: marks, counts, signals, a SLURM that is slow to answer.
Programs stand in for SLURM's (slurm_script.py)."""

import time
from pathlib import Path

import pytest
from slurm_script import CHECKPOINT, DONE, SRUN, Job

FAILS = """#!/bin/bash
echo >>"$LOG/asked-{name}"
[[ $(wc -l <"$LOG/asked-{name}") -gt {times} ]] || exit 1
"""


def shorten_pauses(job):
    """Replace `sleep`: every pause of the script takes 0.05 s."""
    (job.bin / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.05\n")
    (job.bin / "sleep").chmod(0o755)


def test_the_exit_code_of_the_launcher_does_not_decide(tmp_path):
    job = Job(tmp_path)
    code, output = job.start(f"{DONE}\nexit 9")
    assert (code, job.requeues) == (0, [])
    assert "the run is finished" in output
    (job.run / "DONE").unlink()
    code, output = job.start("exit 0")
    assert (code, job.requeues) == (0, ["job"])


def test_a_mark_of_an_earlier_job_is_ignored(tmp_path):
    job = Job(tmp_path)
    job.run.mkdir()
    (job.run / "DONE").touch()
    _, output = job.start("exit 1")
    assert "is finished" not in output
    assert job.requeues == ["job"]
    assert (job.run / "DONE").exists()  # of a run that another job may be in
    code, output = job.start(DONE, restarts=1)
    assert (code, job.requeues) == (0, ["job"])
    assert "the run is finished" in output


def test_a_rejected_run_is_reported_and_not_retried(tmp_path):
    job = Job(tmp_path)
    code, output = job.start('echo "no corpus: name one" >"$MEGALOWBIT_REFUSAL"; exit 1')
    assert (code, job.requeues) == (2, [])
    assert "will not be retried: no corpus: name one" in output
    _, output = job.start("exit 1", restarts=1)
    assert "no corpus" not in output


def test_only_a_regular_file_marks_a_finished_run_and_a_refusal_takes_precedence(tmp_path):
    job = Job(tmp_path)
    _, output = job.start('mkdir -p "$run/DONE"')
    assert "is finished" not in output
    assert job.requeues == ["job"]
    (job.run / "DONE").rmdir()
    code, output = job.start(f'{DONE}\necho "no room" >"$MEGALOWBIT_REFUSAL"', restarts=1)
    assert code == 2
    assert "will not be retried: no room" in output


def test_only_attempts_without_progress_are_counted_across_requeues(tmp_path):
    job = Job(tmp_path, "max_failures=2")
    codes = [job.start("exit 1", restarts=number)[0] for number in range(2)]
    codes.append(job.start(f"{CHECKPOINT}\nexit 1", restarts=2)[0])
    codes += [job.start("exit 1", restarts=number)[0] for number in range(3, 5)]
    assert (codes, len(job.requeues)) == ([0] * 5, 5)
    code, output = job.start("exit 1", restarts=5)
    assert (code, len(job.requeues)) == (1, 5)
    assert "giving up after 3 attempts in a row without a new checkpoint" in output
    code, _ = job.start("exit 1")  # submitted again
    assert (code, len(job.requeues)) == (0, 6)


def test_lower_steps_after_a_rollback_count_as_progress(tmp_path):
    job = Job(tmp_path, "max_failures=0")
    save = 'cd "$run"; mkdir -p checkpoints/step-000000{0}; touch checkpoints/step-000000{0}/manifest.json; '
    assert job.start('mkdir -p "$run"; ' + save.format(20) + "exit 1")[0] == 0
    rolled_back = save.format(15) + "rm -r checkpoints/step-00000020; exit 1"
    code, output = job.start(rolled_back, restarts=1)
    assert (code, len(job.requeues)) == (0, 2), output
    assert "from step 20" in output
    assert "ended at step 15" in output
    assert job.start("exit 1", restarts=2)[0] == 1


def test_attempts_that_also_end_the_script_are_counted(tmp_path):
    job = Job(tmp_path, "max_failures=1")
    node_dies = "kill -KILL $SCRIPT"
    assert [job.start(node_dies, restarts=number)[0] for number in range(2)] == [-9, -9]
    (job.log / "command").unlink()
    code, output = job.start(node_dies, restarts=2)
    assert code == 1
    assert "giving up after 2 attempts in a row without a new checkpoint" in output
    assert not (job.log / "command").exists()


def test_progress_of_attempts_that_also_end_the_script_is_counted(tmp_path):
    job = Job(tmp_path, "max_failures=1")
    node_dies = "kill -KILL $SCRIPT"
    for number in range(4):
        assert job.start(f"{CHECKPOINT}{node_dies}", restarts=number)[0] == -9
    job.start(f"{DONE}\n{node_dies}", restarts=4)
    (job.log / "command").unlink()
    code, output = job.start("exit 1", restarts=5)
    assert (code, job.requeues) == (0, [])
    assert "the run is finished" in output
    assert not (job.log / "command").exists()


def test_two_jobs_on_one_folder_count_attempts_separately(tmp_path):
    (tmp_path / "other").mkdir()
    job = Job(tmp_path, "max_failures=1")
    other = Job(tmp_path / "other", "max_failures=1", folder=job.run)
    holds = f'echo "{job.attempt_name(0)}" >"$run/.lock"'
    assert job.start(f"{holds}\nexit 1")[0] == 0
    meanwhile = f"{CHECKPOINT}{DONE}\nexit 75"  # of the first job, while the other one is kept out
    code, output = other.start(meanwhile)
    assert (code, other.requeues) == (0, ["job"]), output
    assert "is finished" not in output
    code, output = other.start(meanwhile, restarts=1)
    assert (code, other.requeues) == (1, ["job"])
    assert "giving up after 2 attempts in a row" in output
    code, output = job.start("exit 1", restarts=1)
    assert code == 0
    assert "the run is finished" in output  # by its own try


def test_an_attempt_that_cannot_be_counted_is_the_last(tmp_path):
    job = Job(tmp_path)
    shorten_pauses(job)
    # as little to be written to as a file on a full disk
    (job.run / "slurm" / f"failures-{job.id}.new").mkdir(parents=True)
    code, output = job.start("exit 1", restarts=1)
    assert (code, job.requeues) == (1, [])
    assert "is the disk full?" in output
    assert not (job.log / "command").exists()


def test_an_attempt_waits_for_a_file_system_that_is_unavailable(tmp_path):
    job = Job(tmp_path)
    shorten_pauses(job)
    (job.bin / "sync").write_text(FAILS.format(name="sync", times=3))
    (job.bin / "sync").chmod(0o755)
    code, output = job.start(DONE)
    assert code == 0, output
    assert "the run is finished" in output


def test_incomplete_and_damaged_checkpoints_are_no_progress(tmp_path):
    job = Job(tmp_path)
    for name in ("step-00000040.damaged", "step-00000050", "step-00000009"):
        (job.run / "checkpoints" / name).mkdir(parents=True)
    (job.run / "checkpoints" / "step-00000040.damaged" / "manifest.json").touch()
    (job.run / "checkpoints" / "step-00000009" / "manifest.json").touch()  # octal it would be no number
    _, output = job.start("exit 1")
    assert "from step 9\n" in output
    assert "ended at step 9 (code 1)" in output


def test_a_stop_request_reaches_all_ranks_until_they_end(tmp_path):
    job = Job(tmp_path)
    stop = f"kill -USR1 $SCRIPT; while [ ! -e $LOG/scancel ]; do sleep 0.05; done\n{CHECKPOINT}"
    code, output = job.start(stop)
    assert (code, job.requeues) == (0, ["job"])
    assert "ended at step 10 (code 0, asked to stop)" in output
    assert (job.log / "scancel").read_text() == f"--signal=USR1 {job.id}\n"


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_signal_that_comes_before_the_ranks_start_leaves_them_unstarted(tmp_path, signal):
    job = Job(tmp_path, f'setup=["kill -{signal} $$"]')
    code, output = job.start(DONE)
    assert (code, job.requeues) == (0, ["job"]), output
    assert "code none: not started" in output
    assert not (job.log / "command").exists()


def test_a_signal_that_comes_just_before_the_wait_is_not_lost(tmp_path):
    job = Job(tmp_path)
    wait, signal = "        sleep 2 &", '        [[ -e $LOG/sent ]] || kill -USR1 $$; touch "$LOG/sent"\n'
    assert job.script.count(wait) == 1
    job.script = job.script.replace(wait, signal + wait)
    code, output = job.start("while [ ! -e $LOG/scancel ]; do sleep 0.05; done")
    assert (code, job.requeues) == (0, ["job"])
    assert "asked to stop" in output


@pytest.mark.parametrize(
    ("state", "code", "requeues", "message"),
    [
        ("COMPLETING None", 143, [], "was cancelled or requeued from outside; last saved step: 0"),
        ("COMPLETING TimeLimit", 0, ["job"], "the time is up"),
        ("RUNNING None", 0, ["job"], "asked to stop"),
    ],
)
def test_terms_have_the_meaning_of_slurm(tmp_path, state, code, requeues, message):
    job = Job(tmp_path)
    job.state = state
    ended, output = job.start("kill -TERM $SCRIPT; sleep 0.5")
    assert (ended, job.requeues) == (code, requeues), output
    assert message in output
    assert ("ended at step" in output) == bool(requeues)


def test_a_job_cancelled_while_slurm_is_queried_is_not_requeued(tmp_path):
    job = Job(tmp_path)
    asked = '[[ -e $LOG/asked ]] || { touch "$LOG/asked"; kill -TERM $SCRIPT; echo RUNNING None; exit; }\n'
    (job.bin / "squeue").write_text(f"#!/bin/bash\n{asked}echo COMPLETING None\n")
    code, output = job.start("kill -TERM $SCRIPT; sleep 0.5")
    assert (code, job.requeues) == (143, []), output


@pytest.mark.parametrize("times", [0, 2])
def test_a_job_cancelled_late_is_not_requeued(tmp_path, times):
    job = Job(tmp_path)
    shorten_pauses(job)
    job.state = "COMPLETING None"
    (job.bin / "squeue").write_text(FAILS.format(name="squeue", times=times) + 'cat "$LOG/state"\n')
    late = '#!/bin/bash\n[[ "$*" != *end_strays* ]] || kill -TERM $SCRIPT\n'
    (job.bin / "srun").write_text(late)
    code, output = job.start("")
    assert (code, job.requeues) == (143, []), output


@pytest.mark.parametrize(
    ("times", "state", "code", "requeues"),
    [
        (2, "COMPLETING None", 143, []),
        (2, "COMPLETING TimeLimit", 0, ["job"]),
        (999, "COMPLETING None", 0, ["job"]),
    ],
)
def test_an_unanswered_query_is_repeated_and_not_treated_as_a_cancellation(
    tmp_path, times, state, code, requeues
):
    job = Job(tmp_path)
    shorten_pauses(job)
    job.state = state
    (job.bin / "squeue").write_text(FAILS.format(name="squeue", times=times) + 'cat "$LOG/state"\n')
    ended, output = job.start("kill -TERM $SCRIPT; /bin/sleep 0.5")
    assert (ended, job.requeues) == (code, requeues), output


def test_requeueing_is_retried_while_the_controller_is_unavailable(tmp_path):
    job = Job(tmp_path)
    shorten_pauses(job)
    names = """[[ $1 != show ]] || { echo n1; exit; }\n"""
    for times, code, message in (
        (7, 0, ""),
        (999, 1, "submit it again with --resume auto to continue from step 0"),
    ):
        away = FAILS.format(name=f"{times}", times=times).replace("bash\n", f"bash\n{names}", 1)
        (job.bin / "scontrol").write_text(f'{away}echo "$*" >>"$LOG/scontrol"\n')
        ended, output = job.start("exit 1", restarts=code)
        assert (ended, job.requeues) == (code, ["job"]), output
        assert message in output


def test_a_hung_empty_job_step_times_out(tmp_path):
    job = Job(tmp_path)
    limit = "timeout --kill-after=10 60 srun --overlap --nodes=1 "
    assert job.script.count(limit) == 1
    job.script = job.script.replace(limit, limit.replace("60", "0.2"))
    (job.bin / "srun").write_text("#!/bin/bash\n[[ ${@: -1} != true ]] || exec sleep 600\n" + SRUN)
    code, output = job.start(DONE, restarts=4)
    assert code == 0, output
    assert "an empty job step has failed" in output


def test_leftover_processes_are_ended_before_the_next_attempt(tmp_path):
    job = Job(tmp_path)
    code, output = job.start('setsid sleep 600 &>/dev/null & echo $! >"$LOG/orphan"; exit 0')
    orphan = (job.log / "orphan").read_text().strip()
    assert (code, job.requeues) == (0, ["job"])
    assert f"process {orphan} on " in output
    deadline = time.monotonic() + 20
    while is_alive(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_each_attempt_numbers_its_steps_differently(tmp_path):
    job = Job(tmp_path)
    (job.bin / "srun").write_text('#!/bin/bash\necho "${@: -1}" >>"$LOG/steps"\n')
    for restarts in (0, 1, 2):
        job.start("", restarts=restarts)
    steps = "".join("t" if line == "true" else "r" for line in (job.log / "steps").read_text().splitlines())
    assert [len(before) for before in steps.replace("rr", "r").split("r")][:3] == [0, 1, 2]
