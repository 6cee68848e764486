"""Files that the writer makes, held against safetensors, huggingface_hub and transformers."""

import json

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_models import KINDS, tiny_model
from transformers import AutoModelForCausalLM

from megalowbit.hf.folders.new_folder import new_folder
from megalowbit.hf.folders.shards import ShardWriter, TensorSpec, file_size, plan_shards
from megalowbit.hf.folders.weight_files import DTYPES

# not in the order in which their bytes are aligned, and one without elements
MIXED = {
    "codes": torch.arange(3, dtype=torch.uint8),
    "w": torch.randn(3, 5),
    "scales": torch.randn(7).to(torch.float8_e4m3fn),
    "ü.bias": torch.randn(5).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "transposed": torch.randn(4, 6).t(),
}


def specs(tensors):
    return [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]


def write(folder, tensors, **options):
    with ShardWriter(folder, specs(tensors), **options) as writer:
        for name, value in reversed(tensors.items()):
            writer.write(name, value)
    return writer


def check_same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert (
        found.contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .equal(expected.contiguous().reshape(-1).view(torch.uint8))
    )


def read(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("shard_size", [10**9, 40])
def test_safetensors_reads_every_dtype_and_shape(tmp_path, shard_size):
    writer = write(tmp_path, MIXED, shard_size=shard_size)
    found = read(tmp_path)
    assert found.keys() == MIXED.keys()
    for name, value in MIXED.items():
        check_same(found[name], value)
    assert [file_size(each) for each in writer.shards] == [
        (tmp_path / each.file).stat().st_size for each in writer.shards
    ]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_that_is_read_is_written(tmp_path, dtype):
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.arange(2 * 3).view(2, 3).to(dtype)}
    write(tmp_path, tensors)
    check_same(read(tmp_path)["b"], tensors["b"])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_files_and_their_names_are_those_of_hugging_face(sizes, limit):
    tensors = {f"t{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    expected = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    ).filename_to_tensors
    planned = plan_shards(specs(tensors), limit)
    named = [(each.file, [one.name for one in each.tensors]) for each in planned]
    assert named == list(expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_files_and_index(tmp_path, kind):
    model = tiny_model(kind)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    with new_folder(tmp_path / "streamed") as draft:
        model.config.save_pretrained(draft)
        write(draft, state, shard_size=20_000)
    model.save_pretrained(tmp_path / "saved", max_shard_size=20_000)
    names = sorted(path.name for path in (tmp_path / "saved").glob("model*"))
    assert len(names) > 3
    assert sorted(path.name for path in (tmp_path / "streamed").glob("model*")) == names
    index = "model.safetensors.index.json"
    assert (tmp_path / "streamed" / index).read_text() == (tmp_path / "saved" / index).read_text()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed")
    for name, value in model.state_dict().items():
        check_same(back.state_dict()[name], value)


def test_a_single_file_has_no_index(tmp_path):
    write(tmp_path, MIXED)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_finished_files_are_left_alone_and_the_last_tensor_names_its_file(tmp_path):
    tensors = {name: torch.full((8,), number) for number, name in enumerate("abcd")}
    sizes = {"shard_size": 128}
    writer = ShardWriter(tmp_path, specs(tensors), **sizes)
    assert writer.write("b", tensors["b"]) is None
    first = writer.write("a", tensors["a"])
    assert first == "model-00001-of-00002.safetensors"
    before = (tmp_path / first).read_bytes()
    again = ShardWriter(tmp_path, specs(tensors), **sizes, finished=[first])
    assert [each.name for each in again.pending()] == ["c", "d"]
    with again:
        for each in again.pending():
            again.write(each.name, tensors[each.name])
    assert (tmp_path / first).read_bytes() == before
    assert all(read(tmp_path)[name].equal(value) for name, value in tensors.items())


def test_what_is_not_planned_is_a_defect(tmp_path):
    writer = ShardWriter(tmp_path, specs({"a": torch.zeros(3), "b": torch.zeros(2)}))
    with pytest.raises(ValueError, match="c is not planned"):
        writer.write("c", torch.zeros(3))
    with pytest.raises(ValueError, match="a was planned as"):
        writer.write("a", torch.zeros(3, dtype=torch.float16))
    writer.write("a", torch.zeros(3))
    with pytest.raises(ValueError, match="was written before"):
        writer.write("a", torch.zeros(3))
    with pytest.raises(ValueError, match="1 tensors were not written, the first is b"):
        writer.close()
    with pytest.raises(ValueError, match="planned twice"):
        ShardWriter(tmp_path, specs({"a": torch.zeros(3)}) * 2)
    with pytest.raises(ValueError, match=r"do not hold .*complex64"):
        ShardWriter(tmp_path, specs({"a": torch.zeros(3, dtype=torch.complex64)}))


def test_the_index_names_all_tensors(tmp_path):
    write(tmp_path, MIXED, shard_size=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == MIXED.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in MIXED.values())
