"""What an index may lead to, and what the files of a Hugging Face folder may hold."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from start_checkpoints import write_start_checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalowbit.durable_files import write_manifest
from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model, import_checkpoint
from megalowbit.hf.folders.weight_files import find_weight_files, stored_dtypes
from megalowbit.hf.model import load_weights
from megalowbit.hf.settings import ModelSettings

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn)
TENSORS = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in DTYPES} | {"scalar": torch.tensor(1)}
EXPECTED = {name: tensor.dtype for name, tensor in TENSORS.items()}
GPT2 = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
C_FC = "transformer.h.0.mlp.c_fc.weight"


def write_shards(folder, tensors, names, write=save_file, **changes):
    """An index whose files have the given names, tensors dealt out to them one by one."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for part, name in enumerate(names):
        shard = dict(list(tensors.items())[part :: len(names)])
        weight_map |= dict.fromkeys(shard, name)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(shard, folder / name)
    stem = "model.safetensors" if write is save_file else "pytorch_model.bin"
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map | changes}
    (folder / f"{stem}.index.json").write_text(json.dumps(index))
    return index


def gpt2_weights(**changes):
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in GPT2LMHeadModel(GPT2).state_dict().items()}
    del state["lm_head.weight"]  # tied
    return state | changes


def gpt2_folder(folder, names=("shard-00001.safetensors", "b.safetensors"), **changes):
    GPT2.save_pretrained(folder)
    write_shards(folder, gpt2_weights(**changes), list(names))
    return folder


def dtypes_of(folder):
    return stored_dtypes(find_weight_files(folder))


def check_refused(folder, message):
    with pytest.raises(UserError, match=message) as caught:
        build_model(ModelSettings(checkpoint=folder), seed=0)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message):
        import_checkpoint(folder, folder.parent / "start")
    assert not (folder.parent / "start").exists()


@pytest.mark.parametrize(
    ("write", "name"), [(save_file, "model.safetensors"), (torch.save, "pytorch_model.bin")]
)
def test_every_tensor_of_a_single_file_is_listed(tmp_path, write, name):
    write(TENSORS, tmp_path / name)
    assert dtypes_of(tmp_path) == EXPECTED


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (save_file, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (save_file, ["shard-00001.safetensors", "parts/a.safetensors"]),
        (torch.save, ["pytorch_model-00001-of-00002.bin", "weights.pt"]),
    ],
)
def test_every_tensor_of_all_files_that_an_index_names_is_listed(tmp_path, write, names):
    write_shards(tmp_path, TENSORS, names, write)
    assert dtypes_of(tmp_path) == EXPECTED


def test_files_that_transformers_does_not_read_are_ignored(tmp_path):
    for name in ("model.fp16.safetensors", "adapter.safetensors", "pytorch_model.bin", "model.gguf"):
        (tmp_path / name).write_bytes(b"not read")
    write_shards(tmp_path, {"x": torch.zeros(1, dtype=torch.int8)}, ["a.safetensors"])
    save_file(TENSORS, tmp_path / "model.safetensors")  # goes before an index
    assert dtypes_of(tmp_path) == EXPECTED


@pytest.mark.parametrize("names", [["shard-00001.safetensors"], ["model.safetensors", "q.safetensors"]])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("has_scale", [False, True])
def test_quantised_weights_are_refused_whatever_their_files_are_called(tmp_path, names, dtype, has_scale):
    changes = {C_FC: torch.ones(32, 128).to(dtype)}
    if has_scale:
        changes["transformer.h.0.mlp.c_fc.weight_scale"] = torch.ones(())
    folder = gpt2_folder(tmp_path / "hf", names, **changes)
    if "model.safetensors" in names:  # as one file the index is not looked at
        (folder / "model.safetensors").rename(folder / "renamed.safetensors")
        path = folder / "model.safetensors.index.json"
        path.write_text(path.read_text().replace('"model.safetensors"', '"renamed.safetensors"'))
    check_refused(folder, rf"weight {C_FC} is {dtype}, whose scale is unknown")


