"""Exported folders: loaded by transformers with compressed-tensors, and compared with the emulated model."""

import json
import shutil
import weakref

import pytest
import torch
from packed_decoding import e2m1, e4m3, times_blocks
from packed_models import PROMPT, SHAPES, SIZES, converted_model, emulated, greedy
from quick_cases import slow_except
from safetensors import safe_open
from start_checkpoints import write_start_checkpoint
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import export_checkpoint
from megalowbit.hf.folders.unfinished import Draft
from megalowbit.hf.packed.export import (
    _Weights,
    export_packed_checkpoint,
    export_packed_model,
    plan_packed_folder,
)
from megalowbit.hf.packed.report import notes_about_run
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.quantize.names import quantizer

RECIPES = ("nvfp4", "nvidia-nvfp4", "four-over-six", "metis-nvfp4", "mxfp4")


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("recipe", slow_except(["nvfp4", "mxfp4"], RECIPES))
@pytest.mark.parametrize("shape", slow_except(["llama"], SHAPES))
def test_a_loaded_export_generates_the_tokens_of_the_emulated_model(tmp_path, shape, recipe):
    model = converted_model(shape, recipe)
    report = export_packed_model(model, tmp_path / "packed", "compressed-tensors")
    assert report.num_packed == len(bit_layers(model))
    assert not report.rounded
    assert "bit for bit those of the recipe's forward" in str(report)
    reference = emulated(model, tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    assert loaded.config.quantization_config.quantization_config.format.endswith("-pack-quantized")
    tokens, logits = greedy(loaded)
    expected_tokens, expected_logits = greedy(reference)
    assert len(set(tokens.flatten().tolist())) > 5
    assert tokens.equal(expected_tokens)
    assert logits.equal(expected_logits)
    for name, parameter in reference.named_parameters():
        assert loaded.get_parameter(name).equal(parameter)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == shape.endswith("tied")


def test_layers_of_8_bits_stay_in_bf16_beside_packed_ones_and_are_named(tmp_path):
    model = converted_model("llama", "nvfp4-attention-fp8")
    report = export_packed_model(model, tmp_path / "packed", "compressed-tensors")
    attention = {name: layer for name, layer in bit_layers(model).items() if ".self_attn." in name}
    assert report.num_packed == len(bit_layers(model)) - len(attention)
    assert set(report.ignored) == attention.keys() | {"lm_head"}
    warning = f"WARNING: {len(attention)} layers with 8 bits in the recipe's forward are written in bf16"
    assert warning in str(report)
    for layer in attention.values():
        layer.recipe = "bf16"
    reference = emulated(model, tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    tokens, logits = greedy(loaded)
    expected_tokens, expected_logits = greedy(reference)
    assert tokens.equal(expected_tokens)
    assert logits.equal(expected_logits)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_files_hold_the_codes_and_scales_of_the_quantizer(tmp_path, layout):
    """Both conventions of the tensor scale are exact, and parts of a fused group have one."""
    model = converted_model()
    export_packed_model(model, tmp_path / "packed", layout)
    found = tensors_of(tmp_path / "packed")
    codes, factor = (
        ("weight_packed", None) if layout == "compressed-tensors" else ("weight", "weight_scale_2")
    )
    moved = []
    for name, layer in bit_layers(model).items():
        packed = quantizer("nvfp4e2m1bnosr").quantize(layer.weight)
        assert found[f"{name}.{codes}"].equal(packed.codes)
        assert found[f"{name}.weight_scale"].dtype == torch.float8_e4m3fn
        if factor is None:
            scale = 1 / found[f"{name}.weight_global_scale"].double().item()
            assert found[f"{name}.weight_global_scale"].shape == (1,)
        else:
            scale = found[f"{name}.{factor}"].double().item()
            assert found[f"{name}.{factor}"].shape == ()
        values = times_blocks(e2m1(packed.codes), e4m3(found[f"{name}.weight_scale"])) * scale
        assert torch.from_numpy(values).equal(packed.dequantize().double())
        if packed.tensor_scale.item() == scale:
            own = packed.scales.view(torch.uint8)
            assert found[f"{name}.weight_scale"].view(torch.uint8).equal(own)
        else:
            moved.append(name.split(".")[-1])
    assert moved == ["k_proj", "v_proj", "gate_proj"] * 2  # those with the smaller weights
    for first, others in (("self_attn.q_proj", ("k_proj", "v_proj")), ("mlp.gate_proj", ("up_proj",))):
        suffix = factor or "weight_global_scale"
        for other in others:
            path = f"model.layers.0.{first}.{suffix}"
            assert found[path].equal(found[path.replace(first.split(".")[1], other)])


def test_modelopt_settings_are_in_both_files(tmp_path):
    model = converted_model(recipe={"base": "nvfp4", "keep": ["*.layers.1.mlp.*"]})
    maxima = dict.fromkeys(bit_layers(model), 3.0)
    for precision, algorithm in (("w4a16", "W4A16_NVFP4"), ("w4a4", "NVFP4")):
        folder = tmp_path / precision
        export_packed_model(model, folder, "modelopt", precision=precision, input_maxima=maxima)
        kept = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")] + ["lm_head"]
        quantization = json.loads((folder / "hf_quant_config.json").read_text())
        assert quantization["producer"]["name"] == "modelopt"
        assert quantization["quantization"] == {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": kept,
        }
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert (config["quant_method"], config["quant_algo"]) == ("modelopt", algorithm)
        assert config["ignore"] == kept
        assert ("input_activations" in config["config_groups"]["group_0"]) == (precision == "w4a4")
        found = tensors_of(folder)
        scales = {name: value for name, value in found.items() if name.endswith("input_scale")}
        assert len(scales) == (len(maxima) if precision == "w4a4" else 0)
        for value in scales.values():  # 3 / (448 · 6), rounded up to a power of two
            assert value.dtype == torch.float32
            assert value.shape == ()
            assert value.item() == 2.0**-9


def test_kept_layers_are_in_bf16_and_listed(tmp_path):
    model = converted_model(recipe={"base": "nvfp4", "keep": ["*.o_proj"]}, dtype=torch.float32)
    report = export_packed_model(model, tmp_path / "packed", "compressed-tensors")
    kept = ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "lm_head")
    assert report.ignored == kept
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == list(kept)
    assert config["dtype"] == "bfloat16"
    found = tensors_of(tmp_path / "packed")
    state = model.state_dict()
    for name, value in found.items():
        if name in state:
            assert value.equal(state[name].bfloat16())
    assert {f"{name}.weight" for name in kept} <= {*found}
    # the forward quantises fp32 weights, not their bf16 copies
    layer = model.model.layers[0].mlp.down_proj
    packed = quantizer("nvfp4e2m1bnosr").quantize(layer.weight)
    assert found["model.layers.0.mlp.down_proj.weight_packed"].equal(packed.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_exported_like_the_model_in_memory(tmp_path, dtype):
    plain = tiny_model("llama", vocab_size=67, **SIZES).to(dtype)
    start = write_start_checkpoint(plain, "nvfp4", tmp_path / "start")
    export_packed_checkpoint(tmp_path / "start", tmp_path / "a", "compressed-tensors")
    export_packed_checkpoint(start, tmp_path / "b", "modelopt")
    convert(plain, "nvfp4")
    export_packed_model(plain, tmp_path / "c", "compressed-tensors")
    export_checkpoint(start, tmp_path / "d")
    a, c = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c")
    assert {*a} == {*c}
    assert all(value.view(torch.uint8).equal(c[name].view(torch.uint8)) for name, value in a.items())
    config, plain_config = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in "ad")
    for settings in (config, plain_config):
        settings.pop("quantization_config", None)
        settings.pop("dtype")
        settings.pop("_name_or_path", None)
    assert config == plain_config
    generations = [json.loads((tmp_path / name / "generation_config.json").read_text()) for name in "ad"]
    assert generations[0] == generations[1]
    cards = [(tmp_path / name / "README.md").read_text() for name in "ab"]
    assert "| dtype of these weights | nvfp4 (w4a16, compressed-tensors), others bfloat16 |" in cards[0]
    assert "and the package `compressed-tensors`, or with vLLM." in cards[0]
    assert "layout, which vLLM, SGLang and TensorRT-LLM read." in cards[1]
    assert "AutoModelForCausalLM" not in cards[1]


def test_one_group_of_weights_is_in_memory_at_a_time(tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), 0
    read = _Weights.read

    def counted(self, name):
        nonlocal most
        tensor = read(self, name).clone()
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(_Weights, "read", counted)
    write_start_checkpoint(tiny_model("llama", **SIZES), "nvfp4", tmp_path / "start")
    export_packed_checkpoint(tmp_path / "start", tmp_path / "packed", "modelopt")
    assert most == 3  # q, k and v


def test_an_interrupted_export_continues_and_reports_all_layers(tmp_path, monkeypatch):
    plain = tiny_model("llama", **SIZES)
    with torch.no_grad():
        plain.model.layers[0].self_attn.v_proj.weight *= 0.03
        plain.model.layers[0].self_attn.v_proj.weight[3] *= 2.0**-12
    write_start_checkpoint(plain, "nvfp4", tmp_path / "start")
    export_packed_checkpoint(tmp_path / "start", tmp_path / "a", "modelopt", shard_size=20_000)
    read = _Weights.read

    def interrupted(self, name):
        if name == "model.layers.1.mlp.down_proj.weight":
            raise KeyboardInterrupt
        return read(self, name)

    monkeypatch.setattr(_Weights, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_packed_checkpoint(tmp_path / "start", tmp_path / "b", "modelopt", shard_size=20_000)
    monkeypatch.setattr(_Weights, "read", read)
    report = export_packed_checkpoint(tmp_path / "start", tmp_path / "b", "modelopt", shard_size=20_000)
    assert [each.name for each in report.rounded] == ["model.layers.0.self_attn.v_proj"]
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_the_report_names_what_the_run_did_otherwise():
    progress = {"late_switch": {"before": [3.0], "since": [2.9]}, "speculation": None}
    (note,) = notes_about_run({"progress": progress})
    assert note.startswith("the late switch of the run ended the rounding in the forward before this step")
    progress = {"late_switch": {"before": [3.0], "since": []}, "speculation": {"steps": 3}}
    (note,) = notes_about_run({"progress": progress})
    assert note.startswith("speculation chose the precision of each product")
    assert notes_about_run({"progress": {"late_switch": None}}) == notes_about_run({}) == ()


def test_padding_of_the_vocabulary_is_left_out(tmp_path):
    from megalowbit.families.vocabulary import pad_vocabulary

    model = tiny_model("llama", vocab_size=67, **SIZES).bfloat16()
    pad_vocabulary(model, 64)
    convert(model, "nvfp4")
    assert model.config.vocab_size == 128
    export_packed_model(model, tmp_path / "packed", "compressed-tensors")
    assert model.config.vocab_size == 128
    found = tensors_of(tmp_path / "packed")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].equal(model.state_dict()[name][:67])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "packed").config.vocab_size == 67


