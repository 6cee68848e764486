"""DeepSpeed's own `engine.save_checkpoint` and `engine.load_checkpoint`; two ranks: tests/distributed."""

import json

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from small_engines import ADAMW, config, make_engine, step, trained

from megalowbit.engine.checkpoints import save_and_load
from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.carried_state import stream_states
from megalowbit.layers.conversion.convert import convert, random_stream


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_saved_checkpoint_is_complete_and_continues_bit_for_bit(tmp_path, stage):
    engine = trained(stage)
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text() == "global_step2"
    names = {path.name for path in (tmp_path / "global_step2").iterdir()}
    manifest = json.loads((tmp_path / "global_step2" / "manifest.json").read_text())
    assert {entry["name"] for entry in manifest["files"]} == names - {"manifest.json"}
    expected = [step(engine, number) for number in (2, 3)]
    again = make_engine(stage, seed=1)
    path, state = again.load_checkpoint(str(tmp_path))
    assert path.startswith(str(tmp_path / "global_step2"))
    assert state == {"epoch": 3}
    assert again.global_steps == 2
    assert [step(again, number) for number in (2, 3)] == expected


@pytest.mark.parametrize(("saved", "present"), [(0, 2), (1, 3), (3, 0)])
def test_a_checkpoint_is_repartitioned_for_another_stage(tmp_path, saved, present):
    engine = trained(saved)
    engine.save_checkpoint(str(tmp_path), tag="t")
    again = make_engine(present, seed=1)
    again.load_checkpoint(str(tmp_path), "t")
    assert step(again, 2) == step(engine, 2)
    assert step(again, 3) == pytest.approx(step(engine, 3), rel=0.02)


@pytest.mark.parametrize("stage", [0, 3])
def test_damage_is_detected_before_anything_is_loaded(tmp_path, stage):
    trained(stage).save_checkpoint(str(tmp_path), tag="t")
    file = max((tmp_path / "t").glob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    engine = make_engine(stage)
    with pytest.raises(UserError, match=f"is damaged: {file.name} has SHA-256"):
        engine.load_checkpoint(str(tmp_path), tag="t")
    assert engine.global_steps == 0


def test_a_folder_without_manifest_is_refused(tmp_path):
    trained().save_checkpoint(str(tmp_path), tag="t")
    (tmp_path / "t" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"has no manifest\.json: its save was interrupted"):
        make_engine().load_checkpoint(str(tmp_path))


def test_without_latest_nothing_is_loaded(tmp_path):
    assert make_engine().load_checkpoint(str(tmp_path)) == (None, None)
    with pytest.raises(UserError, match="does not exist: use another checkpoint"):
        make_engine().load_checkpoint(str(tmp_path), tag="t")


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "a\0b"])
def test_a_tag_that_is_not_a_folder_name_is_rejected(tmp_path, tag):
    with pytest.raises(UserError, match="must be the name of a folder"):
        make_engine().save_checkpoint(str(tmp_path), tag=tag)