def test_unquantised_weights_under_any_names_are_read(tmp_path):
    folder = gpt2_folder(tmp_path / "hf")
    loaded = build_model(ModelSettings(checkpoint=folder), seed=0)
    assert all(loaded.state_dict()[name].equal(value) for name, value in gpt2_weights().items())


@pytest.mark.parametrize("kind", ["absolute", "parent", "hidden parent", "link"])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path, kind):
    folder = gpt2_folder(tmp_path / "hf", ["a.safetensors"])
    outside = tmp_path / "outside.safetensors"
    (folder / "a.safetensors").rename(outside)
    name = {
        "absolute": str(outside),
        "parent": "../outside.safetensors",
        "hidden parent": "sub/../../outside.safetensors",
        "link": "a.safetensors",
    }[kind]
    (folder / "sub").mkdir()
    if kind == "link":
        (folder / name).symlink_to(outside)
    write = {"metadata": {}, "weight_map": dict.fromkeys(gpt2_weights(), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(write))
    check_refused(folder, "a link out of its folder" if kind == "link" else "which leads out of its folder")


def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path):
    repository = tmp_path / "models--gpt2"
    folder = gpt2_folder(repository / "snapshots" / "0123abcd")
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(repository / "blobs" / str(number))
        path.symlink_to(Path("..", "..", "blobs", str(number)))
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    for place in (folder, linked):
        loaded = build_model(ModelSettings(checkpoint=place), seed=0)
        assert loaded.state_dict()[C_FC].equal(gpt2_weights()[C_FC])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_map": {}}, 'lacks "weight_map" or "metadata"'),
        ({"weight_map": ["a.safetensors"]}, 'lacks "weight_map" or "metadata"'),
        ({"metadata": None}, 'lacks "weight_map" or "metadata"'),
        ({"weight_map": {C_FC: 3}}, "names 3 for the weight"),
        ({"weight_map": {C_FC: "none.safetensors"}}, "which does not exist: complete the folder"),
        ({"weight_map": {C_FC: "x" * 300 + ".safetensors"}}, "which does not exist: complete the folder"),
        ({"weight_map": {C_FC: "a\0.safetensors"}}, "which does not exist: complete the folder"),
        ({"weight_map": {C_FC: "weights.pt"}}, "a file of another kind"),
        (
            {"weight_map": {C_FC: "a.safetensors"}},
            "does not name the weight transformer.h.0.attn.c_attn.bias",
        ),
    ],
)
def test_a_wrong_index_is_a_one_line_error(tmp_path, change, message):
    folder = gpt2_folder(tmp_path / "hf", ["a.safetensors"])
    torch.save({}, folder / "weights.pt")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    check_refused(folder, message)


def test_an_index_that_names_missing_or_misplaced_tensors_is_rejected(tmp_path):
    folder, names = tmp_path / "hf", ["a.safetensors", "b.safetensors"]
    GPT2.save_pretrained(folder)
    index = write_shards(folder, gpt2_weights(), names)
    other = next(name for name in names if name != index["weight_map"][C_FC])
    write_shards(folder, gpt2_weights(), names, **{C_FC: other})
    check_refused(folder, rf"names {other} for the weight {C_FC}, but it is in ")
    write_shards(folder, gpt2_weights(), names, extra=other)
    check_refused(folder, rf"names {other} for the weight extra, but it is in none of the files")


