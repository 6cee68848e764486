import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer, quantizer_names
from megalowbit.quantize.packed_file import METADATA_KEY, load_quantized, save_quantized

NAMES = [name for name in quantizer_names() if name != "fp32"] + ["nvfp4e2m1bnosr:tile16"]


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_quantized(path, {"a": quantizer("nvfp4e2m1bnosr").quantize(gaussian(3, 40))})
    return path


def rewrite(path, change):
    """Change the stored tensors and their description, then write the file anew."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()[METADATA_KEY])
    change(tensors, content)
    save_file(tensors, path, {METADATA_KEY: json.dumps(content)})


def test_every_format_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "all.safetensors"
    x = gaussian(5, 3, 21).to(torch.bfloat16)
    x[2, 1, 7] = float("nan")
    tensors = {name: quantizer(name).quantize(x) for name in NAMES}
    save_quantized(path, tensors)
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
@pytest.mark.parametrize("name", ["nvfp4e2m1b", "mxfp4e2m1bnosr", "int8", "fp6e3m2b"])
def test_any_shape_comes_back(tmp_path, shape, name):
    tensor = quantizer(name).quantize(gaussian(*shape) if shape else torch.tensor(0.5))
    save_quantized(tmp_path / "x", {"": tensor})
    assert same_bits(
        load_quantized(tmp_path / "x")[""].dequantize().reshape(-1), tensor.dequantize().reshape(-1)
    )


def test_no_tensors_and_shared_memory_are_no_special_cases(tmp_path):
    save_quantized(tmp_path / "x", {})
    assert load_quantized(tmp_path / "x") == {}
    tensor = quantizer("fp8e4m3").quantize(gaussian(2, 16))
    save_quantized(tmp_path / "x", {"a": tensor, "tied": tensor})
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
    with pytest.raises(UserError, match="'b' is not packed"):
        save_quantized(saved, {"b": unpacked})
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_missing_file_and_one_of_another_kind_are_refused(tmp_path, saved):
    with pytest.raises(UserError, match="does not exist"):
        load_quantized(tmp_path / "none")
    (tmp_path / "text").write_text("hello, this is no tensor")
    with pytest.raises(UserError, match="damaged or no safetensors"):
        load_quantized(tmp_path / "text")
    save_file({"w": torch.zeros(2)}, tmp_path / "plain")
    with pytest.raises(UserError, match="holds no packed tensors"):
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


def test_other_metadata_is_refused(saved):
    rewrite(saved, lambda tensors, content: content.update(version=2))
    with pytest.raises(UserError, match="version 2, not 1"):
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
    with pytest.raises(UserError, match="holds 'stray', which nothing describes"):
        load_quantized(saved)
