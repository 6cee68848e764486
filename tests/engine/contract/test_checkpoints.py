"""The DeepSpeed interfaces that `layout`, `reshape` and `checkpoint_engine` of `engine.checkpoints` use."""

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from megalowbit.engine.checkpoints.layout import describe_layout
from megalowbit.engine.initialize import initialize


def make_engine(stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": "bf16"},
    }
    return initialize(model=model, config=config)[0]


@pytest.mark.parametrize("stage", [1, 2])
def test_flat_groups_of_stages_one_and_two_have_the_recorded_layout(stage):
    engine = make_engine(stage)
    layout = describe_layout(engine)
    parameters = dict(engine.module.named_parameters())
    for stored in layout.slices[0].parameters:
        mapping = parameters[stored.name]._hp_mapping
        (piece,) = layout.fragments(layout.slices[0], stored)
        assert (mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel) == piece[1::2], (
            "DeepSpeed places parameters in flat groups otherwise than round_robin_bit16_offsets says: "
            "checkpoints would be exported and resumed with weights mixed up"
        )
        flat = engine.optimizer.single_partition_of_fp32_groups[stored.group]
        found = flat[piece.flat_start : piece.flat_start + piece.numel].view(stored.shape)
        assert torch.equal(found, safe_get_full_fp32_param(parameters[stored.name]))


def test_sub_groups_of_stage_three_have_the_recorded_layout():
    engine = make_engine(3)
    layout = describe_layout(engine)
    parameters = dict(engine.module.named_parameters())
    for stored in layout.slices[0].parameters:
        (piece,) = layout.fragments(layout.slices[0], stored)
        flat = engine.optimizer.fp32_partitioned_groups_flat[stored.group]
        found = flat[piece.flat_start : piece.flat_start + piece.numel].view(stored.shape)
        assert torch.equal(found, safe_get_full_fp32_param(parameters[stored.name])), (
            "DeepSpeed orders the partitions of a sub-group otherwise than fp16_groups: checkpoints of "
            "stage 3 would be exported and resumed with weights mixed up"
        )


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (1, {"single_partition_of_fp32_groups", "base_optimizer_state", "loss_scaler"}),
        (2, {"single_partition_of_fp32_groups", "base_optimizer_state", "loss_scaler"}),
        (3, {"fp32_flat_groups", "optimizer_state_dict", "loss_scaler"}),
    ],
)
def test_zero_states_have_the_keys_that_the_reader_uses(stage, keys):
    missing = keys - make_engine(stage).optimizer.state_dict().keys()
    assert not missing, f"ZeRO {stage} saves no {missing} any more: checkpoints.shards cannot read its files"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_checkpoint_files_have_the_names_that_the_reader_opens(stage):
    from megalowbit.checkpoints.shards import model_file, optimizer_file

    engine = make_engine(stage)
    assert engine._get_ckpt_name("", "").endswith(model_file(stage, 0)), (
        "DeepSpeed has renamed its model files: checkpoints.shards does not find them"
    )
    if stage:
        assert engine._get_zero_ckpt_name("", "").endswith(optimizer_file(0, 0)), (
            "DeepSpeed has renamed its optimizer files: checkpoints.shards does not find them"
        )


def test_a_load_at_stage_three_opens_the_files_that_are_read_ahead(tmp_path):
    engine = make_engine(3)
    engine.save_checkpoint(str(tmp_path), tag="t")
    opened = []
    engine.checkpoint_engine.read_ahead = opened.extend
    engine.load_checkpoint(str(tmp_path), tag="t")
    written = sorted(str(path) for path in (tmp_path / "t").glob("*.pt"))
    assert sorted(opened) == written, "a file that one rank cannot read would leave the others waiting"
    assert opened == [engine._get_ckpt_name(tmp_path, "t"), engine._get_zero_ckpt_name(tmp_path, "t")]
