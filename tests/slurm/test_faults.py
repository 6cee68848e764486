"""Faults of jobs, compared with one run without faults: every launcher gives its losses."""

import re
import time

import pytest

from cluster import Cluster
from runs import SAVE_EVERY, STEPS, Workspace, processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LAUNCHERS = ["torchrun", "deepspeed"]  # the same faults under srun are in test_jobs.py


@pytest.fixture(scope="module")
def undisturbed(workspace):
    """Losses of a run without faults, under srun."""
    run = workspace.submit("undisturbed")
    assert run.end() == "COMPLETED", run.log
    losses = run.losses()
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    return losses


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_signal_then_killed_main_rank_under_other_launchers(workspace, undisturbed, launcher):
    run = workspace.submit(f"signal-{launcher}", f"launcher={launcher}")
    run.reach(step=4)
    run.job.signal_script("USR1")
    run.reach(attempts=2, step=2 * SAVE_EVERY)
    run.kill_rank(run.nodes()[0])  # of the main process
    assert run.end() == "COMPLETED", run.log
    assert run.job.restarts == 2
    assert f"stopped after step {run.starts[1]} on request" in run.attempts[0]
    assert run.losses() == undisturbed


def test_a_power_cut_of_the_script_node_is_survived(workspace, undisturbed):
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
    assert run.losses() == undisturbed


def test_a_network_cut_ends_the_attempt_in_time_names_the_node_and_the_run_resumes(tmp_path, undisturbed):
    timeout = 20
    with Cluster(nodes=3, silence=120) as cluster:  # SLURM itself notices much later
        run = Workspace(cluster, tmp_path).submit("cut", sets=(f"megalowbit.watchdog.timeout={timeout}",))
        run.reach(step=SAVE_EVERY + 2)
        first, lost = run.nodes()
        cluster.hosts.cut(lost)
        end = time.monotonic() + 1.5 * timeout + 10  # 10 s more for a busy machine
        while time.monotonic() < end and any(processes(cluster, node) for node in (first, lost)):
            time.sleep(0.2)
        assert [processes(cluster, node) for node in (first, lost)] == [[], []], run.log
        cluster.hosts.mend(lost)
        assert run.end() == "COMPLETED", run.log
    line = rf"error: rank 1 \(host {lost}\) does not answer.* rank 0 \(host {first}\) waited \d+ s in \w+"
    assert re.search(line, run.attempts[0]), run.attempts[0]
    assert run.starts[1] >= SAVE_EVERY
    assert run.losses() == undisturbed
