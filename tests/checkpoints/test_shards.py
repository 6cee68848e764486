import pytest
import torch

from megalowbit.checkpoints.contents import CheckpointContents
from megalowbit.checkpoints.shards import Shards, load_file, model_file, optimizer_file
from megalowbit.errors import UserError

RANK_ONE = optimizer_file(0, 1)


class Harmful:
    def __reduce__(self):
        return (print, ("code from a checkpoint has run",))


def test_file_names_are_those_deepspeed_gives():
    assert [model_file(0, 1), model_file(3, 1, 2)] == [
        "mp_rank_01_model_states.pt", "zero_pp_rank_2_mp_rank_01_model_states.pt"
    ]  # fmt: skip
    assert optimizer_file(1, 2) == "zero_pp_rank_2_mp_rank_01_optim_states.pt"


def test_a_file_that_the_manifest_does_not_name_is_not_read(stage_two):
    layout = CheckpointContents(stage_two).layout
    shards = Shards(stage_two, layout, {model_file(0, 0), optimizer_file(0, 0)})
    (_, b) = layout.slices[0].parameters
    with pytest.raises(UserError, match=f"lacks {RANK_ONE}"):
        shards.weight(0, b)


def test_a_flat_tensor_that_is_too_short_is_refused(stage_two):
    content = torch.load(stage_two / RANK_ONE)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(6)
    torch.save(content, stage_two / RANK_ONE)
    contents = CheckpointContents(stage_two)
    with pytest.raises(UserError, match=r"b should have shape \(5,\), what is stored has \(6,\)"):
        contents.weight("b")


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save({"x": Harmful()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="is not loaded: it holds objects") as caught:
        load_file(tmp_path / "x.pt")
    assert "weights_only" not in str(caught.value)
    assert capsys.readouterr().out == ""
