"""Models that cannot be packed as a whole are refused, in one line with reason and remedy."""

import json

import pytest
import torch
from packed_models import converted_model
from start_checkpoints import write_start_checkpoint
from tiny_models import tiny_model

from megalowbit.errors import UserError
from megalowbit.hf.packed.export import (
    export_packed_checkpoint,
    export_packed_model,
    plan_packed_folder,
)
from megalowbit.layers.conversion.convert import bit_layers, convert

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def nvfp4(**changes):
    return {"base": "nvfp4", **changes}


def check_refusal(tmp_path, model, message, layout="compressed-tensors", **options):
    with pytest.raises(UserError) as caught:
        export_packed_model(model, tmp_path / "packed", layout, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "packed").exists()


def llama(given="nvfp4", **sizes):
    model = tiny_model("llama", **{**SIZES, **sizes}).bfloat16()
    convert(model, given)
    return model


def test_models_that_cannot_be_packed_are_refused(tmp_path):
    gpt2 = tiny_model("gpt2")
    check_refusal(tmp_path, gpt2, "GPT2LMHeadModel has no low-bit layers to pack: convert it first")
    convert(gpt2, "nvfp4")
    check_refusal(tmp_path, gpt2, "transformer.h.0.attn.c_attn replaces a Conv1D, and transformers loads no")
    check_refusal(tmp_path, llama("mxfp4"), "modelopt has no MXFP4 weights: use", layout="modelopt")
    check_refusal(tmp_path, llama(), "unknown layout 'gguf': known: compressed-tensors", layout="gguf")
    check_refusal(tmp_path, llama(), "unknown precision 'int4': known: w4a16, w4a4", precision="int4")
    mixed = llama()
    mixed.model.layers[1].mlp.up_proj.recipe = "four-over-six"
    check_refusal(tmp_path, mixed, "the layers have different recipes (four-over-six, nvfp4), and")
    spoiled = llama()
    with torch.no_grad():
        spoiled.model.norm.weight[3] = torch.nan
    check_refusal(tmp_path, spoiled, "weight model.norm.weight has 1 values that are NaN or infinite")


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path):
    message = (
        "layer model.layers.0.mlp.down_proj has 88 input features, and servers read NVFP4 weights in whole"
    )
    check_refusal(tmp_path, llama(intermediate_size=88), f"{message} blocks of 16 only: keep it in")
    check_refusal(
        tmp_path, llama("mxfp4", intermediate_size=80), "has 80 input features, and servers read MXFP4"
    )
    kept = llama(nvfp4(keep=["*.down_proj"]), intermediate_size=88)  # 88 rows are no reason
    assert export_packed_model(kept, tmp_path / "packed", "modelopt").num_packed == 12


def test_a_group_that_servers_fuse_is_packed_as_a_whole(tmp_path):
    model = llama(nvfp4(keep=["*.0.self_attn.v_proj"]))
    check_refusal(
        tmp_path,
        model,
        "servers fuse model.layers.0.self_attn.q_proj, which is packed, with "
        "model.layers.0.self_attn.v_proj, which stays in bf16: give both the same recipe, or",
    )


