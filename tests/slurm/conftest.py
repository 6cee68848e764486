"""`cluster`: a SLURM of three nodes; tests skip, saying what is missing, only where none can be made."""

import pytest

from cluster import Cluster, what_is_missing
from runs import Workspace


@pytest.fixture(scope="module")
def cluster():
    if reason := what_is_missing():
        pytest.skip(reason)
    with Cluster(nodes=3, silence=7) as made:
        yield made


@pytest.fixture(scope="module")
def workspace(cluster, tmp_path_factory):
    return Workspace(cluster, tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def end_jobs_of_failed_tests(request):
    """A failed test leaves its job behind, which would go on training beside the next tests."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed and "workspace" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
        for job in cluster.run("squeue", "--noheader", "--format=%A").split():
            cluster.run("scancel", job)


@pytest.fixture(scope="module")
def ssh_cluster():
    """Two nodes that reach each other by ssh, as pdsh wants it."""
    if reason := what_is_missing(ssh=True):
        pytest.skip(reason)
    with Cluster(nodes=2, ssh=True) as made:
        yield made