def test_only_leftovers_of_a_killed_save_are_overwritten(tmp_path):
    engine = trained()
    engine.save_checkpoint(str(tmp_path), tag="t")
    with pytest.raises(UserError, match="already exists and is not overwritten"):
        engine.save_checkpoint(str(tmp_path), tag="t")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not a checkpoint with a manifest"):
        engine.save_checkpoint(str(tmp_path), tag="mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    (tmp_path / "t" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"is not a checkpoint with a manifest\.json: use another tag"):
        engine.save_checkpoint(str(tmp_path), tag="t")  # like a checkpoint of stock DeepSpeed, which has none
    (tmp_path / "t" / ".saving").touch()
    engine.save_checkpoint(str(tmp_path), tag="t")
    make_engine().load_checkpoint(str(tmp_path), tag="t")


def test_a_failed_save_leaves_no_folder_and_does_not_change_latest(tmp_path):
    engine = trained()
    engine.save_checkpoint(str(tmp_path), tag="one")
    with pytest.raises(UserError, match="could only be pickled"):
        engine.save_checkpoint(str(tmp_path), tag="two", client_state={"x": object()})
    assert not (tmp_path / "two").exists()
    assert (tmp_path / "latest").read_text() == "one"


def test_saving_in_the_middle_of_accumulation_is_refused_before_anything_is_written(tmp_path):
    engine = make_engine(micro_batches=2)
    engine.save_checkpoint(str(tmp_path), tag="before")
    step(engine, 0)
    with pytest.raises(UserError, match="save between optimizer steps"):
        engine.save_checkpoint(str(tmp_path), tag="amid")
    assert {path.name for path in tmp_path.iterdir()} == {"before", "latest"}
    assert (tmp_path / "latest").read_text() == "before"
    step(engine, 1)
    assert engine.global_steps == 1
    engine.save_checkpoint(str(tmp_path), tag="amid")
    assert (tmp_path / "latest").read_text() == "amid"


@pytest.mark.parametrize("options", [{"load_module_only": True}, {"load_optimizer_states": False}])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_weights_loaded_alone_survive_the_next_step_or_are_rejected(tmp_path, stage, options):
    engine = trained(stage)
    engine.save_checkpoint(str(tmp_path), tag="t")
    again = make_engine(stage, seed=1)
    if stage == 3:
        with pytest.raises(UserError, match="ZeRO 3 stores its weights in the optimizer's files only"):
            again.load_checkpoint(str(tmp_path), tag="t", **options)
        return
    again.load_checkpoint(str(tmp_path), tag="t", **options)
    expected = [parameter.detach().clone() for parameter in engine.module.parameters()]
    for group in again.optimizer.param_groups:
        group["lr"] = 0.0
    step(again, 2)
    for parameter, value in zip(again.module.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)


def test_load_options_are_rejected_if_the_layout_differs(tmp_path):
    trained(1).save_checkpoint(str(tmp_path), tag="t")
    with pytest.raises(UserError, match="not with load_module_only; leave it out"):
        make_engine(2).load_checkpoint(str(tmp_path), tag="t", load_module_only=True)
    with pytest.raises(UserError, match="exclude_frozen_parameters is not supported"):
        make_engine().save_checkpoint(str(tmp_path), tag="u", exclude_frozen_parameters=True)


def draw(engine, numbers):
    """Steps through layers whose gradients are rounded stochastically; returns the weights after them."""
    for number in numbers:
        step(engine, number)
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


@pytest.mark.parametrize("stage", [0, 1])
def test_stochastic_rounding_continues_and_the_client_state_is_the_callers(tmp_path, stage):
    engine = make_engine(stage, recipe="nvfp4")
    draw(engine, range(3))
    engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    expected = draw(engine, range(3, 6))
    again = make_engine(stage, seed=1, recipe="nvfp4")
    assert again.load_checkpoint(str(tmp_path))[1] == {"epoch": 3}
    assert random_stream(again.module).state_dict() == {"seed": 0, "step": 3}
    for weight, same in zip(draw(again, range(3, 6)), expected, strict=True):
        assert torch.equal(weight, same)


def test_stochastic_rounding_starts_again_with_weights_alone_and_continues_at_another_stage(tmp_path):
    engine = make_engine(1, recipe="nvfp4")
    draw(engine, range(3))
    engine.save_checkpoint(str(tmp_path), tag="t")
    again = make_engine(1, recipe="nvfp4")
    again.load_checkpoint(str(tmp_path), "t", load_optimizer_states=False)
    assert random_stream(again.module).step == 0
    other = make_engine(0, recipe="nvfp4")
    other.load_checkpoint(str(tmp_path), "t")
    assert random_stream(other.module).step == 3


def test_a_checkpoint_without_the_stream_is_a_warning_for_models_that_draw(tmp_path, monkeypatch, caplog):
    def saved_by_an_earlier_version(engine, *arguments):
        state = real(engine, *arguments)
        del state["random_stream"]
        return state

    real = save_and_load._engine_state
    monkeypatch.setattr(save_and_load, "_engine_state", saved_by_an_earlier_version)
    for recipe, count in (("nvfp4", 1), ("fp8", 0), (None, 0)):
        caplog.clear()
        engine = make_engine(recipe=recipe)
        draw(engine, range(1))
        engine.save_checkpoint(str(tmp_path / str(recipe)), tag="t")
        engine.load_checkpoint(str(tmp_path / str(recipe)), "t")
        warnings = [line for line in caplog.messages if "has no position of the random stream" in line]
        assert len(warnings) == count
        assert all("continues from micro-batch 1" in line for line in warnings)


def engine_with_streams():
    """Two parts that were converted one by one, and a layer that draws from a stream of its own."""
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(2)]
    for seed, part in enumerate(parts):
        convert(part, "nvfp4", seed=seed)
    net = torch.nn.Sequential(*parts, BitLinear(16, 16, recipe="nvfp4"))
    return initialize(model=net, config=config(optimizer=ADAMW))[0]


