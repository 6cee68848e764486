"""Lost, hung and failing ranks: the others end in 1.5 timeouts, with one line that names rank and collective.

All runs go at the same time, for what they take is waiting; the lines are compared word by word, but for
steps and seconds.
"""

import json
import pickle
import re
from functools import cache

import pytest
from quick_cases import slow_except

TIMEOUT = 8.0
LIMIT = 1.5 * TIMEOUT + 3.0  # the bound, and what a busy machine adds
TRANSIENT = 75


def case(kind, fault, victims, size=2, timeout=TIMEOUT, **more):
    return {"kind": kind, "fault": fault, "victims": victims, "size": size, "timeout": timeout, **more}


CASES = {
    "killed": case("0", "kill", [1], size=3),
    "killed_zero_2": case("2", "kill", [1]),
    "stopped": case("0", "stop", [1]),
    "stopped_zero_2": case("2", "stop", [1]),
    "silent": case("0", "stop", [1], size=3, timeout=60.0, silence=6.0, patience=15.0, is_recorded=True),
    "main_silent": case("0", "stop", [0], timeout=60.0, silence=6.0, patience=15.0),
    "sleeping": case("0", "sleep", [1]),
    "locked": case("2", "lock", [1]),
    "keeping": case("0", "keep", [1]),
    "main_killed": case("0", "kill", [0], size=3),
    "main_stopped": case("2", "stop", [0]),
    "main_failing": case("0", "fail", [0]),
    "failing": case("2", "fail", [1], size=3),
    "refusing": case("0", "refuse", [1]),
    "main_refusing": case("2", "refuse", [0], seconds_to_leave=TIMEOUT),
    "leaving": case("0", "end", [1]),
    "interrupted": case("2", "interrupt", [1]),
    "interrupted_stage": case("pipeline", "interrupt", [0]),
    "failing_stage": case("pipeline", "fail", [1]),
    "sleeping_stage": case("pipeline", "sleep", [1]),
    "alone": case("0", "sleep", [0], size=1),
    "terminated": case("0", "terminate", [0, 1]),
    "terminated_alone": case("0", "terminate", [0], size=1, timeout=None),
    "saving": case("0", "save, then hang", [0], size=1),
    "finished": case("0", "fail after the finish", [1]),
    "finishing": case("0", "fail before the finish", [1]),
    "healthy": case("0", "nothing", []),
}
QUICK = {
    "killed_zero_2", "silent", "main_silent", "sleeping", "main_killed", "failing", "refusing",
    "interrupted_stage", "terminated", "saving", "finished", "healthy",
}  # fmt: skip
HERE, NAME = r"\(host [\w.-]+\)", "distributed/ranks_watchdog.py"
ZERO_0 = r"all_reduce \(deepspeed/runtime/engine.py:\d+ allreduce_bucket\)"
ZERO_2 = r"all_reduce \(deepspeed/runtime/zero/stage_1_and_2.py:\d+ \w+\)"
RECV = r"recv \(deepspeed/runtime/pipe/p2p.py:\d+ recv\)"
SILENT = rf"rank 1 {HERE} does not answer: silent since step \d+ \(killed, stopped, or cut off the network\)"
AGAIN = "continue from the last checkpoint"
MAIN = r"the main process \(rank 0, at 127.0.0.1:\d+\)"


def hangs(function, seen, where):
    place = rf"rank 1 {HERE} has hung since step \d+, in {NAME}:\d+ {function}"
    return rf"{place}; rank 0 {HERE} waited \d+ s in {seen} \(its stack: {where}/stack-rank\*.txt\); {AGAIN}"


@pytest.fixture(scope="module")
def launched(launch_ranks):
    """`launched(part)`: the quick cases or the others, run at the same time, and how each rank ended."""
    return cache(lambda part: launch(launch_ranks, part))


