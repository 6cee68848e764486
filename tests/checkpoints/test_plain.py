import os

import pytest

from megalowbit.checkpoints.plain import loading_advice, plain_checkpoint
from megalowbit.durable_files import MANIFEST
from megalowbit.errors import UserError


def make(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


def test_a_plain_checkpoint_is_known_by_its_files_and_found_by_its_latest(tmp_path):
    step = tmp_path / "global_step3"
    make(step, "mp_rank_00_model_states.pt")
    assert plain_checkpoint(tmp_path) is None
    assert plain_checkpoint(step) == step
    (tmp_path / "latest").write_text("global_step3\n")
    assert plain_checkpoint(tmp_path) == step
    (step / MANIFEST).touch()
    assert plain_checkpoint(tmp_path) is plain_checkpoint(step) is None


def test_other_folders_are_not_plain_checkpoints(tmp_path):
    make(tmp_path / "hf", "config.json", "model.safetensors")
    assert plain_checkpoint(tmp_path / "hf") is None
    assert plain_checkpoint(tmp_path / "missing") is None
    (tmp_path / "latest").write_text("../../etc")
    assert plain_checkpoint(tmp_path) is None


def test_the_remedy_depends_on_the_stage(tmp_path):
    make(tmp_path / "a", "mp_rank_00_model_states.pt")
    make(tmp_path / "b", "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert "torch.load(" in loading_advice(tmp_path / "a")
    assert "get_fp32_state_dict_from_zero_checkpoint(" in loading_advice(tmp_path / "b")


def test_a_latest_that_is_not_a_file_does_not_block_and_a_long_name_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "latest")
    assert plain_checkpoint(tmp_path) is None
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("x" * 5000)
    with pytest.raises(UserError, match="cannot be checked"):
        plain_checkpoint(tmp_path)
