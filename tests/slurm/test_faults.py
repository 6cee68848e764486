"""More of what happens to jobs, under every launcher; minutes long. `test_jobs.py` has the short stories."""

import re
import time

import pytest

from cluster import Cluster
from runs import RANK, SAVE_EVERY, STEPS, Workspace

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LAUNCHERS = ["srun", "torchrun", "deepspeed"]


@pytest.fixture(scope="module")
def undisturbed(workspace):
    """Losses of a run under each launcher."""
    losses = {}
    for launcher in LAUNCHERS:
        run = workspace.submit(f"undisturbed-{launcher}", f"launcher={launcher}")
        assert run.end() == "COMPLETED", run.log
        losses[launcher] = run.losses()
    return losses


def processes(cluster, node, pattern=RANK):
    return cluster.run("pgrep", "-f", pattern, on=node, check=False).split()


def test_launchers_give_the_same_losses(undisturbed):
    assert [step for step, _ in undisturbed["srun"]] == list(range(1, STEPS + 1))
    assert undisturbed["torchrun"] == undisturbed["srun"]
    assert undisturbed["deepspeed"] == undisturbed["srun"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_signal_then_killed_rank_under_every_launcher(workspace, undisturbed, launcher):
    run = workspace.submit(f"signal-{launcher}", f"launcher={launcher}")
    run.reach(step=4)
    run.job.signal_script("USR1")
    run.reach(tries=2, step=2 * SAVE_EVERY)
    run.kill_rank(run.nodes()[0])  # of the main process
    assert run.end() == "COMPLETED", run.log
    assert run.job.restarts == 2
    assert f"stopped after step {run.starts[1]} on request" in run.tries[0]
    assert run.losses() == undisturbed[launcher]


def test_time_limit_is_survived_as_often_as_it_takes(workspace):
    """SLURM sends the signal by itself, up to half a minute early; nobody else touches the job."""
    long = ("megalowbit.run.steps=300", "megalowbit.checkpoint.every=0")
    run = workspace.submit("limit", "time=1", "signal_seconds=20", sets=long)
    assert run.end(600) == "COMPLETED", run.log
    assert run.job.restarts >= 1
    assert all("asked to stop" in each for each in run.tries[:-1])
    assert run.starts == sorted(set(run.starts))
    assert [step for step, _ in run.losses()] == list(range(1, 301))


def test_orphans_of_killed_deepspeed_launchers_are_ended_before_the_next_try(workspace):
    """With its child killed, a launcher ends with 0 while ranks train on; SLURM waits for them a minute."""
    run = workspace.submit("orphans", "launcher=deepspeed", sets=("megalowbit.run.steps=5000",))
    run.reach(step=SAVE_EVERY + 2)
    nodes = run.nodes()
    for node in nodes:
        workspace.cluster.run("pkill", "-KILL", "-f", "deepspeed.launcher.launch", on=node)
    orphans = [processes(workspace.cluster, node) for node in nodes]
    assert [len(each) for each in orphans] == [1, 1]
    run.reach(tries=2, step=1)
    assert "(code 0)" in run.tries[0]
    for node, [orphan] in zip(nodes, orphans, strict=True):
        assert f"killing left-over process {orphan} on {node}" in run.tries[0]
        assert orphan not in processes(workspace.cluster, node)
    run.reach(tries=2, step=run.starts[1] + 2)
    run.job.cancel()
    assert run.end() == "CANCELLED"
    assert [step for step, _ in run.losses()] == list(range(1, len(run.losses()) + 1))


def test_power_cut_of_the_node_that_runs_the_script(workspace, undisturbed):
    run = workspace.submit("script-node")
    run.reach(step=SAVE_EVERY + 2)
    lost = run.nodes()[0]
    workspace.cluster.power_off(lost)
    try:
        assert run.end() == "COMPLETED", run.log
    finally:
        workspace.cluster.power_on(lost)
    assert lost not in run.nodes()
    assert run.starts[1] >= SAVE_EVERY
    assert run.losses() == undisturbed["srun"]


def test_sweep_is_a_job_array_with_a_run_for_each_line(workspace):
    sweep = workspace.folder / "sweep.txt"
    sweep.write_text("optimizer.params.lr=1e-3\noptimizer.params.lr=3e-3 megalowbit.run.seed=2\n")
    run = workspace.submit("sweep", "nodes=1", options=("--array", sweep))
    assert run.end() == "COMPLETED", run.log
    first, second = (run.member(number) for number in (1, 2))
    assert first.end() == second.end() == "COMPLETED"
    assert (first.folder / "DONE").exists()
    assert (second.folder / "DONE").exists()
    assert [step for step, _ in first.losses()] == [step for step, _ in second.losses()]
    assert first.losses() != second.losses()


def test_network_cut_ends_the_try_in_time_naming_the_node_and_the_run_goes_on(tmp_path, undisturbed):
    timeout = 10
    with Cluster(nodes=3, silence=60) as cluster:  # SLURM itself notices much later
        run = Workspace(cluster, tmp_path).submit("cut", sets=(f"megalowbit.watchdog.timeout={timeout}",))
        run.reach(step=SAVE_EVERY + 2)
        first, lost = run.nodes()
        cluster.hosts.cut(lost)
        end = time.monotonic() + 1.5 * timeout + 2
        while time.monotonic() < end and any(processes(cluster, node) for node in (first, lost)):
            time.sleep(0.2)
        assert [processes(cluster, node) for node in (first, lost)] == [[], []], run.log
        cluster.hosts.mend(lost)
        assert run.end() == "COMPLETED", run.log
    line = rf"error: rank 1 \(host {lost}\) does not answer.* rank 0 \(host {first}\) waited \d+ s in \w+"
    assert re.search(line, run.tries[0]), run.tries[0]
    assert run.starts[1] >= SAVE_EVERY
    assert run.losses() == undisturbed["srun"]


def test_gpus_are_asked_for_and_each_has_a_rank(tmp_path):
    """SLURM hands out two GPUs a node here, which are none: ranks run on the CPU."""
    with Cluster(nodes=2, gpus=2) as cluster:
        gpus = ("gpus_per_node=2", "tasks_per_node=null", 'setup=["echo GPUs $CUDA_VISIBLE_DEVICES"]')
        run = Workspace(cluster, tmp_path).submit("gpus", *gpus, sets=("megalowbit.run.steps=4",))
        assert run.end() == "COMPLETED", run.log
        assert "gpu:2" in run.job.facts()["TresPerNode"]
    assert "GPUs 0,1" in run.log
    assert "4 processes" in run.log


def test_lost_node_without_a_spare_is_done_without_if_the_job_allows_it(tmp_path):
    """Two nodes if there are two, else one: the batch stays as large as it was."""
    with Cluster(nodes=2, silence=7) as cluster:
        workspace = Workspace(cluster, tmp_path)
        whole = ("train_batch_size=8", 'gradient_accumulation_steps="auto"')
        run = workspace.submit("fewer", "nodes=1-2", sets=whole)
        run.reach(step=SAVE_EVERY + 2)
        cluster.power_off("n2")
        assert run.end() == "COMPLETED", run.log
        assert run.nodes() == ["n1"]
    assert "2 processes" in run.tries[0]
    assert "1 process" in run.tries[1]
    assert [step for step, _ in run.losses()] == list(range(1, STEPS + 1))