def test_a_weight_in_two_files_is_refused(tmp_path):
    folder = gpt2_folder(tmp_path / "hf", ["a.safetensors", "b.safetensors"])
    for name in ("a.safetensors", "b.safetensors"):
        save_file(gpt2_weights(), folder / name)
    check_refused(folder, r"a\.safetensors and b\.safetensors both hold the weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("model_class", [GPT2LMHeadModel, LlamaForCausalLM])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, model_class, value):
    llama = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = model_class(GPT2 if model_class is GPT2LMHeadModel else llama).to(torch.bfloat16)
    step = write_start_checkpoint(model, "nvfp4", tmp_path / "ours")
    name, parameter = list(model.named_parameters())[3]
    with torch.no_grad():
        parameter.view(-1)[-1] = value
    model.save_pretrained(tmp_path / "hf")
    check_refused(tmp_path / "hf", rf"weight {name} has 1 values that are NaN or infinite")
    weights = load_file(step / "weights.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, step / "weights.safetensors")
    write_manifest(step)
    with pytest.raises(UserError, match=rf"weight {name} has 1 values that are NaN or infinite"):
        build_model(ModelSettings(checkpoint=tmp_path / "ours"), seed=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantised already: save the model unq"),
        ("compression_config", {"format": "int-quantized"}, "are compressed: save the model unquantised"),
        ("transformers_weights", "other.safetensors", "names its own weight files"),
        ("attn_implementation", "somebody/attention", "code that would be downloaded"),
        ("_attn_implementation", "somebody/attention", "code that would be downloaded"),
    ],
)
def test_fields_that_describe_more_than_an_architecture_are_rejected_in_a_dry_run_too(
    tmp_path, field, value, message
):
    folder = gpt2_folder(tmp_path / "hf")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    check_refused(folder, message)
    with pytest.raises(UserError, match=message):
        build_model(ModelSettings(checkpoint=folder), seed=0, device="meta")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "holds an adapter"),
        ("shard-00000-model-00001-of-00001.safetensors", "holds a distributed checkpoint"),
    ],
)
def test_folders_of_other_kinds_are_refused(tmp_path, file, message):
    folder = gpt2_folder(tmp_path / "hf")
    (folder / file).write_text("{}")
    check_refused(folder, message)


@pytest.mark.parametrize(
    "file", ["model.fp16.safetensors", "adapter_model.safetensors", "gpt2.gguf", "x.bin"]
)
def test_weights_under_names_that_are_not_read_are_named(tmp_path, file):
    GPT2.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / file).write_bytes(b"weights")
    check_refused(tmp_path / "hf", rf"has no weights: add model\.safetensors or .*; {file} is not read")


@pytest.mark.parametrize("kind", ["FIFO", "device"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin",
        "model.safetensors.index.json", "shard-00001.safetensors", "additional_chat_templates/a.jinja",
    ],
)  # fmt: skip
def test_a_path_that_is_not_a_file_is_rejected_before_reading(tmp_path, name, kind):
    path = gpt2_folder(tmp_path / "hf") / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    check_refused(tmp_path / "hf", rf"checkpoint file .*{path.name} is a {kind}: remove it, or put a regular")
    if "template" not in name:
        with pytest.raises(UserError, match=rf"checkpoint file .*{path.name} is a {kind}"):
            load_weights(GPT2, tmp_path / "hf", dtype="auto")


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("content", [b"garbage", Harmful(), {"x": Harmful()}])
def test_a_pickle_that_holds_more_than_tensors_is_refused_without_torchs_advice(
    tmp_path, monkeypatch, content
):
    monkeypatch.chdir(tmp_path)
    GPT2.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match="or contains objects other than tensors") as caught:
        load_weights(GPT2, tmp_path / "hf", dtype=torch.float32)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], {"x": 3}])
def test_a_pickle_of_something_else_is_a_one_line_error(tmp_path, content):
    GPT2.save_pretrained(tmp_path / "hf")
    torch.save(content, tmp_path / "hf" / "pytorch_model.bin")
    check_refused(tmp_path / "hf", "instead of a tensor: save only the model's state dict")


@pytest.mark.parametrize("named", ["float16", "float32"])
def test_an_import_keeps_the_stored_dtype_whatever_the_configuration_says(tmp_path, named):
    state = gpt2_weights(**{C_FC: torch.full((32, 128), 1 + 2**-20)})
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**GPT2.to_dict(), "dtype": named}))
    model = load_weights(GPT2Config(**{**GPT2.to_dict(), "dtype": named}), tmp_path / "hf", dtype="auto")
    assert model.state_dict()[C_FC].equal(state[C_FC])
