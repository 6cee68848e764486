"""Options of jobs: time limits, sweeps, GPUs, fewer nodes, and what killed launchers leave behind."""

import pytest

from cluster import Cluster
from runs import SAVE_EVERY, STEPS, Workspace, processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_run_survives_its_time_limit(workspace):
    """SLURM sends the signal by itself, up to half a minute early; nobody else touches the job.

    Two minutes leave a slow machine at least 70 s for the first step.
    """
    long = ("megalowbit.run.steps=100000", "megalowbit.checkpoint.every=0")
    run = workspace.submit("limit", "nodes=1", "time=2", "signal_seconds=20", sets=long)
    run.reach(attempts=2, step=1)
    run.job.cancel()
    assert run.end() == "CANCELLED", run.log
    assert run.job.restarts == 1
    assert "asked to stop" in run.attempts[0]
    assert 0 < run.starts[1] < len(run.losses())
    assert [step for step, _ in run.losses()] == list(range(1, len(run.losses()) + 1))


def test_orphans_of_killed_deepspeed_launchers_end_before_the_next_attempt(workspace):
    """Ranks whose launcher has ended save and end; other processes of the attempt are killed."""
    run = workspace.submit("orphans", "launcher=deepspeed", sets=("megalowbit.run.steps=5000",))
    run.reach(step=SAVE_EVERY + 2)
    nodes = run.nodes()
    orphans = [processes(workspace.cluster, node) for node in nodes]
    assert [len(each) for each in orphans] == [1, 1]
    leave_behind = f"MEGALOWBIT_TRY={run.job.id}-0 setsid sleep 1000 <&- &>/dev/null & echo $!"
    left_over = [workspace.cluster.run("bash", "-c", leave_behind, on=node).strip() for node in nodes]
    for node in nodes:
        workspace.cluster.run("pkill", "-KILL", "-f", "deepspeed.launcher.launch", on=node)
    run.reach(attempts=2, step=1)
    assert "the launcher has ended before its ranks: saved after" in run.attempts[0]
    assert "(code 0)" in run.attempts[0]  # the launcher's, although it was killed
    for node, [orphan], process in zip(nodes, orphans, left_over, strict=True):
        assert orphan not in processes(workspace.cluster, node)
        assert f"killing left-over process {process} on {node}" in run.attempts[0]
        assert process not in processes(workspace.cluster, node, "sleep 1000")
    run.reach(attempts=2, step=run.starts[1] + 2)
    run.job.cancel()
    assert run.end() == "CANCELLED"
    assert [step for step, _ in run.losses()] == list(range(1, len(run.losses()) + 1))


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


def test_gpus_are_requested_with_one_rank_each(tmp_path):
    """SLURM hands out two GPUs a node here, which are none: ranks run on the CPU."""
    with Cluster(nodes=2, gpus=2) as cluster:
        gpus = ("gpus_per_node=2", "tasks_per_node=null", 'setup=["echo GPUs $CUDA_VISIBLE_DEVICES"]')
        run = Workspace(cluster, tmp_path).submit("gpus", *gpus, sets=("megalowbit.run.steps=4",))
        assert run.end() == "COMPLETED", run.log
        assert "gpu:2" in run.job.facts()["TresPerNode"]
    assert "GPUs 0,1" in run.log
    assert "4 processes" in run.log


def test_a_lost_node_without_a_spare_is_dropped_if_the_job_allows_it(tmp_path):
    """Two nodes if there are two, else one: the batch stays as large as it was."""
    with Cluster(nodes=2, silence=7) as cluster:
        workspace = Workspace(cluster, tmp_path)
        whole = ("train_batch_size=8", 'gradient_accumulation_steps="auto"')
        run = workspace.submit("fewer", "nodes=1-2", sets=whole)
        run.reach(step=SAVE_EVERY + 2)
        cluster.power_off("n2")
        assert run.end() == "COMPLETED", run.log
        assert run.nodes() == ["n1"]
    assert "2 processes" in run.attempts[0]
    assert "1 process" in run.attempts[1]
    assert [step for step, _ in run.losses()] == list(range(1, STEPS + 1))