def losses(engine, numbers):
    found = []
    for number in numbers:
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_all_streams_of_a_model_continue(tmp_path, caplog):
    engine = engine_with_streams()
    losses(engine, range(3))
    engine.save_checkpoint(str(tmp_path), tag="t")
    expected = losses(engine, range(3, 6))
    again = engine_with_streams()
    again.load_checkpoint(str(tmp_path), "t")
    states = stream_states(again.module)
    assert [state["step"] for state in states.values()] == [3, 3, 3]
    assert [states[name]["seed"] for name in ("0.0", "1.0")] == [0, 1]
    assert losses(again, range(3, 6)) == expected
    assert "random stream" not in caplog.text


def test_streams_that_an_earlier_version_did_not_save_are_a_warning(tmp_path, monkeypatch, caplog):
    def saved_by_an_earlier_version(engine, *arguments):
        state = real(engine, *arguments)
        del state["random_streams"]
        return state

    real = save_and_load._engine_state
    monkeypatch.setattr(save_and_load, "_engine_state", saved_by_an_earlier_version)
    engine = engine_with_streams()
    losses(engine, range(3))
    engine.save_checkpoint(str(tmp_path), tag="t")
    again = engine_with_streams()
    again.load_checkpoint(str(tmp_path), "t")
    assert random_stream(again.module).step == 3
    assert "has no position of the random stream of 1.0, 2: stochastic rounding there" in caplog.text


def test_streams_that_differ_between_ranks_are_saved_for_each():
    first, second, shared = {"seed": 1, "step": 3}, {"seed": 2, "step": 3}, {"seed": 0, "step": 3}
    merged = save_and_load._of_all_ranks([{"a": shared, "b": first}, {"a": shared, "b": second, "c": first}])
    assert merged == {"a": shared, "b": [first, second], "c": first}
    assert save_and_load._of_this_rank(merged) == {"a": shared, "b": first, "c": first}
    assert save_and_load._of_this_rank({"c": [None, second]}) == {"c": second}


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_load_in_the_middle_of_an_accumulation_drops_what_was_accumulated(tmp_path, stage):
    engine, twin = (make_engine(stage, micro_batches=2) for _ in range(2))
    for each in (engine, twin):
        for seed in range(2):
            step(each, seed)
    engine.save_checkpoint(tmp_path, "start")
    step(engine, 99)
    engine.load_checkpoint(tmp_path, "start")
    for each in (engine, twin):
        for seed in range(2, 6):
            step(each, seed)
    assert engine.global_steps == twin.global_steps == 3
    assert engine.get_global_grad_norm() == twin.get_global_grad_norm()
    for one, other in zip(engine.module.parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(safe_get_full_fp32_param(one), safe_get_full_fp32_param(other))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_moments_can_be_read_after_a_load_into_an_engine_that_has_stepped(tmp_path, stage):
    engine = trained(stage)
    first = next(engine.module.parameters())
    saved = safe_get_full_optimizer_state(first, "exp_avg").clone()
    engine.save_checkpoint(tmp_path, "start")
    step(engine, 5)
    assert not torch.equal(safe_get_full_optimizer_state(first, "exp_avg"), saved)
    engine.load_checkpoint(tmp_path, "start")
    assert torch.equal(safe_get_full_optimizer_state(first, "exp_avg"), saved)
