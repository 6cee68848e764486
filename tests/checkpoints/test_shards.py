import pytest
import torch
from safetensors.torch import save_file

from megalowbit.checkpoints import shards
from megalowbit.checkpoints.contents import CheckpointContents
from megalowbit.checkpoints.layout import Layout, Slice, StoredParameter
from megalowbit.checkpoints.shards import (
    ORIGIN_KEY,
    Shards,
    check_origin,
    load_file,
    model_file,
    optimizer_file,
    origin_of,
)
from megalowbit.durable_files import MANIFEST, write_manifest
from megalowbit.errors import UserError

RANK_ONE = optimizer_file(0, 1)


class Harmful:
    def __reduce__(self):
        return (print, ("code from a checkpoint has run",))


def test_file_names_are_those_deepspeed_gives():
    assert [model_file(0, 1), model_file(3, 1, 2)] == [
        "mp_rank_01_model_states.pt", "zero_pp_rank_2_mp_rank_01_model_states.pt"
    ]  # fmt: skip
    assert optimizer_file(1, 2) == "zero_pp_rank_2_mp_rank_01_optim_states.pt"


def test_a_file_that_the_manifest_does_not_name_is_not_read(stage_two):
    layout = CheckpointContents(stage_two).layout
    read = Shards(stage_two, layout, {model_file(0, 0), optimizer_file(0, 0)})
    (_, b) = layout.slices[0].parameters
    with pytest.raises(UserError, match=f"lacks {RANK_ONE}"):
        read.weight(0, b)


def test_a_flat_tensor_that_is_too_short_is_refused(stage_two):
    content = torch.load(stage_two / RANK_ONE)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(6)
    torch.save(content, stage_two / RANK_ONE)
    contents = CheckpointContents(stage_two)
    with pytest.raises(UserError, match=r"b should have shape \(5,\), but the stored tensor has \(6,\)"):
        contents.weight("b")


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save({"x": Harmful()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="is not loaded: it holds objects") as caught:
        load_file(tmp_path / "x.pt")
    assert "weights_only" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_file_says_where_it_is_from_and_what_it_holds(tmp_path):
    path = tmp_path / "rank_00001.pt"
    content = {"a": [1, 2.0, (None, {"b"})], 3: torch.ones(2, 3), "t": {"x": torch.Size([1])}}
    written = {**content, ORIGIN_KEY: origin_of(content, path, 4)}
    torch.save(written, path)
    read = load_file(path)
    check_origin(read, path, 4)
    check_origin(content, path, 5)  # of an earlier version
    lies = [
        (read, path, 5, "written as .*'step': 4.*, not for step 5"),
        (read, tmp_path / "rank_00000.pt", 4, "written as .*rank_00001"),
        ({**read, "a": [1, 2, (None, {"b"})]}, path, 4, "was changed after it was written"),
        ({**read, 3: torch.ones(3, 2)}, path, 4, "was changed"),
        ({**read, "c": None}, path, 4, "was changed"),
        ({**read, ORIGIN_KEY: []}, path, 4, r"written as \[\]"),
    ]
    for changed, place, step, message in lies:
        with pytest.raises(UserError, match=message):
            check_origin(changed, place, step)


def opened_files(stage_two, monkeypatch, **options):
    """Names of the files in the order in which reading both parameters twice opens them."""
    opened = []
    monkeypatch.setattr(shards, "load_file", lambda path: opened.append(path.name) or load_file(path))
    contents = CheckpointContents(stage_two, **options)
    for name in ("a", "b", "a", "b"):
        contents.weight(name)
    return opened


def test_files_are_closed_before_more_is_read_than_the_largest_tensor_has(stage_two, monkeypatch):
    both = [optimizer_file(0, 0), RANK_ONE]
    assert opened_files(stage_two, monkeypatch, kept_bytes=0) == both * 4
    assert opened_files(stage_two, monkeypatch, kept_bytes=4 * (12 + 5)) == both * 2
    assert opened_files(stage_two, monkeypatch) == both


def test_a_weight_may_be_in_a_safetensors_file(write):
    place = ("weights.safetensors", "a")
    stored = StoredParameter(name="a", shape=(2, 3), dtype="bfloat16", weight=place)
    value = torch.arange(6.0).view(2, 3)

    def save(layout_of, **tensors):
        folder = write({model_file(0, 0): {}}, Layout(stage=0, data_size=1, slices=(layout_of,)))
        save_file(tensors, folder / "weights.safetensors")
        (folder / MANIFEST).unlink()
        write_manifest(folder)
        return folder

    folder = save(Slice(parameters=(stored,)), a=value)
    contents = CheckpointContents(folder)
    assert contents.weight("a").equal(value)
    assert contents.weight("a", as_stored=True).equal(value.bfloat16())
    assert contents.dtype("a") == torch.bfloat16
    for tensors, message in (
        ({"b": value}, r"lacks a \(a of weights\.safetensors\)"),
        ({"a": value.t().contiguous()}, r"a should have shape \(2, 3\), but the stored tensor has \(3, 2\)"),
    ):
        save_file(tensors, folder / "weights.safetensors")
        with pytest.raises(UserError, match=message):
            CheckpointContents(folder).weight("a")
    (folder / "weights.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(UserError, match="is inconsistent"):
        CheckpointContents(folder).weight("a")
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("weights.s", "weight.s"))
    with pytest.raises(UserError, match=r"lacks weights\.safetensors"):
        CheckpointContents(folder).weight("a")
