from pickle import UnpicklingError

import pytest
import torch
from safetensors.torch import save_file

from megalowbit.hf.weight_files import stored_dtypes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn)
TENSORS = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in DTYPES} | {"scalar": torch.tensor(1)}
EXPECTED = {name: tensor.dtype for name, tensor in TENSORS.items()}


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (save_file, ["model.safetensors"]),
        (save_file, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (torch.save, ["pytorch_model.bin"]),
        (torch.save, ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]),
    ],
)
def test_every_tensor_of_every_shard_is_listed(tmp_path, write, names):
    for part, name in enumerate(names):
        write(dict(list(TENSORS.items())[part :: len(names)]), tmp_path / name)
    assert stored_dtypes(tmp_path) == EXPECTED


def test_safetensors_go_before_pickles_and_other_files_are_left_alone(tmp_path):
    assert stored_dtypes(tmp_path) == {}
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    (tmp_path / "adapter.safetensors").write_bytes(b"not read")
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert stored_dtypes(tmp_path) == EXPECTED


def test_a_damaged_file_is_an_error(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"garbage")
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        stored_dtypes(tmp_path)