def test_subnormal_scales_are_reported_loudly_or_refused(tmp_path, caplog):
    model = converted_model()
    layer = model.model.layers[1].self_attn.v_proj
    with torch.no_grad():
        layer.weight[3] *= 2.0**-12
    with pytest.raises(UserError, match=r"\d blocks? of layer .*1\.self_attn\.v_proj would have to be"):
        export_packed_model(model, tmp_path / "packed", "compressed-tensors", is_exact=True)
    assert not (tmp_path / "packed").exists()
    with caplog.at_level("WARNING"):
        report = export_packed_model(model, tmp_path / "packed", "compressed-tensors")
    (rounded,) = report.rounded
    assert rounded.name == "model.layers.1.self_attn.v_proj"
    assert 0 < rounded.num_rounded <= 4
    assert "so some blocks of 1 layer were rounded again" in caplog.text
    assert str(rounded) in caplog.text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    loaded(PROMPT)
    found = loaded.model.layers[1].self_attn.v_proj.weight.double()
    expected = quantizer("nvfp4e2m1bnosr")(layer.weight).double()
    assert [int(row) for row in (found != expected).any(1).nonzero()] == [3]
    change = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert change.item() == pytest.approx(rounded.relative_change, rel=1e-3)


def test_a_layer_that_would_be_lost_beside_larger_ones_is_refused(tmp_path):
    model = converted_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight *= 1e-6
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.v_proj would lose 100% of its norm"):
        export_packed_model(model, tmp_path / "packed", "compressed-tensors")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_is_not_continued_as_another_one(tmp_path, monkeypatch):
    """Weights, recipe and names of the tensors are the same; only what is done to them differs."""
    plain = tiny_model("llama", **SIZES)
    write_start_checkpoint(plain, "nvfp4", tmp_path / "start")
    convert(plain, "nvfp4")
    maxima = dict.fromkeys(bit_layers(plain), 3.0)
    kinds = [
        {"layout": "compressed-tensors"},
        {"layout": "modelopt"},
        {"layout": "modelopt", "precision": "w4a4", "input_maxima": maxima},
        {"layout": "modelopt", "precision": "w4a4", "input_maxima": {**maxima, max(maxima): 9.0}},
    ]
    note = Draft.note

    def interrupted(draft, name):
        note(draft, name)
        raise KeyboardInterrupt

    for number, kind in enumerate(kinds):
        export_packed_checkpoint(tmp_path / "start", tmp_path / f"whole{number}", **kind, shard_size=20_000)
    for first, second in [(0, 1), (1, 2), (2, 3)]:
        monkeypatch.setattr(Draft, "note", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export_packed_checkpoint(tmp_path / "start", tmp_path / "out", **kinds[first], shard_size=20_000)
        monkeypatch.setattr(Draft, "note", note)
        export_packed_checkpoint(tmp_path / "start", tmp_path / "out", **kinds[second], shard_size=20_000)
        found, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / f"whole{second}")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].flatten().view(torch.uint8).equal(value.flatten().view(torch.uint8)), name
        shutil.rmtree(tmp_path / "out")


