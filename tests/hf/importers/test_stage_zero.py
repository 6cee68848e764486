"""Masters of stage 0, which have no names in the file."""

import deepspeed_writer
import pytest
import torch
from tiny_models import tiny_model

from megalowbit.hf.importers.deepspeed import read_deepspeed
from megalowbit.hf.importers.registry import read_foreign
from megalowbit.json_text import read_json_object


def found_after(run, change):
    """Weights and description of a checkpoint whose file was changed."""
    file = run / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    change(content["optimizer"])
    torch.save(content, file)
    found = read_foreign(run, read_json_object(run / "config.json"))
    return found.weights, found.description


def flatten(optimizer):
    optimizer["fp32_groups_flat"] = [
        torch.cat([each.flatten() for each in group]) for group in optimizer.pop("fp32_groups")
    ]


def round_one(optimizer):
    optimizer["fp32_groups"][0][0] = optimizer["fp32_groups"][0][0].bfloat16()


def change_one(optimizer):
    optimizer["fp32_groups"][0][0].add_(1)


@pytest.mark.parametrize("change", [lambda _: None, flatten])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_masters_in_lists_and_in_flat_groups_get_their_names(tmp_path, kind, change):
    model = tiny_model(kind)
    run = deepspeed_writer.write(tmp_path / "run", model, stage=0)
    weights, description = found_after(run, change)
    assert "ZeRO 0, fp32 masters" in description
    assert all(weights[name].equal(value) for name, value in model.named_parameters())


@pytest.mark.parametrize("change", [round_one, change_one])
def test_without_certain_masters_the_models_weights_are_used_and_a_warning_says_so(tmp_path, caplog, change):
    model = tiny_model("llama")
    run = deepspeed_writer.write(tmp_path / "run", model, stage=0)
    weights, _ = found_after(run, change)
    assert all(weights[name].equal(value.bfloat16()) for name, value in model.named_parameters())
    assert "are missing or not certain, so its bfloat16 weights are used" in caplog.text


@pytest.mark.parametrize(
    ("groups", "is_certain"),
    [
        ([["b"]], False),  # `a` is frozen
        ([["a", "b"]], True),
        ([["b"], ["a"]], False),
    ],
)
def test_masters_of_equal_weights_are_assigned_only_where_that_is_certain(
    tmp_path, caplog, groups, is_certain
):
    """Norms of ones round to the same bf16 weights, and the order of groups says which is which, or not."""
    masters = {"a": torch.full((8,), 1.0005), "b": torch.full((8,), 1.001)}
    weights = {**{name: value.bfloat16() for name, value in masters.items()}, "c": torch.ones(4).bfloat16()}
    assert weights["a"].equal(weights["b"])
    content = {
        "module": weights,
        "optimizer": {"fp32_groups": [[masters[name] for name in group] for group in [*groups, []]]},
        "global_steps": 5,
    }
    content["optimizer"]["fp32_groups"][-1] = [torch.full((4,), 1.0001)]
    step = tmp_path / "global_step5"
    step.mkdir()
    torch.save(content, step / "mp_rank_00_model_states.pt")
    found = read_deepspeed(step, {"model_type": "llama"}).weights
    if is_certain:
        assert all(found[name].equal(masters[name]) for name in masters)
    else:
        assert all(found[name].equal(weights[name]) for name in masters)
        assert "are missing or not certain, so its bfloat16 weights are used" in caplog.text
    assert ("not certain" in caplog.text) == (not is_certain)
