"""Work in turns on the processes of a node, in one process and in two."""

import textwrap

import pytest
from forks import run_processes

from megalowbit.data.cache.node_first import run_on_each_node_first


def test_a_single_process_just_runs_the_work():
    assert run_on_each_node_first(lambda: 7, str) == 7


# what each of two processes runs; a line of output for each scenario
PROCESS = """
    import os, sys, datetime
    from pathlib import Path
    import torch.distributed as dist
    from megalowbit.data.cache.node_first import run_on_each_node_first
    from megalowbit.errors import TransientError, UserError

    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=200))

    def work(scenario):
        if scenario == "order":
            if rank == 0:
                (folder / "made").touch()
            return (folder / "made").exists()
        if scenario == f"user_error_on_{rank}":
            raise UserError("no such corpus")
        if scenario == "transient" and rank == 1:
            raise TransientError("still being built")
        if scenario == "defect" and rank == 0:
            raise KeyError("a bug")
        return rank if scenario == "difference" else 1

    for scenario in sys.argv[2:]:
        try:
            print("result", run_on_each_node_first(lambda: work(scenario), str))
        except Exception as error:
            print(type(error).__name__, error)
    dist.destroy_process_group()
"""
SCENARIOS = {
    "order": ["result True", "result True"],
    "user_error_on_0": ["UserError no such corpus"] * 2,
    "user_error_on_1": ["UserError no such corpus"] * 2,
    "transient": ["TransientError still being built"] * 2,
    "defect": ["KeyError 'a bug'", "RuntimeError rank 0 failed: KeyError('a bug')"],
    "difference": ["UserError rank 1 reads other data than rank 0 (1 instead of 0)"] * 2,
}


@pytest.fixture(scope="module")
def lines_of_two_processes(tmp_path_factory):
    """What each of two processes printed, by scenario."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "program.py").write_text(textwrap.dedent(PROCESS))
    codes, outputs = run_processes(folder / "program.py", folder, *SCENARIOS, folder=folder)
    assert codes == [0, 0], outputs
    return dict(zip(SCENARIOS, zip(*map(str.splitlines, outputs), strict=True), strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_build_in_turn_and_fail_together(lines_of_two_processes, scenario):
    for line, expected in zip(lines_of_two_processes[scenario], SCENARIOS[scenario], strict=True):
        assert line.startswith(expected)
