import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.hf.importers.base import (
    LazyTensor,
    LazyWeights,
    check_and_select,
    file_tensor,
    flat_tensor,
    named_step,
    numbers_up_to,
    shape_of,
)
from megalowbit.hf.importers.file_tensors import FileTensor


def model_of(tied=(), **shapes):
    """The state dict of a model on no device; the `tied` names hold the parameter of the first of them."""
    found = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return found | dict.fromkeys(tied, found[tied[0]]) if tied else found


def weights(**tensors):
    return LazyWeights({name: LazyTensor.of(FileTensor.of(value)) for name, value in tensors.items()})


def test_shapes_are_known_before_anything_is_read():
    parts, reads = [FileTensor.of(torch.ones(2, 3)), FileTensor.of(torch.zeros(4, 3))], []

    def join(tensors):
        reads.append(tensors[0].device.type)
        return torch.cat(list(tensors)).t()

    stored = LazyTensor.joined(parts, join)
    assert (stored.shape, stored.dtype, reads) == ((3, 6), torch.float32, ["meta"])
    found = LazyWeights({"x": stored})
    assert reads == ["meta"]
    assert found["x"].equal(torch.tensor([[1.0, 1, 0, 0, 0, 0]] * 3))
    assert reads == ["meta", "cpu"]


def test_pieces_are_joined_without_their_padding():
    pieces = [FileTensor.of(torch.arange(3.0)), FileTensor.of(torch.arange(3.0, 8.0))]
    assert LazyTensor.concatenated(pieces, (3, 2)).read().equal(torch.arange(6.0).view(3, 2))
    with pytest.raises(UserError, match="8 of the 9 elements of a weight are there: add all files"):
        LazyTensor.concatenated(pieces, (9,)).read()
    for other in (torch.zeros(2).half(), torch.zeros(4)[::2]):
        with pytest.raises(UserError, match="parts of a weight have several dtypes, or gaps"):
            LazyTensor.concatenated([*pieces, FileTensor.of(other)], (9,))


def test_parts_of_several_dtypes_are_not_joined():
    parts = [FileTensor.of(torch.ones(2)), FileTensor.of(torch.ones(2).half())]
    with pytest.raises(UserError, match="parts of a weight have several dtypes"):
        LazyTensor.joined(parts, lambda tensors: torch.cat(list(tensors)))


def test_names_are_texts():
    with pytest.raises(UserError, match="a weight has the name 5: use another checkpoint"):
        LazyWeights({5: LazyTensor.of(FileTensor.of(torch.ones(2)))})


def test_tensors_that_are_not_plain_or_not_flat_are_refused_by_name():
    flat, square = FileTensor.of(torch.ones(4)), FileTensor.of(torch.ones(2, 2))
    assert flat_tensor(flat, "a") is flat
    assert file_tensor(square, "a") is square
    with pytest.raises(UserError, match="a is a sparse, quantised or meta tensor, not a plain tensor"):
        file_tensor(torch.eye(2).to_sparse(), "a")
    with pytest.raises(UserError, match="a is 'x', not a plain tensor"):
        file_tensor("x", "a")
    with pytest.raises(UserError, match=r"a has shape \(2, 2\), which is not flat"):
        flat_tensor(square, "a")


def test_missing_ranks_of_a_damaged_count_are_found_at_once():
    assert numbers_up_to([0, 2], 5) == [1, 3, 4]
    assert numbers_up_to([0, 1], 2**70) == list(range(2, 11))


def test_a_name_of_a_step_is_read_or_refused_in_one_line(tmp_path):
    file = tmp_path / "latest"
    with pytest.raises(UserError, match="latest cannot be read"):
        named_step(file)
    file.write_text("global_step4\n")
    assert named_step(file) == "global_step4"
    for text in ("9" * 300, "a\0b"):
        file.write_text(text)
        with pytest.raises(UserError, match="which cannot be a name: name the folder of a step"):
            named_step(file)


def test_the_widest_dtype_holds_all_weights():
    half, brain, single = (torch.ones(1, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float32))
    assert weights(a=half, b=half).dtype == torch.float16
    assert weights(a=half, b=brain).dtype == torch.float32
    assert weights(a=brain, b=single).dtype == torch.float32


def test_weights_that_fit_come_in_the_models_order_and_tied_ones_once():
    model = model_of(("tokens", "head"), tokens=4, b=2, head=4)
    for name in ("tokens", "head"):
        found = check_and_select(weights(b=torch.ones(2), **{name: torch.full((4,), 2.0)}), model, "x")
        assert list(found) == ["tokens", "b"]
        assert found["tokens"].equal(torch.full((4,), 2.0))


def test_a_tied_copy_may_be_the_rounded_weight_but_not_another():
    model, tokens = model_of(("tokens", "head"), tokens=2, head=2), torch.tensor([1.0, 1.0001])
    found = check_and_select(weights(tokens=tokens, head=tokens.bfloat16()), model, "x")
    assert found["tokens"].equal(tokens)
    with pytest.raises(UserError, match="x: head differs from tokens, but the configuration ties them"):
        check_and_select(weights(tokens=tokens, head=tokens + 1), model, "x")


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": 2}, "x has the weight b that its configuration does not have: correct --config"),
        ({"a": 2, "b": 3, "c": 1}, "x lacks the weight c: correct --config"),
        (dict.fromkeys("cdefg", 1), "x lacks the weight c and 4 others: correct --config"),
        ({"a": 2, "b": 4}, r"b has shape \(3,\), its configuration says \(4,\): correct --config"),
    ],
)
def test_a_difference_is_named(expected, message):
    with pytest.raises(UserError, match=message):
        check_and_select(weights(a=torch.ones(2), b=torch.ones(3)), model_of(**expected), "x")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype):
    with pytest.raises(UserError, match=f"x: weight a is {dtype}, whose scale is unknown"):
        check_and_select(weights(a=torch.ones(2).to(dtype)), model_of(a=2), "x")


@pytest.mark.parametrize("value", [None, "ab", (1, -1), (1.0,), (True,)])
def test_a_damaged_shape_is_refused(value):
    assert shape_of(torch.Size([2, 3]), "a") == (2, 3)
    with pytest.raises(UserError, match=r"a has shape .*: the file is damaged"):
        shape_of(value, "a")
