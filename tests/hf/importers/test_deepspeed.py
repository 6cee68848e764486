"""Checkpoints that plain DeepSpeed wrote on several ranks, compared with the weights of its live engine."""

import argparse
import shutil
from pathlib import Path

import deepspeed_writer
import pytest
import torch
from deepspeed_cases import CASES, FROZEN
from forks import run_processes
from quick_cases import slow_except
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import export_checkpoint, import_checkpoint, plan_import
from megalowbit.hf.importers.deepspeed import read_deepspeed
from megalowbit.hf.importers.registry import is_foreign, read_foreign
from megalowbit.json_text import read_json_object

PROGRAM = Path(__file__).parent / "ranks_deepspeed.py"
QUICK = ["fp16 at 2", "bf16 at 3, frozen"]
UNIVERSAL = ["bf16 at 1, frozen", "fp16 at 2", "bf16 at 3, frozen"]
UNIVERSAL += ["bf16 with fp32 gradients at 1", "fp16 at 3, many groups", "fp32 at 3"]
WRONG_IN_DEEPSPEED = "bf16 at 2, round robin"  # its masters by name belong to other parameters


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(case, world_size=2) -> folder` of the run; programs start once for all quick or slow cases."""
    made = {}

    def run(case, world_size=2):
        kind = (world_size, case in QUICK)
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(f"deepspeed{world_size}")
            cases = [each for each in CASES if (each in QUICK) == kind[1]]
            codes, outputs = run_processes(
                PROGRAM, made[kind], *cases, folder=made[kind], world_size=world_size
            )
            assert codes == [0] * world_size, outputs[0][-3000:]
        return made[kind] / case

    return run


@pytest.fixture
def damaged(saved, tmp_path):
    """`damaged(case) -> step folder` of a copy."""

    def copy(case):
        return shutil.copytree(saved(case), tmp_path / "run") / "global_step3"

    return copy


def config_of(run):
    return read_json_object(run / "config.json")


def expected_of(run):
    return torch.load(run / "expected.pt")


def change(file, function):
    content = torch.load(file, weights_only=False)
    function(content)
    torch.save(content, file)


def to_universal(run, out):
    """DeepSpeed's own tool, in this process."""
    from deepspeed.checkpoint import ds_to_universal  # seconds, for slow tests only

    options = argparse.Namespace(
        input_folder=str(run / "global_step3"), output_folder=str(out), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(options)
    return out


SOME_RANKS = [(case, 2) for case in CASES] + [(case, 3) for case in CASES]


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        pytest.param(case, size, marks=() if size == 2 and case in QUICK else pytest.mark.slow)
        for case, size in SOME_RANKS
        if case != WRONG_IN_DEEPSPEED
    ],
)
def test_every_weight_is_that_of_the_live_engine(saved, case, world_size):
    run = saved(case, world_size)
    assert is_foreign(run)
    found, expected = read_foreign(run, config_of(run)), expected_of(run)
    assert found.weights.keys() - expected.keys() <= {"lm_head.weight"}  # tied
    for name, value in expected.items():
        got = found.weights[name]
        is_half = "frozen" in case and name in FROZEN
        assert (got.dtype == torch.float32) == (not is_half), name
        assert found.weights.stored[name].shape == tuple(got.shape)
        assert not got.requires_grad
        assert got.float().equal(value), name
    assert "step 3" in found.description


@pytest.mark.slow
def test_masters_in_round_robin_order_round_to_the_models_weights(saved):
    """DeepSpeed's names for masters are wrong here, also in its tools; the model's weights are not."""
    run = saved(WRONG_IN_DEEPSPEED)
    found = read_foreign(run, config_of(run)).weights
    model = torch.load(run / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert all(found[name].bfloat16().equal(value) for name, value in model.items())
    assert any(not found[name].equal(value.float()) for name, value in model.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_checkpoints_hold_the_same_weights(saved, tmp_path, case):
    run = saved(case)
    universal = to_universal(run, tmp_path / "universal" / "step")
    found, expected = read_foreign(universal, config_of(run)), expected_of(run)
    assert found.weights.keys() - expected.keys() <= {"lm_head.weight"}
    assert all(found.weights[name].float().equal(value) for name, value in expected.items())
    assert "universal" in found.description
    assert read_foreign(universal.parent, config_of(run)).weights.keys() == found.weights.keys()
    shutil.rmtree(universal / "zero" / "transformer.ln_f.weight", ignore_errors=True)
    shutil.rmtree(universal / "zero" / "model.norm.weight", ignore_errors=True)
    with pytest.raises(UserError, match="lacks zero/"):
        read_foreign(universal, config_of(run))


@pytest.mark.slow
def test_a_universal_checkpoint_in_wrong_order_is_found(saved, tmp_path):
    run = saved(WRONG_IN_DEEPSPEED)
    found = read_foreign(to_universal(run, tmp_path / "universal"), config_of(run)).weights
    with pytest.raises(UserError, match="does not round to the model's bfloat16 weight"):
        list(found.values())


@pytest.mark.parametrize("case", slow_except(QUICK[1:], ["fp16 at 0", "bf16 at 1, frozen", *QUICK]))
def test_through_a_checkpoint_to_start_from_to_hugging_face(saved, tmp_path, case):
    run = saved(case)
    plan = plan_import(run, shard_size=20_000)  # the run's folder has a config.json
    assert len(plan.shards) > 1
    plan.run(tmp_path / "start", is_verified=True)
    export_checkpoint(tmp_path / "start", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    expected = expected_of(run)
    for name, value in model.named_parameters():
        assert value.dtype == torch.float32
        assert value.detach().float().equal(expected[name]), name


def test_half_weights_are_used_and_reported_where_there_are_no_masters(damaged, caplog):
    step = damaged("fp16 at 2")
    expected = {name: value.half() for name, value in expected_of(step.parent).items()}
    for file in step.glob("*optim_states.pt"):
        file.unlink()
    found = read_deepspeed(step, config_of(step.parent)).weights
    assert all(found[name].equal(value) for name, value in expected.items())
    assert "its fp32 masters are missing or not certain, so its float16 weights are used" in caplog.text


@pytest.mark.slow
def test_masters_of_stage_zero_in_flat_groups(damaged, caplog):
    """DeepSpeed's fused optimizer flattens every group, which is the only difference."""
    step = damaged("fp16 at 0")
    expected, file = expected_of(step.parent), step / "mp_rank_00_model_states.pt"

    def flatten(content):
        groups = content["optimizer"].pop("fp32_groups")
        content["optimizer"]["fp32_groups_flat"] = [
            torch.cat([e.flatten() for e in group]) for group in groups
        ]

    change(file, flatten)
    found = read_deepspeed(step, config_of(step.parent)).weights
    assert all(found[name].equal(value) for name, value in expected.items())
    change(file, lambda content: content["optimizer"]["fp32_groups_flat"][1].data[-1].add_(1))
    found = read_deepspeed(step, config_of(step.parent)).weights
    assert all(found[name].equal(value.half()) for name, value in expected.items())
    assert "its fp32 masters are missing or not certain, so its float16 weights are used" in caplog.text


def test_missing_files_of_ranks_are_named(damaged):
    step = damaged("bf16 at 3, frozen")
    config = config_of(step.parent)
    (shard,) = step.glob("*zero_pp_rank_1_*optim_states.pt")
    shard.rename(step.parent / "shard")
    with pytest.raises(UserError, match=r"lacks optim_states\.pt of data-parallel rank 1 of 2: add"):
        read_deepspeed(step, config)
    (step.parent / "shard").rename(shard)
    (step / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(UserError, match=r"lacks model_states\.pt of data-parallel rank 1 of 2"):
        read_deepspeed(step, config)
    (step / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(UserError, match="holds only optimizer states"):
        read_foreign(step, config)


def test_files_of_different_steps_are_refused(damaged):
    step = damaged("bf16 at 3, frozen")
    config = config_of(step.parent)
    (shard,) = step.glob("*zero_pp_rank_1_*optim_states.pt")

    def set_step(content):
        for state in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["step"] += 1

    change(shard, set_step)
    with pytest.raises(
        UserError, match=r"mixes steps: \S*rank_0\S* was saved at step 3\.0, \S* at step 4\.0"
    ):
        read_deepspeed(step, config)
    file = step / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    change(file, lambda content: content.update(global_steps=2))
    with pytest.raises(UserError, match=r"mixes steps: .* was saved at step 3, .* at step 2"):
        read_deepspeed(step, config)


def test_shards_of_another_run_do_not_round_to_the_models_weights(damaged):
    step = damaged("fp16 at 2")
    (shard,) = step.glob("zero_pp_rank_1_*optim_states.pt")
    flats = "single_partition_of_fp32_groups"
    change(shard, lambda content: content["optimizer_state_dict"][flats][0].data.mul_(1.01))
    found = read_deepspeed(step, config_of(step.parent)).weights
    with pytest.raises(UserError, match="does not round to the model's float16 weight"):
        list(found.values())


@pytest.mark.parametrize("case", ["fp16 at 2", "bf16 at 3, frozen"])
def test_shards_of_another_size_are_refused(damaged, case):
    step = damaged(case)
    key = "fp32_flat_groups" if "3" in case else "single_partition_of_fp32_groups"
    (shard,) = step.glob("*zero_pp_rank_1_*optim_states.pt")

    def cut(content):
        content["optimizer_state_dict"][key][0] = content["optimizer_state_dict"][key][0][:-9].clone()

    change(shard, cut)
    with pytest.raises(UserError, match="elements, its parameters have"):
        read_deepspeed(step, config_of(step.parent))


def test_ranks_that_describe_other_models_are_refused(tmp_path):
    run = deepspeed_writer.write(tmp_path / "run", tiny_model("llama"), stage=3)
    file = run / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    change(file, lambda content: content["param_shapes"][0].move_to_end("model.embed_tokens.weight"))
    with pytest.raises(UserError, match=r"mixes checkpoints: param_shapes in \S*rank_1\S* is not that in"):
        read_foreign(run, config_of(run))


def test_rounded_masters_are_not_taken_for_the_others(tmp_path):
    run = deepspeed_writer.write_universal(tmp_path / "run", tiny_model("llama"))
    assert len(read_foreign(run, config_of(run)).weights) == len(list(tiny_model("llama").parameters()))
    file = run / "global_step3" / "zero" / "model.norm.weight" / "fp32.pt"
    change(file, lambda content: content.update(param=content["param"].bfloat16()))
    with pytest.raises(UserError, match=r"masters of several dtypes, .*bfloat16 \(model\.norm\.weight\)"):
        read_foreign(run, config_of(run))


def test_a_configuration_that_does_not_fit_is_refused_with_names_and_shapes(saved, tmp_path):
    run = saved("fp16 at 2")
    wider = tiny_config("llama", vocab_size=61, hidden_size=36, num_heads=6, intermediate_size=48)
    wider.save_pretrained(tmp_path / "wider")
    message = (
        r"weight model\.layers\.0\.mlp\.gate_proj\.weight has shape \(47, 36\), its configuration says \(48, "
    )
    with pytest.raises(UserError, match=message):
        import_checkpoint(run, tmp_path / "out", config=tmp_path / "wider")
    tiny_config("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(
        UserError, match=r"lacks the weight transformer\.\S+ and \d+ others: correct --config"
    ):
        import_checkpoint(run, tmp_path / "out", config=tmp_path / "gpt2" / "config.json")
    with pytest.raises(
        UserError, match=r"has no Hugging Face configuration: name a config\.json with --config"
    ):
        import_checkpoint(run / "global_step3", tmp_path / "out")
    with pytest.raises(UserError, match="--config nowhere is neither a file nor a folder"):
        import_checkpoint(run, tmp_path / "out", config=Path("nowhere"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mp_rank_01_model_states.pt", "holds tensor-parallel shards"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "holds tensor-parallel shards"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "holds experts"),
        ("layer_00-model_00-model_states.pt", "holds pipeline stages"),
    ],
)
def test_models_that_were_split_otherwise_are_refused(damaged, name, message):
    step = damaged("fp16 at 2")
    (step / name).touch()
    with pytest.raises(UserError, match=message):
        read_foreign(step.parent, config_of(step.parent))


@pytest.mark.slow
def test_names_of_wrappers_are_removed(damaged):
    step = damaged("fp16 at 0")
    expected = expected_of(step.parent)

    def wrap(content):
        content["module"] = {f"module._orig_mod.{name}": value for name, value in content["module"].items()}

    change(step / "mp_rank_00_model_states.pt", wrap)
    found = read_deepspeed(step, config_of(step.parent)).weights
    assert found.keys() == {*expected, "lm_head.weight"}


def test_a_checkpoint_of_megalowbit_without_its_manifest_is_not_taken_for_deepspeeds(damaged):
    step = damaged("fp16 at 2")
    change(step / "mp_rank_00_model_states.pt", lambda content: content.update(megalowbit_engine={}))
    with pytest.raises(UserError, match=r"was written by megalowbit and lost its manifest\.json"):
        read_foreign(step, config_of(step.parent))


def test_a_run_without_latest_and_one_with_a_wrong_latest_are_explained(damaged):
    step = damaged("fp16 at 2")
    (step.parent / "latest").write_text("global_step4")
    with pytest.raises(UserError, match="latest names global_step4, which is not in"):
        is_foreign(step.parent)
    (step.parent / "latest").unlink()
    with pytest.raises(UserError, match="has no file latest: name one of its folders: global_step3"):
        is_foreign(step.parent)
    with pytest.raises(UserError, match="is neither DeepSpeed's nor Megatron-LM's"):
        read_foreign(step.parent.parent / "nowhere", {})