def test_an_interrupted_export_is_not_continued_with_another_quantizer(tmp_path, monkeypatch):
    """Both formats are NVFP4, with other codes."""
    tiny_model("llama", **SIZES).save_pretrained(tmp_path / "hf")
    note = Draft.note

    def interrupted(draft, name):
        note(draft, name)
        raise KeyboardInterrupt

    def export(recipe, folder):
        plan = plan_packed_folder(tmp_path / "hf", recipe, "compressed-tensors", shard_size=20_000)
        plan.run(tmp_path / folder)

    export("four-over-six", "whole")
    monkeypatch.setattr(Draft, "note", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export("nvfp4", "out")
    monkeypatch.setattr(Draft, "note", note)
    export("four-over-six", "out")
    files = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.read_bytes() == (tmp_path / "out" / file.name).read_bytes() for file in files)


def test_fp32_tensor_scales_are_reported_and_loaded(tmp_path):
    recipe = {"base": "nvfp4", "q_forward_weight": "nvfp4e2m1bnosr:fp32_scale"}
    model = converted_model(recipe=recipe)
    for layout in ("compressed-tensors", "modelopt"):
        report = export_packed_model(model, tmp_path / layout, layout)
        assert [each.name.split(".")[-1] for each in report.rounded] == ["k_proj", "v_proj", "gate_proj"] * 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "compressed-tensors")
    loaded(PROMPT)
    layer = model.model.layers[0].self_attn.q_proj
    expected = quantizer("nvfp4e2m1bnosr:fp32_scale")(layer.weight).float()
    found = loaded.model.layers[0].self_attn.q_proj.weight.float()
    assert torch.allclose(found, expected, rtol=2.0**-7, atol=0)


def test_a_file_with_other_values_is_never_published(tmp_path, monkeypatch):
    """The decoded files are compared with the weights before the folder appears."""
    from megalowbit.hf.packed.compressed_tensors import CompressedTensors

    original = CompressedTensors.tensors

    def damaged(self, layer, packed, input_scale):
        found = original(self, layer, packed, input_scale)
        if layer.endswith("layers.1.mlp.down_proj") and not packed.codes.is_meta:
            found[f"{layer}.weight_packed"] = found[f"{layer}.weight_packed"].clone()
            found[f"{layer}.weight_packed"][5, 7] ^= 1
        return found

    monkeypatch.setattr(CompressedTensors, "tensors", damaged)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.down_proj: 1 blocks in the file have other"):
        export_packed_model(converted_model(), tmp_path / "packed", "compressed-tensors")
    assert not (tmp_path / "packed").exists()
