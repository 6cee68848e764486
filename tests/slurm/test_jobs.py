"""Runs on a real SLURM: requeued, resumed, refused, given up.

A job is requeued unless its run is finished or fails again and again. A run resumed from a checkpoint has the
losses of an undisturbed one. Each story is one job and the faults in it. They run at the same time, because
they mostly wait: for SLURM to notice a lost node, and to start a requeued job. One job has all the faults,
because each start of two ranks costs seconds of imports.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import Cluster, what_is_missing
from runs import SAVE_EVERY, STEPS, Workspace

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SPARED = "exclude=n[3-4]"  # of the power cut


def undisturbed(workspace):
    run = workspace.submit("undisturbed", "launcher=torchrun", SPARED)
    run.end()
    return run


def faulty(workspace):
    """A different fault in each attempt: a signal, a requeue, a killed rank, a power cut, nothing."""
    run = workspace.submit("faulty", "launcher=srun", "exclude=n1")
    run.reach(step=4)
    run.job.signal_script("USR1")  # as SLURM does before the time limit
    for number, trouble in enumerate((requeue, kill_a_rank, power_off_a_node), start=2):
        run.reach(attempts=number, step=1)
        run.reach(attempts=number, step=run.starts[-1] + SAVE_EVERY + 1)
        trouble(run)
    run.end()
    return run


def requeue(run):
    run.job.requeue()


def kill_a_rank(run):
    run.kill_rank(run.nodes()[0])  # of the main process


def power_off_a_node(run):
    run.job.cluster.power_off(run.nodes()[1])


def refused(workspace):
    """The configuration is gone when the ranks want to read it."""
    path = workspace.folder / "gone.json"
    path.write_text(workspace.config.read_text())
    run = workspace.submit("refused", SPARED, f'setup=["rm {path}"]', config=path)
    run.end()
    return run


def out_of_memory(workspace):
    """No attempt gets further than its imports: there is not memory enough for them."""
    run = workspace.submit("out_of_memory", SPARED, "max_failures=1", 'setup=["ulimit -v 300000"]')
    run.end()
    return run


STORIES = (faulty, undisturbed, refused, out_of_memory)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """`stories(function)`: the run of that story, when it has ended, or the error in it."""
    if reason := what_is_missing():
        pytest.skip(reason)
    with Cluster(nodes=4, silence=7) as cluster, ThreadPoolExecutor(len(STORIES)) as pool:
        workspace = Workspace(cluster, tmp_path_factory.mktemp("runs"))
        runs = {story: pool.submit(story, workspace) for story in STORIES}
        yield lambda story: runs[story].result()
        for job in cluster.run("squeue", "--noheader", "--format=%i").split():
            cluster.run("scancel", job)  # of a story that failed: its thread waits for it


def test_two_nodes_train_together_to_the_end(stories):
    run = stories(undisturbed)
    assert run.job.state == "COMPLETED"
    assert (run.folder / "DONE").exists()
    assert run.starts == [0]
    assert [step for step, _ in run.losses()] == list(range(1, STEPS + 1))
    assert run.losses()[-1][1] < run.losses()[0][1] - 0.5
    assert "2 processes" in run.log


def test_signal_before_the_time_limit_saves_on_all_ranks_and_requeues(stories):
    run = stories(faulty)
    stopped = run.starts[1]
    assert 4 <= stopped < STEPS
    assert run.attempts[0].count(f"stopped after step {stopped} on request") == 1
    assert f"ended at step {stopped} (code 0, asked to stop)" in run.attempts[0]
    shards = run.files_of_checkpoint(stopped)
    assert len([name for name in shards if "pp_rank_0_" in name]) == 1
    assert len([name for name in shards if "pp_rank_1_" in name]) == 1


def test_a_requeued_job_resumes_from_a_checkpoint(stories):
    run = stories(faulty)
    assert "is finished" not in run.attempts[1]
    assert run.starts[2] > run.starts[1]


def test_a_killed_rank_ends_the_attempt_and_the_script_requeues_itself(stories):
    run = stories(faulty)
    assert "ended at step" in run.attempts[2]
    assert "code 0" not in run.attempts[2]
    assert "asked to stop" not in run.attempts[2]
    assert run.starts[3] > run.starts[2]


def test_a_powered_off_node_is_replaced_by_a_spare(stories):
    run = stories(faulty)
    [lost] = [node for node, state in run.job.cluster.node_states().items() if state.startswith("down")]
    assert lost in {"n3", "n4"}
    assert lost not in run.nodes()
    assert run.starts[4] > run.starts[3]


def test_all_that_trouble_does_not_show_in_the_losses(stories):
    run = stories(faulty)
    assert run.job.state == "COMPLETED"
    assert run.job.restarts == 4
    assert run.losses() == stories(undisturbed).losses()


def test_a_rejected_job_is_reported_and_not_retried(stories):
    run = stories(refused)
    assert (run.job.state, run.job.restarts) == ("FAILED", 0)
    assert run.job.facts()["ExitCode"] == "2:0"
    assert "gone.json" in run.log.splitlines()[-1]


def test_attempts_without_a_new_checkpoint_end_the_job(stories):
    run = stories(out_of_memory)
    assert (run.job.state, run.job.restarts) == ("FAILED", 1)
    assert "giving up after 2 attempts" in run.log.splitlines()[-1]
