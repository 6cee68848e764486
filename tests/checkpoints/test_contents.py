import json
import subprocess
import sys

import pytest
import torch

from megalowbit.checkpoints.contents import CheckpointContents, StateDict, check_files
from megalowbit.checkpoints.layout import Layout, Slice, StoredParameter
from megalowbit.durable_files import verify_folder
from megalowbit.errors import UserError

WHOLE = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5.0) + 100}  # what `stage_two` holds


def test_flat_partitions_become_full_parameters(stage_two):
    contents = CheckpointContents(stage_two)
    assert contents.parameters() == ["a", "b"]
    assert contents.names() == ["a", "b", "c"]
    for name, value in {**WHOLE, "c": WHOLE["a"]}.items():
        assert contents.weight(name).equal(value)
        assert contents.weight(name, as_stored=True).equal(value.bfloat16())
        state = contents.optimizer_state(name)
        assert state["exp_avg"].equal(-value)
        assert float(state["step"]) == 4
        assert contents.hyper_parameters(name) == {"lr": 0.5}


def test_a_state_dict_reads_what_it_is_asked_for(stage_two):
    state = StateDict(CheckpointContents(stage_two))
    assert list(state) == ["a", "b", "c"]
    assert len(state) == 3
    assert state["b"].equal(WHOLE["b"])
    with pytest.raises(KeyError):
        state["d"]
    with pytest.raises(UserError, match="has no parameter d"):
        CheckpointContents(stage_two).weight("d")


def tensor_parallel(write, cuts, shapes):
    """Two tensor ranks at stage 0 without masters, with a parameter `w` each."""
    files = {}
    slices = []
    for rank, (cut, shape) in enumerate(zip(cuts, shapes, strict=True)):
        file = f"mp_rank_0{rank}_model_states.pt"
        files[file] = {"module": {"w": torch.full(shape, float(rank))}}
        stored = StoredParameter(name="w", shape=shape, dtype="float32", weight=(file, "w"), cut=cut)
        slices.append(Slice(parameters=(stored,)))
    return write(files, Layout(stage=0, data_size=1, tensor_size=2, slices=tuple(slices)))


def test_tensor_parallel_shards_are_joined_part_by_part(write):
    cut = {"dim": 0, "parts": [2, 4]}
    contents = CheckpointContents(tensor_parallel(write, [cut, cut], [(3, 2), (3, 2)]))
    # of two parts each rank has its half
    assert contents.weight("w")[:, 0].tolist() == [0, 1, 0, 0, 1, 1]


def test_copies_are_read_once(write):
    contents = CheckpointContents(tensor_parallel(write, [None, None], [(3,), (3,)]))
    assert contents.weight("w").tolist() == [0, 0, 0]


@pytest.mark.parametrize("shapes", [[(3, 2), (2, 2)], [(3, 2), (3, 1)]])
def test_shards_that_do_not_fit_together_are_refused(write, shapes):
    cut = {"dim": 0, "parts": [6]}
    with pytest.raises(UserError, match="the shards of w cannot be joined"):
        CheckpointContents(tensor_parallel(write, [cut, cut], shapes))


def test_a_file_that_the_layout_needs_must_be_in_the_manifest(stage_two):
    check_files(stage_two, remedy="use another")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    manifest = json.loads((stage_two / "manifest.json").read_text())
    manifest["files"] = [entry for entry in manifest["files"] if entry["name"] != name]
    (stage_two / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"does not name {name}; use another"):
        check_files(stage_two, remedy="use another")
    with pytest.raises(UserError, match=rf"{name} is not listed in manifest\.json"):
        verify_folder(stage_two, remedy="use another")


def test_a_folder_without_weights_is_named(tmp_path):
    entry = '{"name": "x", "size": 0, "sha256": ""}'
    (tmp_path / "manifest.json").write_text(f'{{"format": 1, "files": [{entry}]}}')
    with pytest.raises(UserError, match="has neither mp_rank_00_model_states"):
        CheckpointContents(tmp_path)


@pytest.mark.slow
def test_reading_needs_no_deepspeed(stage_two):
    code = (
        "import sys; from pathlib import Path; "
        "from megalowbit.checkpoints.contents import CheckpointContents; "
        f"CheckpointContents(Path({str(stage_two)!r})).weight('b'); "
        "sys.exit('deepspeed' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
