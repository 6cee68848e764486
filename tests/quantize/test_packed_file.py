import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer, quantizer_names
from megalowbit.quantize.packed_file import CHECKSUM_KEY, METADATA_KEY, load_quantized, save_quantized

NAMES = [name for name in quantizer_names() if name != "fp32"] + ["nvfp4e2m1bnosr:tile16"]


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_quantized({"a": quantizer("nvfp4e2m1bnosr").quantize(gaussian(3, 40))}, path)
    return path


def rewrite(path, change):
    """Change the stored tensors and their description, then write the file anew, with its old checksum."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    content = json.loads(metadata[METADATA_KEY])
    change(tensors, content)
    save_file(tensors, path, {**metadata, METADATA_KEY: json.dumps(content)})


def test_every_format_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "all.safetensors"
    x = gaussian(5, 3, 21).to(torch.bfloat16)
    x[2, 1, 7] = float("nan")
    tensors = {name: quantizer(name).quantize(x) for name in NAMES}
    save_quantized(tensors, path)
    loaded = load_quantized(str(path))
    assert list(loaded) == NAMES
    for name, tensor in tensors.items():
        got = loaded[name]
        assert (got.format, got.shape, got.dtype, got.nbytes) == (
            tensor.format,
            x.shape,
            x.dtype,
            tensor.nbytes,
        )
        assert same_bits(got.codes, tensor.codes)
        assert same_bits(got.scales, tensor.scales)
        assert same_bits(got.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("shape", [(), (7,), (0, 16), (4, 0), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", ["nvfp4e2m1b", "mxfp4e2m1bnosr", "int8", "fp6e3m2b", "int8e5m2b:sr"])
def test_any_shape_comes_back(tmp_path, shape, name):
    tensor = quantizer(name).quantize(gaussian(*shape) if shape else torch.tensor(0.5))
    save_quantized({"": tensor}, tmp_path / "x")
    assert same_bits(
        load_quantized(tmp_path / "x")[""].dequantize().reshape(-1), tensor.dequantize().reshape(-1)
    )


def test_no_tensors_and_shared_memory_are_no_special_cases(tmp_path):
    save_quantized({}, tmp_path / "x")
    assert load_quantized(tmp_path / "x") == {}
    tensor = quantizer("fp8e4m3").quantize(gaussian(2, 16))
    save_quantized({"a": tensor, "tied": tensor}, tmp_path / "x")
    assert list(load_quantized(tmp_path / "x")) == ["a", "tied"]


def test_any_safetensors_reader_sees_the_codes_and_scales_in_their_dtypes(saved):
    stored = load_file(saved)
    assert {name: part.dtype for name, part in stored.items()} == {
        "a.codes": torch.uint8,
        "a.scales": torch.float8_e4m3fn,
        "a.tensor_scale": torch.float32,
    }


def test_a_failed_save_leaves_the_old_file(saved):
    before = saved.read_bytes()
    unpacked = quantizer("fp32").quantize(gaussian(2, 2))
    with pytest.raises(UserError, match=r"'b' is not packed: save its \.dequantize\(\) with safetensors"):
        save_quantized({"b": unpacked}, saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_missing_file_and_one_of_another_kind_are_refused(tmp_path, saved):
    with pytest.raises(UserError, match="does not exist"):
        load_quantized(tmp_path / "none")
    (tmp_path / "text").write_text("hello, this is no tensor")
    with pytest.raises(UserError, match="damaged or not a safetensors"):
        load_quantized(tmp_path / "text")
    save_file({"w": torch.zeros(2)}, tmp_path / "plain")
    with pytest.raises(UserError, match="contains no packed tensors"):
        load_quantized(tmp_path / "plain")


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(UserError, match="damaged"):
        load_quantized(saved)


@pytest.mark.parametrize("part", ["codes", "scales", "tensor_scale"])
def test_a_missing_tensor_a_wrong_shape_and_a_wrong_dtype_are_refused(saved, part):
    name = f"a.{part}"
    original = load_file(saved)[name]
    wrong = {
        f"'{name}' is missing": None,
        r"\(1, 2, 3\) instead of": torch.zeros(1, 2, 3).to(original.dtype),
        "torch.int32": torch.zeros(original.shape, dtype=torch.int32),
    }
    for message, value in wrong.items():

        def change(tensors, content, value=value):
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value

        rewrite(saved, change)
        with pytest.raises(UserError, match=message):
            load_quantized(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("element", "e9m9"),
        ("element", None),
        ("element", ["e2m1"]),
        ("element", "int8"),
        ("scale", ["e4m3"]),
        ("block", None),
        ("block", [1.0, 16]),
        ("block", [True, 16]),
        ("block", ["1", 16]),
        ("block", "16"),
        ("block", {"1": 0, "16": 0}),
        ("shape", [3.0, 40]),
        ("shape", [3, "40"]),
        ("shape", [True, 40]),
        ("shape", [0, 2**70]),
        ("scale", "int4"),
        ("block", [1]),
        ("block", [1, 17]),
        ("block", [0, 16]),
        ("block", "x"),
        ("dtype", "torch.int8"),
        ("shape", "x"),
        ("shape", [-3, 40]),
        ("shape", [2**62, 4]),
        ("shape", None),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(saved, key, value):
    rewrite(saved, lambda tensors, content: content["tensors"]["a"].update({key: value}))
    with pytest.raises(UserError, match="damaged"):
        load_quantized(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"element": "int8"},
        {"element": "e5m2"},
        {"scale": "fp32"},
        {"scale": "fp32", "block": None},
        {"block": None},
        {"block": [2, 64]},
    ],
)
def test_signed_scales_go_with_rows_of_their_own_elements(tmp_path, changes):
    path = tmp_path / "x"
    save_quantized({"a": quantizer("int8e5m2b").quantize(gaussian(4, 128))}, path)
    rewrite(path, lambda tensors, content: content["tensors"]["a"].update(changes))
    with pytest.raises(UserError, match="damaged: 'a' is described as"):
        load_quantized(path)


def test_other_metadata_is_refused(saved):
    rewrite(saved, lambda tensors, content: content.update(version=2))
    with pytest.raises(UserError, match="version 2, not 1"):
        load_quantized(saved)
    for version in (True, 1.0, "1", None):
        rewrite(saved, lambda tensors, content, version=version: content.update(version=version))
        with pytest.raises(UserError, match=f"version {version!r}, not 1"):
            load_quantized(saved)
    rewrite(saved, lambda tensors, content: content.update(version=1, tensors=[["a", {}]]))
    with pytest.raises(UserError, match="metadata cannot be read"):
        load_quantized(saved)
    rewrite(saved, lambda tensors, content: content.pop("tensors"))
    with pytest.raises(UserError, match="metadata cannot be read"):
        load_quantized(saved)


def test_a_shape_the_codes_do_not_have_is_refused(saved):
    rewrite(saved, lambda tensors, content: content["tensors"]["a"].update(shape=[4, 40]))
    with pytest.raises(UserError, match=r"'a\.codes' is torch.uint8"):
        load_quantized(saved)


def test_a_tensor_nothing_describes_is_refused(saved):
    rewrite(saved, lambda tensors, content: tensors.update(stray=torch.zeros(2)))
    with pytest.raises(UserError, match="contains 'stray' without a description"):
        load_quantized(saved)


@pytest.mark.parametrize("part", ["codes", "scales", "tensor_scale"])
def test_one_wrong_bit_in_any_number_is_noticed(saved, part):
    def flip(tensors, content):
        tensors[f"a.{part}"].reshape(-1).view(torch.uint8)[-1] ^= 1

    rewrite(saved, flip)
    with pytest.raises(UserError, match="SHA-256 does not match"):
        load_quantized(saved)


@pytest.mark.parametrize("change", [{"shape": [3, 48]}, {"shape": [1, 3, 40]}, {"dtype": "torch.float16"}])
def test_a_description_that_fits_but_is_not_the_one_written_is_noticed(saved, change):
    rewrite(saved, lambda tensors, content: content["tensors"]["a"].update(change))
    with pytest.raises(UserError, match="SHA-256 does not match"):
        load_quantized(saved)


def test_the_checksum_is_that_of_description_and_numbers_in_the_order_of_their_names(saved):
    parts = load_file(saved)
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    content = metadata[METADATA_KEY].encode()
    for name in ("a.codes", "a.scales", "a.tensor_scale"):
        content += bytes(parts[name].reshape(-1).view(torch.uint8).tolist())
    assert metadata[CHECKSUM_KEY] == hashlib.sha256(content).hexdigest()
    save_file(parts, saved, {METADATA_KEY: metadata[METADATA_KEY]})
    with pytest.raises(UserError, match="SHA-256"):
        load_quantized(saved)


@pytest.mark.parametrize("text", ["[" * 40000, '{"version": 1, "tensors": {"a": ' + "[" * 40000])
def test_metadata_nested_beyond_reason_is_refused(saved, text):
    save_file(load_file(saved), saved, {METADATA_KEY: text})
    with pytest.raises(UserError, match="metadata cannot be read"):
        load_quantized(saved)


def test_a_call_with_wrong_arguments_is_shown_the_right_one(tmp_path):
    packed, path = quantizer("fp8e4m3").quantize(gaussian(2, 16)), tmp_path / "x"
    calls = [(path, {"x": packed}), (str(path), {"x": packed}), (packed, path), ([packed], path)]
    calls += [({"x": packed}, None), ({"x": packed}, b"x"), ({1: packed}, path)]
    for arguments in calls:
        with pytest.raises(UserError, match=r'write save_quantized\(\{"x": packed\}, "x.safetensors"\)'):
            save_quantized(*arguments)
    with pytest.raises(UserError, match="not a path"):
        load_quantized({"x": packed})
    with pytest.raises(UserError, match=r"'x' is not packed \(Tensor\): quantise it"):
        save_quantized({"x": gaussian(2)}, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "problem"),
    [("none/x", "does not exist"), ("", "is a folder"), ("y" * 250, "too long"), ("a\0b", "cannot be")],
)
def test_a_path_that_cannot_be_written_is_named_and_no_draft_of_it(tmp_path, name, problem):
    packed = quantizer("fp8e4m3").quantize(gaussian(2, 16))
    with pytest.raises(UserError, match=problem) as caught:
        save_quantized({"x": packed}, tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert ".tmp" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_tensors_without_numbers_and_names_that_are_no_text_are_refused(tmp_path):
    packed = quantizer("nvfp4e2m1bnosr").quantize(gaussian(2, 16))
    with pytest.raises(UserError, match=r"'\\ud800' is not valid text"):
        save_quantized({"\ud800": packed}, tmp_path / "x")
    with pytest.raises(UserError, match="'a' is on the meta device"):
        save_quantized({"a": replace(packed, scales=packed.scales.to("meta"))}, tmp_path / "x")
    save_quantized({"ü.codes": packed, "ü": packed}, tmp_path / "x")
    assert list(load_quantized(tmp_path / "x")) == ["ü.codes", "ü"]


def test_a_folder_is_not_taken_for_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        load_quantized(tmp_path)
    with pytest.raises(UserError, match="is a folder"):
        load_quantized(str(Path(tmp_path)))


@pytest.mark.parametrize("device", ["foo", "meta", "hpu", 3.5, "cuda:99"])
def test_a_device_that_cannot_be_used_is_no_fault_of_the_file(saved, device):
    with pytest.raises(UserError, match=f"^device {device!r}"):
        load_quantized(saved, device=device)
