"""A run saved at any ZeRO stage on two ranks goes on at any stage, on one, two or three."""

import json

import pytest
import torch

from megalowbit.checkpoints.contents import CheckpointContents

STAGES = range(4)
# bitwise where nothing is cut anew; elsewhere fp32 sums in another order, and fp16 weights a bit apart
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def saved(launch_ranks, folder):
    return launch_ranks("ranks_reshape.py", folder, "save").wait(timeout=120)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size} ranks")
def resumed(request, launch_ranks, folder, saved):
    return launch_ranks("ranks_reshape.py", folder, "resume", world_size=request.param).wait(timeout=240)


def pairs():
    return [(before, after) for before in STAGES for after in STAGES]


def test_masters_and_moments_come_back_bit_for_bit(resumed):
    for rank in resumed:
        assert {key: case["differing"] for key, case in rank.items()} == {f"{a} {b}": [] for a, b in pairs()}


def test_counters_and_client_state_come_back(resumed):
    for rank in resumed:
        assert [case["counters"] for case in rank.values()] == [[3, 0, 18]] * 16
        assert [case["state"] for case in rank.values()] == [{"note": before} for before, _ in pairs()]


def test_losses_scales_and_learning_rates_are_those_of_the_run_that_went_on(resumed, saved):
    for before, after in pairs():
        case, whole = resumed[0][f"{before} {after}"]["after"], saved[0][str(before)]["after"]
        for (loss, *rest), (expected, *expected_rest) in zip(case, whole, strict=True):
            assert rest == expected_rest, (before, after)
            assert loss == pytest.approx(expected, abs=TOLERANCE), (before, after)
        if before == after and len(resumed) == 2:
            assert case == whole


def test_the_run_used_what_a_checkpoint_must_hold(saved):
    for stage in STAGES:
        (_, *first), *_ = saved[0][str(stage)]["before"]
        (_, *last) = saved[0][str(stage)]["after"][-1]
        assert first[0] != last[0]  # scale
        assert first[1] != last[1]  # learning rate


@pytest.mark.parametrize("stage", STAGES)
def test_the_reader_finds_every_tensor_without_a_process_group(saved, folder, stage):
    contents = CheckpointContents(folder / str(stage) / "step-00000003")
    live = torch.load(folder / f"live{stage}.pt")
    assert sorted(contents.parameters()) == sorted(live)
    for name, tensors in live.items():
        assert torch.equal(contents.weight(name), tensors.pop("weight")), name
        assert contents.weight(name, as_stored=True).dtype == torch.float16
        state = contents.optimizer_state(name)
        assert {key: value for key, value in state.items() if key != "step"}.keys() == tensors.keys()
        assert all(torch.equal(state[key], value) for key, value in tensors.items()), name
        assert float(state["step"]) == 3 if tensors else not state
    assert torch.equal(contents.weight("lm_head.weight"), contents.weight("transformer.wte.weight"))


@pytest.mark.parametrize("stage", STAGES)
def test_files_hold_plain_data_and_are_all_vouched_for(saved, folder, stage):
    step = folder / str(stage) / "step-00000003"
    files = sorted(path.name for path in step.glob("*.pt"))
    for name in files:
        torch.load(step / name, weights_only=True)  # executes nothing, or fails
    manifest = json.loads((step / "manifest.json").read_text())
    assert [entry["name"] for entry in manifest["files"]] == files
    assert len(files) == {0: 1, 3: 4}.get(stage, 3)
    assert sorted(path.name for path in step.parent.iterdir()) == ["latest", "step-00000003"]
