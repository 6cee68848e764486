"""Memory in the metrics: what the system says about this process."""

import resource

import pytest

from megalowbit.pretrain.components.machine.memory import Memory, resident_gib
from megalowbit.pretrain.loop import train_step


def test_resident_memory_is_that_of_this_process(tmp_path):
    block = bytearray(b"x") * 2**27
    found = resident_gib()
    assert found is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert len(block) / 2**30 < found <= peak * 1.01
    assert resident_gib(tmp_path / "no such file") is None
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  2097152 kB\n")
    assert resident_gib(tmp_path / "status") == 2.0


def test_each_step_has_the_memory_of_the_host(build_job):
    job = build_job()
    assert isinstance(job.components[-1], Memory)
    facts = train_step(job).facts
    assert facts["host_memory_gib"] == pytest.approx(resident_gib(), rel=0.5)
    assert "device_memory_gib" not in facts  # a column of GPUs
