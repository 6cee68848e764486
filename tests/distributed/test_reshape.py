"""A run saved at any ZeRO stage on two ranks goes on at any stage, on one, two or three.

So do runs with CPU offload, low-bit recipes, tensor ranks and stages of a pipeline: see checkpoint_cases.py.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from quick_cases import slow_except
from transformers import AutoModelForCausalLM

from megalowbit.checkpoints.contents import CheckpointContents
from megalowbit.hf.checkpoint import export_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.quick_part]

STAGES = range(4)
# bitwise if nothing is resharded; elsewhere fp32 sums in another order, and fp16 weights a bit apart
TOLERANCE = 1e-4
# the same for the other cases: shards' partial sums are rounded to half precision before they are added
CUT_TOLERANCES = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 1e-2}
# scales of low-bit tensors are of a rank's own batch, directions of splits start anew on another grid
LOW_BIT_TOLERANCE = 2e-2
HERE = Path(__file__).parent


def load_cases():
    """The module `checkpoint_cases`, which the launched program imports by name."""
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location("checkpoint_cases", HERE / "checkpoint_cases.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module


CASES = load_cases()
CUT = [*CASES.STAGES, *CASES.TENSOR]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {part: tmp_path_factory.mktemp(part) for part in ("quick", "rest")}


@pytest.fixture
def folder(folders, part):
    return folders[part]


@pytest.fixture
def saved(launch_once, folder, part):
    return launch_once("ranks_reshape.py", folder, "save", part)


@pytest.fixture
def on_one(launch_once, folder, part, saved):
    return launch_once("ranks_reshape.py", folder, "resume", part, world_size=1)


@pytest.fixture
def on_two(launch_once, folder, part, on_one):
    """Resumes what two ranks have saved, and what one has saved then."""
    return launch_once("ranks_reshape.py", folder, "resume", part)


@pytest.fixture
def on_three(launch_once, folder, part, saved):
    return launch_once("ranks_reshape.py", folder, "resume", part, world_size=3)


@pytest.fixture(
    params=[
        "on_one",
        "on_two",
        pytest.param("on_one", marks=pytest.mark.slow, id="on_one, other pairs"),
        pytest.param("on_two", marks=pytest.mark.slow, id="on_two, other pairs"),
        pytest.param("on_three", marks=pytest.mark.slow),
    ]
)
def resumed(request):
    """What each rank saw, by pair of stages: the one that saved, the one that continues."""
    return [
        {tuple(map(int, key.split())): case for key, case in rank.items() if key != "cases"}
        for rank in request.getfixturevalue(request.param)
    ]


def test_masters_and_moments_come_back_bit_for_bit(resumed, part):
    for rank in resumed:
        assert len(rank) == {"quick": 4, "rest": 12}[part]  # pairs of stages: sixteen in all
        assert {before for before, _ in rank} == {after for _, after in rank} == set(STAGES)
        assert [pair for pair, case in rank.items() if case["differing"]] == []


def test_counters_and_client_state_come_back(resumed):
    for rank in resumed:
        for (before, _), case in rank.items():
            assert case["counters"] == [3, 0, 18]
            assert case["state"] == {"note": before}


def test_losses_scales_and_learning_rates_equal_those_of_an_uninterrupted_run(resumed, saved):
    for before, after in resumed[0]:
        case, whole = resumed[0][before, after]["after"], saved[0][str(before)]["after"]
        for (loss, *rest), (expected, *expected_rest) in zip(case, whole, strict=True):
            assert rest == expected_rest, (before, after)
            assert loss == pytest.approx(expected, abs=TOLERANCE), (before, after)
        if before == after and len(resumed) == 2:  # nothing is resharded
            assert case == whole


def test_the_run_has_all_state_that_a_checkpoint_must_hold(saved):
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
def test_files_hold_plain_data_and_are_all_in_the_manifest(saved, folder, stage):
    step = folder / str(stage) / "step-00000003"
    files = sorted(path.name for path in step.glob("*.pt"))
    for name in files:
        torch.load(step / name, weights_only=True)  # executes nothing, or fails
    manifest = json.loads((step / "manifest.json").read_text())
    assert [entry["name"] for entry in manifest["files"]] == files
    assert len(files) == {0: 1, 3: 4}.get(stage, 3)
    assert sorted(path.name for path in step.parent.iterdir()) == ["latest", "step-00000003"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_read_error_on_one_rank_is_raised_on_all(saved, stage):
    lines = [rank["methods"][f"unreadable {stage}"] for rank in saved]
    assert lines[0].startswith("rank 0: ")
    assert "cannot be read ([Errno 5] Input/output error): use an older checkpoint" in lines[0]
    assert lines == [lines[0]] * 2


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deepspeeds_own_save_and_load_continue_bitwise(saved, stage):
    assert [rank["methods"][f"same {stage}"] for rank in saved] == [[{"note": stage}, True]] * 2
    assert [rank["methods"]["another stage"] for rank in saved] == [{"note": 3}] * 2


def test_stochastic_rounding_continues_on_the_same_ranks_and_on_one(saved, on_one):
    assert [rank["methods"]["stream"] for rank in saved] == [True, True]
    assert [rank["cases"]["position"] for rank in on_one] == [3 * CASES.MICRO_BATCHES]


def test_deepspeeds_own_load_finds_damage_on_all_ranks(saved):
    for name, line in (("swapped", "_optim_states.pt has "), ("truncated", "has 1000 bytes instead of")):
        lines = [rank["methods"][name] for rank in saved]
        assert "is damaged: zero_pp_rank_" in lines[0]
        assert line in lines[0]
        assert lines == [lines[0]] * 2
    for rank in saved:
        assert rank["methods"]["tags"].startswith("rank 1 was given checkpoint ")
        assert rank["methods"]["load tags"].startswith("rank 1 was given checkpoint ")


def test_a_wrong_argument_on_one_rank_leaves_no_rank_waiting(saved):
    for rank in saved:
        assert rank["methods"]["no tag"].startswith("rank 1: the tag of a checkpoint is ''")
        assert "'int' object is not iterable" in rank["methods"]["no state"]
        assert rank["methods"]["left"] == []


@pytest.mark.parametrize("name", slow_except(CASES.QUICK, CASES.CASES))
def test_each_case_comes_back_bit_for_bit_on_one_rank_and_on_two(on_one, on_two, name):
    for rank in [*on_one, *on_two]:
        assert rank["cases"][name]["differing"] == []


@pytest.mark.parametrize("name", slow_except(CASES.QUICK, CASES.CASES))
def test_a_case_resumed_on_the_same_grid_equals_an_uninterrupted_run_bitwise(saved, on_two, name):
    for before, after in zip(saved, on_two, strict=True):
        assert after["cases"][name]["after"] == before["cases"][name]["after"]


def is_another_grid_exact(name):
    """Whether a rank's operands are the same tensors, or the same shards of them, whatever the grid."""
    recipe = CASES.CASES[name]["recipe"]
    return recipe == "bf16" or recipe == CASES.NEAREST


