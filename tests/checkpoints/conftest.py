"""Checkpoints written by hand, number by number, in the form that DeepSpeed's files have."""

import pytest
import torch

from megalowbit.checkpoints.layout import Layout, Slice, StoredParameter
from megalowbit.durable_files import write_manifest

WHOLE = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5.0) + 100}


@pytest.fixture
def write(tmp_path):
    """`write(files, layout) -> folder`: a checkpoint of these files, the first of them with the layout."""

    def write_files(files, layout):
        folder = tmp_path / "step-00000001"
        folder.mkdir()
        first, *_ = files
        files[first]["megalowbit_engine"] = {"layout": layout.to_dict()}
        for name, content in files.items():
            torch.save(content, folder / name)
        write_manifest(folder)
        return folder

    return write_files


@pytest.fixture
def stage_two(write):
    """`WHOLE` flat on two ranks with a partition of 10: a, then b, then three zeros."""
    flat = torch.cat([WHOLE["a"].flatten(), WHOLE["b"], torch.zeros(3)])
    names = [("a", (4, 3), 0), ("b", (5,), 12)]
    parameters = tuple(
        StoredParameter(
            name=name, shape=shape, dtype="bfloat16", group=0, offset=offset, state=0, optimizer_group=0,
            weight=("mp_rank_00_model_states.pt", name),
        )
        for name, shape, offset in names
    )  # fmt: skip
    files = {"mp_rank_00_model_states.pt": {"module": {name: WHOLE[name].bfloat16() for name in WHOLE}}}
    for rank in range(2):
        mine = flat[10 * rank : 10 * rank + 10]
        inner = {
            "state": {0: {"exp_avg": -mine, "step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        }
        state = {
            "single_partition_of_fp32_groups": [mine if rank == 0 else mine[:7]],  # saved without padding
            "base_optimizer_state": inner,
        }
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": state}
    part = Slice(parameters=parameters, partition_sizes=(10,))
    return write(files, Layout(stage=2, data_size=2, slices=(part,), tied={"c": "a"}))
