"""Tensors that are read from their places in files of `torch.save`, compared with what torch loads."""

import shutil
import zipfile
import zlib

import pytest
import torch
from conversion_memory import memory

from megalowbit.errors import UserError
from megalowbit.hf.folders.stored_weights import same_bits
from megalowbit.hf.importers.file_tensors import FileTensor
from megalowbit.hf.importers.inert_files import read_inert


def tensors():
    """Of several dtypes, shapes and strides; some share a storage."""
    base = torch.randn(6, 8)
    return {
        "base": base,
        "rows": base[2:4],
        "columns": base[:, 3:5],
        "transposed": base.t(),
        "every second": base.view(-1)[1::2],
        "expanded": torch.tensor([3.0]).expand(4, 5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "half": torch.randn(5).half(),
        "brain": torch.randn(5).bfloat16(),
        "wide": torch.randn(2, 3).double(),
        "flags": torch.tensor([True, False]),
        "counts": torch.arange(7),
    }


@pytest.fixture
def saved(tmp_path):
    torch.save({"t": tensors() | {"again": tensors()["base"]}}, tmp_path / "file.pt")
    return tmp_path / "file.pt"


@pytest.mark.parametrize("is_former", [False, True])
def test_every_tensor_has_the_bits_that_torch_loads(tmp_path, is_former):
    path, content = tmp_path / "file.pt", {"t": tensors(), "nested": [(tensors(), 1)]}
    torch.save(content, path, _use_new_zipfile_serialization=not is_former)
    found, expected = read_inert(path), torch.load(path)
    for one, other in ((found["t"], expected["t"]), (found["nested"][0][0], expected["nested"][0][0])):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert isinstance(one[name], FileTensor)
            assert one[name].numel() == value.numel()
            assert one[name].is_contiguous == value.is_contiguous(), name
            assert same_bits(one[name].read(), value.detach()), name
            assert one[name].meta().shape == value.shape
    assert found["nested"][0][1] == 1
    assert found["t"]["base"].place == FileTensor.of(torch.ones(6, 8), found["t"]["rows"].source).place
    assert found["t"]["base"].place != found["t"]["transposed"].place


def test_a_range_of_a_flat_tensor_is_read_alone(tmp_path):
    torch.save({"flat": torch.arange(1000.0)}, tmp_path / "file.pt")
    flat = read_inert(tmp_path / "file.pt")["flat"]
    assert flat.cut(10, (2, 3)).read().equal(torch.arange(10.0, 16.0).view(2, 3))
    target = torch.zeros(3)
    flat.cut(997, (3,)).read_into(target)
    assert target.tolist() == [997, 998, 999]
    with pytest.raises(UserError, match="holds a tensor that is larger than its storage"):
        flat.cut(998, (3,)).read()


def test_tensors_without_plain_values_stay(tmp_path):
    others = {"sparse": torch.eye(3).to_sparse(), "meta": torch.empty(3, device="meta")}
    torch.save({**others, "plain": torch.ones(3)}, tmp_path / "file.pt")
    found = read_inert(tmp_path / "file.pt")
    assert all(isinstance(found[name], torch.Tensor) for name in others)
    assert found["plain"].read().equal(torch.ones(3))


def test_a_list_that_contains_itself_is_read(tmp_path):
    content = {"plain": torch.ones(3), "list": []}
    content["list"].append(content["list"])
    torch.save(content, tmp_path / "file.pt")
    found = read_inert(tmp_path / "file.pt")
    assert found["list"][0] is found["list"]


def test_reading_keeps_no_pages_of_the_file(tmp_path):
    torch.save({"large": torch.ones(16 * 2**20)}, tmp_path / "file.pt")
    found, target = read_inert(tmp_path / "file.pt")["large"], torch.zeros(2**20)
    before = memory("VmRSS")
    for start in range(0, found.numel(), len(target)):
        found.cut(start, target.shape).read_into(target)
    assert target.equal(torch.ones(2**20))
    assert memory("VmRSS") - before < 16 * 2**20  # of 64 MB


def record_of(path, name):
    """Place and size of the content of a record."""
    with zipfile.ZipFile(path) as archive:
        (info,) = (info for info in archive.infolist() if info.filename.partition("/")[2] == name)
    data = path.read_bytes()
    lengths = data[info.header_offset + 26 : info.header_offset + 30]
    start = info.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    assert zlib.crc32(data[start : start + info.file_size]) == info.CRC
    return start, info.file_size


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["data.pkl", "byteorder", "version", "data/0"])
def test_a_wrong_byte_is_found_by_its_checksum(saved, name):
    start, size = record_of(saved, name)
    flip(saved, start + size // 2)
    with pytest.raises(UserError, match=r"file\.pt is damaged: the checksum of") as caught:
        read_inert(saved)["t"]["base"].read()
    assert "\n" not in str(caught.value)


def test_lengths_in_a_local_header_that_lie_are_found(saved):
    start, _ = record_of(saved, "data/0")
    data = bytearray(saved.read_bytes())
    header = data.rindex(b"PK\x03\x04", 0, start)
    data[header + 28] ^= 64  # of the extra fields; moves the content by 64 bytes
    saved.write_bytes(data)
    with pytest.raises(UserError, match=r"file\.pt is damaged"):
        read_inert(saved)["t"]["base"].read()


def rewritten(path, change, **options):
    """Write the archive again with other records."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    change(records)
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def test_a_storage_of_another_size_than_the_pickle_says_is_found(saved):
    def lengthen(records):
        name = next(name for name in records if name.endswith("/data/0"))
        records[name] = records[name][:-4]

    rewritten(saved, lengthen)
    with pytest.raises(UserError, match="damaged: its tensors are not those that it describes"):
        read_inert(saved)


def test_archives_that_were_packed_again_are_read_or_refused(saved):
    expected = read_inert(saved)["t"]["base"].read()
    rewritten(saved, lambda records: None)
    assert read_inert(saved)["t"]["base"].read().equal(expected)
    rewritten(saved, lambda records: None, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="is compressed, which torch does not write"):
        read_inert(saved)


def test_files_of_big_endian_machines_are_refused(saved):
    rewritten(saved, lambda records: records.update({"file/byteorder": b"big"}))
    with pytest.raises(UserError, match="was not written on a little-endian machine"):
        read_inert(saved)


def test_files_without_checksums_are_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(9.0)}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_inert(tmp_path / "file.pt")["a"].read().equal(torch.arange(9.0))


def test_a_file_that_changes_after_it_was_opened_is_noticed(saved):
    found = read_inert(saved)["t"]["base"]
    start, _ = record_of(saved, "data/0")
    shutil.copy(saved, saved.with_name("copy"))
    flip(saved, start)
    with pytest.raises(UserError, match="the checksum of a tensor is wrong"):
        found.read()
    shutil.copy(saved.with_name("copy"), saved)
    assert found.read().shape == (6, 8)
    saved.write_bytes(saved.read_bytes()[: start + 8])
    with pytest.raises(UserError, match="became shorter while it was read: start again"):
        found.read()