def tolerance_of(name):
    precision = CASES.CASES[name].get("precision", "bf16")
    return CUT_TOLERANCES[precision] if is_another_grid_exact(name) else LOW_BIT_TOLERANCE


@pytest.mark.parametrize("name", slow_except(CASES.QUICK, CASES.CASES))
def test_a_case_resumes_with_the_same_losses_on_one_rank(saved, on_one, name):
    (found,), whole = on_one, saved[0]["cases"][name]
    for (loss, *rest), (expected, *expected_rest) in zip(
        found["cases"][name]["after"], whole["after"], strict=True
    ):
        assert rest == expected_rest
        assert loss == pytest.approx(expected, abs=tolerance_of(name))
    # steps that a wrong state would have shown in
    assert abs(whole["after"][-1][0] - whole["before"][0][0]) > 2 * tolerance_of(name)


@pytest.mark.parametrize("name", slow_except(CASES.QUICK, sorted(CASES.AGAIN)))
def test_a_case_saved_by_one_rank_resumes_on_two(on_one, on_two, name):
    for rank in on_two:
        assert rank["cases"][name]["again"]["differing"] == []
        (loss, *rest), (expected, *expected_rest) = (
            seen["cases"][name]["later"][0] for seen in (rank, on_one[0])
        )
        assert rest == expected_rest
        assert loss == pytest.approx(expected, abs=tolerance_of(name))


def has_own(ranks, name, key=None):
    """Whether each rank got the state that it alone had saved."""
    found = [rank["cases"][name] for rank in ranks]
    return [(case[key] if key else case)["has_own_state"] for case in found]


@pytest.mark.parametrize("name", slow_except(CASES.QUICK, ["metis 1", "metis 2", "metis 3"]))
def test_a_rank_restores_its_own_splits(on_one, on_two, name):
    assert has_own(on_one, name) == [True]
    assert has_own(on_two, name) == [True, True]


@pytest.mark.parametrize(
    "name", [pytest.param(f"nvfp4 {stage}", marks=pytest.mark.slow) for stage in (1, 2, 3)]
)
def test_a_recipe_without_splits_has_no_rank_state(on_two, name):
    assert has_own(on_two, name) == [False, False]


def test_a_rank_restores_its_own_state_if_the_layout_is_unchanged(on_one, on_two):
    assert has_own(on_two, "metis 2", "again") == [True, False]  # the second rank was not there
    assert has_own(on_two, "stages llama") == [True, True]
    # directions of one stage's layers are not those of another cut
    assert has_own(on_one, "stages llama") == [False]
    assert has_own(on_two, "stages llama", "again") == [False, False]


@pytest.mark.parametrize("name", slow_except(CASES.QUICK, CASES.CASES))
def test_the_reader_joins_what_ranks_hold(saved, folder, name):
    contents = CheckpointContents(folder / name / "step-00000002")
    live = torch.load(folder / name / "live2.pt")
    assert sorted(contents.parameters()) == sorted(live)  # each once, a tied one too
    for each, tensors in live.items():
        assert torch.equal(contents.weight(each), tensors["weight"]), each
        state = contents.optimizer_state(each)
        assert all(torch.equal(state[key], tensors[key]) for key in CASES.MOMENTS), each
    is_tied = CASES.CASES[name].get("is_tied", False)
    assert ("lm_head.weight" in live) != is_tied
    assert contents.layout.tied == ({"lm_head.weight": "transformer.wte.weight"} if is_tied else {})
    step = folder / name / "step-00000002"
    for path in step.glob("*.pt"):
        torch.load(path, weights_only=True)  # executes nothing, or fails


@pytest.mark.parametrize("name", slow_except(CASES.QUICK, CUT))
def test_the_export_is_the_live_model(saved, folder, name, tmp_path):
    export_checkpoint(folder / name, tmp_path / "hf", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    live = torch.load(folder / name / "live2.pt")
    exported = dict(model.named_parameters())
    assert exported.keys() == live.keys()
    for each, value in exported.items():
        expected = live[each]["weight"]
        is_conv1d = ".c_" in each and value.ndim == 2 and CASES.CASES[name]["recipe"] != "bf16"
        assert torch.equal(value, expected.t() if is_conv1d else expected), each  # a BitLinear is transposed
