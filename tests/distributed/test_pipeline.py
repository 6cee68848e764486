"""Stages on real ranks, against the same training in one process: plain torch, autograd, AdamW in fp32."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from quick_cases import slow_except
from tiny_models import KINDS

from megalowbit.layers.conversion.convert import convert

HERE = Path(__file__).parent
QUICK_KINDS = {"gpt2", "llama"}


@pytest.fixture(scope="module")
def program():
    """The module `ranks_pipeline`, for its models and batches."""
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location("ranks_pipeline", HERE / "ranks_pipeline.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [tmp_path_factory.mktemp("run") for _ in range(2)]


@pytest.fixture
def seen(launch_once, folders, part):
    """What both ranks of ranks_pipeline.py reported."""
    return launch_once("ranks_pipeline.py", {"quick": "two", "rest": "rest of two"}[part], folders[0])


@pytest.fixture
def of_four(launch_once, folders, part):
    name = {"quick": "four", "rest": "rest of four"}[part]
    return launch_once("ranks_pipeline.py", name, folders[1], world_size=4)


def one_process(program, kind, *, data_size=1, is_padded=False, recipe=None, steps=3, micro_batches=None):
    """Losses and norms of the same training by autograd on the whole model, and its weights."""
    count = micro_batches or program.MICRO_BATCHES
    model = program.hf_model(kind)
    if recipe is not None:
        convert(model, recipe, seed=7)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    facts = []
    for step in range(steps):
        total = 0.0
        for rank in range(data_size):
            for each in range(count):
                loss = model(**program.batch(step, each, rank, is_padded=is_padded)).loss
                (loss / (count * data_size)).backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        facts.append((total / (count * data_size), norm))
    return facts, dict(model.named_parameters(remove_duplicate=False))


def check(found, expected, tolerance):
    for step, (loss, norm) in zip(found["steps"], expected, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=tolerance)
        assert step["norm"] == pytest.approx(norm, rel=tolerance)


@pytest.mark.parametrize("kind", slow_except(QUICK_KINDS, KINDS))
def test_two_stages_train_as_one_process(seen, program, kind):
    expected, weights = one_process(program, kind, is_padded=kind != "gpt2")
    for rank in seen:
        check(rank[kind], expected, 2e-6)  # fp32; sums in another order
        for name, values in rank[kind]["weights"].items():
            # AdamW makes steps of lr out of gradients near zero
            torch.testing.assert_close(
                torch.tensor(values), weights[name].detach().flatten(), atol=5e-5, rtol=1e-4
            )


@pytest.mark.parametrize("kind", slow_except(QUICK_KINDS, KINDS))
def test_each_parameter_is_on_one_stage_under_its_own_name(seen, program, kind):
    model = program.hf_model(kind)
    names = [rank[kind]["names"] for rank in seen]
    assert not names[0].keys() & names[1].keys()
    assert names[0].keys() | names[1].keys() == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    different = {local: name for each in names for local, name in each.items() if local != name}
    assert different == ({"lm_head.weight": "transformer.wte.weight"} if kind == "gpt2" else {})


@pytest.mark.parametrize(
    "case", slow_except({"gpt2", "fp16", "lowbit"}, ["gpt2", "fp16", "lowbit", "dropout"])
)
def test_copies_of_a_tied_weight_stay_bit_identical(seen, case):
    first, last = (rank[case]["weights"] for rank in seen)
    assert first["transformer.wte.weight"] == last["lm_head.weight"]


@pytest.mark.parametrize(
    ("case", "kind", "tolerance"),
    [("fp16", "gpt2", 5e-3), pytest.param("bf16", "llama", 3e-2, marks=pytest.mark.slow)],
)
def test_half_precision_stays_near_fp32(seen, program, case, kind, tolerance):
    expected, _ = one_process(program, kind)
    for rank in seen:
        check(rank[case], expected, tolerance)


def test_zeros_of_all_stages_are_counted(seen, program):
    model = program.hf_model("gpt2")
    for each in range(program.MICRO_BATCHES):
        model(**program.batch(0, each)).loss.backward()
    expected = sum((p.grad == 0).sum().item() for p in model.parameters())
    assert expected >= (16 - program.TOKENS) * 32  # positions that no token has
    for rank in seen:
        # biases of keys: zero, but for rounding
        assert rank["zeros"]["steps"][0]["zeros"] == pytest.approx(expected, abs=16)
        assert rank["gpt2"]["steps"][0]["zeros"] is None


def test_norms_stay_fp32_in_every_stage(seen, program):
    expected, _ = one_process(program, "gpt2")
    for rank in seen:
        check(rank["fp32_norms"], expected, 3e-2)
        for name, dtype in rank["fp32_norms"]["dtypes"].items():
            assert dtype == ("torch.float32" if "ln_" in name else "torch.bfloat16"), name


@pytest.mark.slow
def test_autocast_acts_in_every_stage(seen, program):
    expected, _ = one_process(program, "gpt2")
    for rank in seen:
        check(rank["autocast"], expected, 3e-2)
        plain = rank["autocast_off"]["steps"]
        assert rank["autocast"]["steps"] != plain  # norms and softmax were computed in fp32


def test_low_bit_stages_draw_the_numbers_of_one_process(seen, program):
    """Stochastic forward and backward: other numbers anywhere would move loss and norm by 1e-3."""
    expected, _ = one_process(program, "gpt2", recipe=program.STOCHASTIC)
    unquantised, _ = one_process(program, "gpt2")
    for rank in seen:
        check(rank["lowbit"], expected, 1e-5)
        assert rank["lowbit"]["steps"][-1]["norm"] != pytest.approx(unquantised[-1][1], rel=1e-3)


@pytest.mark.parametrize(
    ("plain", "recomputed"),
    [("lowbit", "recomputed"), pytest.param("dropout", "dropout_recomputed", marks=pytest.mark.slow)],
)
def test_recomputed_activations_are_those_of_their_own_micro_batch(seen, plain, recomputed):
    for rank in seen:
        assert rank[recomputed] == rank[plain]


@pytest.mark.slow
def test_one_micro_batch_is_enough(seen, program):
    expected, _ = one_process(program, "gpt2", micro_batches=1)
    for rank in seen:
        check(rank["one_micro_batch"], expected, 2e-6)


@pytest.mark.parametrize("precision", slow_except({"fp16"}, ["fp16", "bf16"]))
def test_overflow_in_one_stage_skips_the_step_in_all(seen, precision):
    for rank in seen:
        steps = rank["overflow"][precision]["steps"]
        check_skips(steps)
        assert [step["where"] and step["where"][1] for step in steps[2:5]] == [0, 1, 1]
        assert steps[2]["where"][0] == "transformer.wte.weight"
        # it spread from the last stage, whose last block is the first to run backward, to all of the first
        assert steps[4]["where"][0].startswith("transformer.h.2.")
        assert steps[4]["ranks"] == [0, 1]


def check_skips(steps):
    """Of `overflow`: the third, fourth and fifth step were skipped, and nothing else."""
    assert [step["was_applied"] for step in steps] == [True, True, False, False, False, True, True]
    assert [step["skipped"] for step in steps] == [0, 0, 1, 2, 3, 3, 3]
    assert [step["norm"] is None for step in steps] == [False, False, True, True, True, False, False]
    # the warm-up starts at lr 0, so the first two steps move nothing
    assert [step["has_moved"] for step in steps[2:]] == [False, False, False, True, True]
    lrs = [step["lr"] for step in steps]
    assert lrs[1] == lrs[2] == lrs[3] == lrs[4] < lrs[5] < lrs[6]


def test_the_scale_backs_off_equally_in_all_stages(seen):
    for rank in seen:
        scales = [step["scale"] for step in rank["overflow"]["fp16"]["steps"]]
        assert scales == [4096, 4096, 4096, 2048, 1024, 1024, 1024]


def test_copies_of_a_tied_weight_stay_equal_after_overflows(seen):
    first, last = (rank["overflow"]["fp16"]["weights"] for rank in seen)
    assert first["transformer.wte.weight"] == last["lm_head.weight"]


def test_an_evaluation_does_not_affect_training(seen):
    for rank in seen:
        found = rank["evaluation"]
        assert found["with"] == found["without"]
        assert found["evaluated"][0] == found["evaluated"][1] != found["with"]["losses"][0]


def test_a_resumed_run_equals_an_uninterrupted_one(seen):
    for rank in seen:
        found = rank["resume"]
        assert found["resumed"] == found["stopped"]
        assert found["is_alike"]
        assert {f"layer_{part:02d}-model_states.pt" for part in range(5)} <= set(found["files"])
        assert {f"mp_rank_{stage:02d}_model_states.pt" for stage in range(2)} <= set(found["files"])


@pytest.mark.quick_part
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ("zero_fp32", 2e-6),
        pytest.param("zero_fp16", 5e-3, marks=pytest.mark.slow),
        pytest.param("zero_bf16", 3e-2, marks=pytest.mark.slow),
        pytest.param("zero_offloaded", 3e-2, marks=pytest.mark.slow),
    ],
)
def test_stages_with_shared_optimizer_states_train_as_one_process(of_four, program, case, tolerance):
    expected, weights = one_process(program, "gpt2", data_size=2)
    for rank in of_four:
        check(rank[case], expected, tolerance)
        if case == "zero_fp32":
            for name, values in rank[case]["weights"].items():
                torch.testing.assert_close(
                    torch.tensor(values), weights[name].detach().flatten(), atol=5e-5, rtol=1e-4
                )
    found = [rank[case]["weights"] for rank in of_four]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0]["transformer.wte.weight"] == found[2]["lm_head.weight"]


@pytest.mark.slow
def test_low_bit_stages_with_shared_optimizer_states(of_four):
    for rank in of_four:
        expected = [(step["loss"], step["norm"]) for step in rank["llama"]["steps"]]
        check(rank["zero_llama"], expected, 1e-5)


@pytest.mark.parametrize("stage", slow_except({"1"}, ["0", "1"]))
def test_an_overflow_in_a_stage_with_data_parallel_ranks_is_located(of_four, stage):
    for rank in of_four:
        steps = rank["overflow"][stage]["steps"]
        check_skips(steps)
        assert steps[2]["where"][0] == "transformer.wte.weight"
        assert steps[4]["where"][0].startswith("transformer.h.2.")
        if stage == "0":  # looked at before they were averaged
            assert [step["where"][1] for step in steps[2:5]] == [0, 2, 2]
        else:
            assert [step["where"][1] for step in steps[2:5]] == [None, None, None]
            assert [step["ranks"] for step in steps[2:5]] == [[0, 1], [2, 3], [2, 3]]
            assert "on one of the 2 ranks from 2 to 3" in steps[4]["line"]
    first, last = of_four[0]["overflow"][stage]["weights"], of_four[2]["overflow"][stage]["weights"]
    assert first["transformer.wte.weight"] == last["lm_head.weight"]


def test_a_resumed_run_with_shared_optimizer_states_equals_an_uninterrupted_one(of_four):
    for rank in of_four:
        assert rank["resume"]["resumed"] == rank["resume"]["stopped"]
        assert rank["resume"]["is_alike"]


def test_a_callable_makes_the_optimizer_of_each_stage(seen, program):
    model = program.hf_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        total = 0.0
        for each in range(program.MICRO_BATCHES):
            loss = model(**program.batch(step, each)).loss
            (loss / program.MICRO_BATCHES).backward()
            total += loss.item() / program.MICRO_BATCHES
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for rank in seen:
            assert rank["callable"][step] == pytest.approx(total, rel=2e-6)


def test_gathered_weights_are_the_models(seen, of_four):
    assert [rank["whole"] for rank in seen] == [True, None]
    assert [rank["whole"] for rank in of_four] == [True, None, None, None]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("whole", ("pipeline.stages = 2", "mlb.pipeline_module(model, num_stages=2)")),
        ("stages", ("pipeline.stages = 3", "2 processes")),
        ("partition", ("pipeline.partition = 'type:x'", '"uniform"')),
        ("zero", ("zero_optimization.stage = 2", "set it to 1 or 0")),
        ("one stage", ("pipeline.stages = 1", "num_stages = 2", "use the same value")),
        ("other partition", ("pipeline.partition = 'uniform'", "partition = 'parameters'")),
        ("other interval", ("activation_checkpoint_interval = 1, but", "activation_checkpoint_interval = 2")),
        ("frozen", ("rank 0: stage 0 has no trainable parameter", "requires_grad", "pipeline.partition")),
        ("others", ("optimizer holds", "pass a callable")),
        ("norm", ("gradient_norm = 'sum_of_norms'", '"global"')),
        ("layers", ("layer_scaling.enabled", "set it to false")),
        ("replay", ("activation_checkpoint_interval = 1", "split_input")),
        ("foreign", ("PipelineModule", "mlb.pipeline_module")),
    ],
)
def test_unsupported_pipeline_settings_are_one_line_errors(seen, case, parts):
    for rank in seen:
        message = rank["refusals"][case]
        assert message is not None
        assert "\n" not in message
        for part in parts:
            assert part in message


def test_a_block_with_the_same_values_is_accepted(seen):
    assert [rank["refusals"]["same block"] for rank in seen] == [None, None]


@pytest.mark.parametrize("kind", slow_except(QUICK_KINDS, KINDS))
def test_packed_documents_are_kept_apart_in_all_stages(seen, program, kind):
    model, total = program.hf_model(kind), 0.0
    for each in range(program.MICRO_BATCHES):
        loss = model(**program.packed_batch(each)).loss / program.MICRO_BATCHES
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    for rank in seen:
        assert rank["packed"][kind] == pytest.approx([total, norm], rel=2e-6)


def test_stages_give_flash_attention_the_bounds_of_documents(seen):
    for rank in seen:
        *found, calls = rank["packed by flash attention"]
        assert found == pytest.approx(rank["packed"]["llama"], rel=2e-6)
        assert calls
        assert all(bounds == [0, 5, 12, 17, 24] for bounds in calls)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("ended", ("engine.train_batch ended after 2 of the 3",)),
        ("ended in the last", ("rank 1: the data iterator of engine.train_batch ended after 1 of the 3",)),
        ("ended in evaluation", ("engine.eval_batch ended after 3 of the 4",)),
        ("labels", ("no 'labels'",)),
        ("token", ("in input_ids, which is not in the vocabulary", "0 … 39")),
        ("long", ("24 tokens in a sequence", "16 positions")),
        ("list", ("data of type list", "iter(…)")),
        ("nothing", ("no data", "iter(…)")),
        ("shapes", ("[(2, 11)] after [(2, 12)]", "dynamic_shape=True")),
        ("shapes later", ("[(2, 11)] after [(2, 12)]", "dynamic_shape=True")),
        ("forward", ("engine.train_batch(iterator)",)),
        ("backward", ("engine.train_batch(iterator)",)),
        ("step", ("engine.train_batch(iterator)",)),
    ],
)
def test_wrong_data_end_all_ranks_with_the_same_line(seen, case, parts):
    messages = {rank["reading"][case] for rank in seen}
    assert len(messages) == 1
    message = messages.pop()
    assert message is not None
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_an_error_while_reading_on_one_rank_ends_all_ranks(seen):
    assert seen[0]["reading"]["broken"] == "OSError: no such shard"
    assert seen[1]["reading"]["broken"] == "RuntimeError: rank 0: OSError: no such shard"


def test_rejected_data_do_not_affect_training(seen):
    for rank in seen:
        first = rank["gpt2"]["steps"][0]["loss"]
        assert rank["reading"]["losses"] == [first, first]
        assert rank["reading"]["shapes after a reset"] is None


def test_a_plain_engine_does_not_ask_the_groups_of_earlier_stages(seen, program):
    model = program.hf_model("gpt2")
    loss = model(**program.batch(0, 0)).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    for rank in seen:
        assert rank["plain_after_stages"] == pytest.approx([loss.item(), norm], rel=2e-6)


def test_a_stage_without_parts_is_refused(of_four):
    for rank in of_four:
        assert "pipeline.stages = 4 leaves stage" in rank["empty"]
        assert "3 parts" in rank["empty"]


@pytest.mark.slow
def test_stages_with_data_parallel_ranks_train_as_one_process(of_four, program):
    expected, _ = one_process(program, "gpt2", data_size=2)
    for rank in of_four:
        check(rank["two_by_two"], expected, 2e-6)
    weights = [rank["two_by_two"]["weights"] for rank in of_four]
    assert weights[0] == weights[1]
    assert weights[2] == weights[3]
    assert weights[0]["transformer.wte.weight"] == weights[2]["lm_head.weight"]


def test_middle_stages_pass_on_masks_and_gradients(of_four, program):
    expected, _ = one_process(program, "gpt2", is_padded=True)
    for rank in of_four:
        check(rank["four_stages"], expected, 2e-6)
    first, last = of_four[0]["four_stages"]["weights"], of_four[3]["four_stages"]["weights"]
    assert first["transformer.wte.weight"] == last["lm_head.weight"]
