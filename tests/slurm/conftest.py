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


@pytest.fixture(scope="module")
def ssh_cluster():
    """Two nodes that reach each other by ssh, as pdsh wants it."""
    if reason := what_is_missing(ssh=True):
        pytest.skip(reason)
    with Cluster(nodes=2, ssh=True) as made:
        yield made