def test_layers_with_recipes_of_their_own_are_packed_if_the_forward_is_the_same(tmp_path):
    own = {"*.mlp": {"q_backward_outputgrad": "nvfp4e2m1bnosr"}, "*.o_proj": "bf16"}
    write_start_checkpoint(tiny_model("llama", **SIZES), nvfp4(layers=own), tmp_path / "start")
    report = export_packed_checkpoint(tmp_path / "start", tmp_path / "packed", "compressed-tensors")
    assert report.num_packed == 12
    assert set(report.ignored) == {f"model.layers.{each}.self_attn.o_proj" for each in (0, 1)} | {"lm_head"}
    assert not report.rounded or {each.name for each in report.rounded}.isdisjoint(report.ignored)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert set(report.ignored) <= set(config["quantization_config"]["ignore"])
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "| recipe | nvfp4 with own layers |" in card
    for own, message in (
        ({"*.mlp": "mxfp4"}, "the layers have different recipes (mxfp4, nvfp4 with own layers), and a"),
        ({"*.mlp": "metis-qb"}, "recipe 'metis-qb' cannot be packed, split_weight adds a low-rank part"),
    ):
        folder = tmp_path / own["*.mlp"]
        write_start_checkpoint(tiny_model("llama", **SIZES), nvfp4(layers=own), folder)
        with pytest.raises(UserError) as caught:
            export_packed_checkpoint(folder, tmp_path / "other", "compressed-tensors")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_layers_of_8_bits_are_refused_where_they_cannot_stay_in_bf16(tmp_path):
    model = llama("nvfp4-attention-fp8")
    check_refusal(tmp_path / "exact", model, "has 8-bit weights in the forward, and", is_exact=True)
    check_refusal(tmp_path / "all", llama("fp8"), "the weight quantizer 'fp8e4m3' is neither NVFP4 nor MXFP4")
    part = llama(nvfp4(layers={"*.v_proj": "fp8"}))  # beside q and k, which servers fuse with it
    check_refusal(tmp_path / "part", part, "servers fuse model.layers.0.self_attn.q_proj, which is packed")


def test_layers_that_round_no_weight_in_the_forward_are_exact_in_bf16(tmp_path):
    model = llama(nvfp4(layers={"*.self_attn": {"q_forward_weight": "fp32"}}))
    report = export_packed_model(model, tmp_path / "packed", "compressed-tensors", is_exact=True)
    assert (report.num_packed, report.notes) == (6, ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tensors_that_bf16_would_round_are_not_exact(tmp_path, dtype):
    model = converted_model(dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    export_packed_model(model, tmp_path / "equal", "compressed-tensors", is_exact=True)
    with torch.no_grad():
        model.model.norm.weight[3] += 2.0**-9
    message = f"model.norm.weight in {dtype} would be rounded to torch.bfloat16: export without"
    check_refusal(tmp_path / "rounded", model, message, is_exact=True)


def test_an_interrupted_export_is_not_continued_as_an_exact_one(tmp_path):
    tiny_model("llama", **SIZES).save_pretrained(tmp_path / "fp32")

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # all weights are written
        plan_packed_folder(tmp_path / "fp32", "nvfp4", "compressed-tensors", examine=stop).run(
            tmp_path / "out"
        )
    plan = plan_packed_folder(tmp_path / "fp32", "nvfp4", "compressed-tensors", is_exact=True)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight in torch\.float32 would be rounded"):
        plan.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -1.0])
def test_rounded_inputs_need_the_largest_input_of_every_layer(tmp_path, value):
    model = llama()
    maxima = dict.fromkeys(bit_layers(model), 2.0) | {"model.layers.1.mlp.up_proj": value}
    if value is None:
        check_refusal(
            tmp_path, model, "the largest input of layer model.layers.0.self_attn", precision="w4a4"
        )
        del maxima["model.layers.1.mlp.up_proj"]
    message = 'precision "w4a4" needs the largest input of layer model.layers.1.mlp.up_proj, and it is'
    check_refusal(tmp_path, model, message, precision="w4a4", input_maxima=maxima)


def test_a_checkpoint_of_another_recipe_is_refused_before_its_weights_are_read(tmp_path):
    write_start_checkpoint(tiny_model("gpt2"), "bf16", tmp_path / "start")
    with pytest.raises(UserError, match="recipe 'bf16' cannot be packed, it quantises no weight"):
        export_packed_checkpoint(tmp_path / "start", tmp_path / "packed", "modelopt")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "mine").touch()
    with pytest.raises(UserError, match="already exists and is never overwritten"):
        export_packed_checkpoint(tmp_path / "start", tmp_path / "packed", "modelopt")