def launch(launch_ranks, part):
    cases = {name: case for name, case in CASES.items() if (name in QUICK) == (part == "quick")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # as the command line does: no stacks of a store that ends
        launched = launch_ranks("ranks_watchdog.py", json.dumps(cases), world_size=1, launcher="slurm")
    (ended,) = launched.wait(timeout=400)
    return launched.folder, ended


@pytest.fixture
def runs(launched, part):
    """How each rank ended: `runs(name) -> ({rank: (code, seconds since the fault, output)}, folder)`."""
    results, ended = launched(part)

    def of(name):
        folder = results / name
        faults = [json.loads(path.read_text()) for path in folder.glob("fault*")]
        found = {}
        for rank in range(CASES[name]["size"]):
            output = (folder / f"rank{rank}.log").read_text()
            seen = ended.get(f"{name}/{rank}")
            seconds = seen["time"] - min(faults) if seen and faults else None
            found[rank] = (seen and seen["code"], seconds, output)
        return found, folder

    return of


def errors(found, ranks):
    return [line for rank in ranks for line in found[rank][2].splitlines() if line.startswith("error")]


def check_end(found, survivors, codes=(TRANSIENT,), limit=LIMIT):
    """Survivors end in time, and nothing is printed but one line of one of them; it is returned."""
    for rank in survivors:
        code, seconds, output = found[rank]
        assert code in codes, output
        assert seconds <= limit, f"rank {rank} took {seconds:.1f} s"
        assert "Traceback" not in output
        assert "gloo" not in output
    lines = errors(found, survivors)
    assert len(lines) == 1, lines
    return re.sub(r"^error( on rank \d+)?: ", "", lines[0])


@pytest.mark.parametrize(
    ("name", "survivors", "seen"),
    [
        pytest.param("killed", [0, 2], ZERO_0, marks=pytest.mark.slow),
        ("killed_zero_2", [0], ZERO_2),
        pytest.param("stopped", [0], ZERO_0, marks=pytest.mark.slow),
        pytest.param("stopped_zero_2", [0], ZERO_2, marks=pytest.mark.slow),
        pytest.param("keeping", [0], ZERO_0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_answer_is_named(runs, name, survivors, seen):
    found, _ = runs(name)
    line = check_end(found, survivors)
    assert re.fullmatch(rf"{SILENT}; rank [02] {HERE} waited \d+ s in {seen}; {AGAIN}", line), line


def test_a_silent_rank_is_found_by_its_heartbeat_and_not_by_the_timeout(runs):
    found, folder = runs("silent")
    line = check_end(found, [0, 2], limit=30.0)
    records = re.escape(str(folder / "flight-rank"))
    note = rf" \(last collectives of each rank: {records}\*\)"
    assert re.fullmatch(rf"{SILENT}; rank [02] {HERE} waited \d+ s in {ZERO_0}{note}; {AGAIN}", line), line
    for rank in (0, 2):  # written by the ranks that are left, as torch writes it
        record = pickle.loads((folder / f"flight-rank{rank}").read_bytes())
        assert record["entries"][-1]["profiling_name"] == "gloo:all_reduce"
        assert any(frame["name"] == "allreduce_bucket" for frame in record["entries"][-1]["frames"])
    assert not (folder / "flight-rank1").exists()


def test_a_store_that_does_not_answer_ends_the_run_before_the_timeout(runs):
    found, _ = runs("main_silent")
    assert "does not answer, though its machine does" in check_end(found, [1], limit=30.0)


def test_a_killed_rank_is_named_long_before_the_timeout(runs):
    found, _ = runs("killed_zero_2")
    assert found[0][1] < 0.75 * TIMEOUT


@pytest.mark.parametrize(
    ("name", "function", "seen"),
    [
        ("sleeping", "<lambda>", ZERO_0),
        pytest.param("locked", "hang_in_a_lock", ZERO_2, marks=pytest.mark.slow),
        # over gloo a transfer to one rank knows no timeout
        pytest.param("sleeping_stage", "<lambda>", RECV, marks=pytest.mark.slow),
    ],
)
def test_a_hung_rank_is_named_with_its_phase_and_ended(runs, name, function, seen):
    found, folder = runs(name)
    line = check_end(found, [0, 1])
    assert re.fullmatch(hangs(function, seen, re.escape(str(folder))), line), line
    stack = (folder / "stack-rank1.txt").read_text()
    assert f'{NAME.rpartition("/")[2]}"' in stack
    assert f"in {function}" in stack
    assert not (folder / "stack-rank0.txt").exists()  # it waited for the other


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreter_lock_is_ended_from_c(runs):
    code, seconds, output = runs("keeping")[0][1]
    assert code == 1
    assert seconds <= LIMIT
    assert "keep_the_interpreter" in output


def test_the_main_process_is_named_although_the_store_ends_with_it(runs):
    found, _ = runs("main_killed")
    for rank in (1, 2):
        line = check_end({rank: found[rank]}, [rank])  # they cannot agree on one of them any more
        why = "(its port refuses connections|it has closed its connections)"
        assert re.fullmatch(
            rf"{MAIN} has ended: {why}; rank {rank} {HERE} waited \d+ s in {ZERO_0} since step \d+; {AGAIN}",
            line,
        ), line


@pytest.mark.slow
def test_a_stopped_main_process_is_distinguished_from_an_ended_one(runs):
    line = check_end(runs("main_stopped")[0], [1])
    assert re.match(rf"{MAIN} does not answer, though its machine does \(no answer for [\d.]+ s\): ", line), (
        line
    )
    assert re.search(rf"; rank 1 {HERE} waited \d+ s in {ZERO_2} since step \d+; {AGAIN}$", line), line


@pytest.mark.parametrize(
    ("name", "rank", "others"),
    [
        ("failing", 1, [0, 2]),
        pytest.param("main_failing", 0, [1], marks=pytest.mark.slow),
        pytest.param("failing_stage", 1, [0], marks=pytest.mark.slow),
    ],
)
def test_a_defect_keeps_its_traceback_and_the_others_name_it(runs, name, rank, others):
    found, _ = runs(name)
    line = check_end(found, others)
    failed = rf"rank {rank} {HERE} failed in step \d+: ValueError: a defect \(its own output says where\)"
    assert re.fullmatch(f"{failed}; {AGAIN}", line), line
    code, _, output = found[rank]
    assert code == 1
    assert output.count("Traceback") == 1
    assert "ValueError: a defect" in output
    assert "in fail" in output


def test_a_user_error_on_one_rank_is_raised_on_all(runs):
    found, _ = runs("refusing")
    line = check_end(found, [0], codes=(2,))
    mistake = "this corpus has no such file: mend data.corpus"
    assert re.fullmatch(rf"rank 1 {HERE} failed in step \d+: {mistake}", line), line
    assert found[1][0] == 2
    assert errors(found, [1]) == [f"error on rank 1: {mistake}"]


@pytest.mark.slow
def test_other_ranks_report_a_user_error_of_a_main_rank_that_exits_slowly(runs):
    found, _ = runs("main_refusing")
    line = check_end(found, [1], codes=(2,))
    mistake = "this corpus has no such file: mend data.corpus"
    assert re.fullmatch(rf"rank 0 {HERE} failed in step \d+: {mistake}", line), line
    assert found[1][1] < found[0][1]  # its thread has ended it, and no lost connection
    assert found[0][0] == 2
    assert errors(found, [0]) == [f"error: {mistake}"]


@pytest.mark.slow
def test_a_rank_that_leaves_early_is_named(runs):
    line = check_end(runs("leaving")[0], [0])
    assert re.match(rf"rank 1 {HERE} failed in step \d+: SystemExit: 0 ", line), line


@pytest.mark.parametrize("name", slow_except(QUICK, ["interrupted", "interrupted_stage"]))
def test_ctrl_c_on_one_rank_ends_all_without_output(runs, name):
    for code, seconds, output in runs(name)[0].values():
        assert code == 130, output
        assert seconds <= LIMIT
        assert "error" not in output
        assert "Traceback" not in output


@pytest.mark.slow
def test_a_run_of_one_rank_that_hangs_ends_too(runs):
    found, folder = runs("alone")
    line = check_end(found, [0])
    assert re.fullmatch(
        rf"rank 0 {HERE} has hung since step \d+ \(\d+ s\), in {NAME}:\d+ <lambda>; {AGAIN}", line
    ), line
    assert (folder / "stack-rank0.txt").exists()


def test_sigterm_ends_a_hung_step(runs):
    line = check_end(runs("terminated")[0], [0, 1], codes=(143,))
    # on a busy machine the store may not answer in time: then a rank reports what it sees of itself
    everybody = rf"all ranks have hung since step \d+ \(\d+ s\), in {NAME}:\d+ terminate"
    itself = rf"rank \d {HERE} was \d+ s in {NAME}:\d+ terminate since step \d+"
    start = "ended by SIGTERM without a checkpoint: no step has ended for 3 s; "
    assert re.fullmatch(f"{start}({everybody}|{itself})", line), line


@pytest.mark.slow
def test_sigterm_ends_a_hung_step_without_a_watchdog_timeout(runs):
    line = check_end(runs("terminated_alone")[0], [0], codes=(143,))
    place = rf"rank 0 {HERE} was \d+ s in {NAME}:\d+ terminate since step \d+"
    assert line.startswith("ended by SIGTERM without a checkpoint: no step has ended for 3 s; "), line
    assert re.search(place, line), line


def test_sigterm_does_not_interrupt_a_save_but_ends_a_hang_after_it(runs):
    found, _ = runs("saving")
    line = check_end(found, [0], codes=(143,))
    assert found[0][1] > 5 + 3
    assert "has ended for 3 s; rank 0" in line
    assert "since step 9" in line


def test_a_rank_that_fails_after_the_end_does_not_fail_the_others(runs):
    found, _ = runs("finished")
    code, _, output = found[0]
    assert code == 0, output
    assert not errors(found, [0])
    assert found[1][0] == 1


@pytest.mark.slow
def test_a_run_is_not_marked_finished_if_another_rank_failed(runs):
    line = check_end(runs("finishing")[0], [0])
    assert re.match(rf"rank 1 {HERE} failed in (step \d+|the end): ValueError: a defect ", line), line


def test_a_run_without_problems_logs_no_warning(runs):
    for code, _, output in runs("healthy")[0].values():
        assert code == 0, output
        assert "error" not in output
        assert "Traceback" not in output
