import pytest
import torch

from megalowbit.data.settings import DataSettings
from megalowbit.data.synthetic import synthetic_loader


def loader_of(rank, seed=3):
    settings = DataSettings(corpus="not/there.txt", sequence_length=16, seed=seed)
    return synthetic_loader(settings, vocab_size=300, micro_batch_size=64, rank=rank, world_size=2)


def test_ids_cover_the_vocabulary_and_ranks_get_different_samples():
    first, second = (next(loader_of(rank))["input_ids"] for rank in (0, 1))
    assert first.shape == (64, 16)
    assert first.dtype == torch.int64
    together = torch.cat([first, second])
    assert together.min() >= 0
    assert together.max() < 300
    assert len(together.unique()) > 290  # of 300; 2048 draws miss one with probability e^-6.8
    assert len(together.unique(dim=0)) == 128


def test_batches_are_determined_by_the_seed():
    assert torch.equal(next(loader_of(0))["input_ids"], next(loader_of(0))["input_ids"])
    assert not torch.equal(next(loader_of(0))["input_ids"], next(loader_of(0, seed=4))["input_ids"])


def test_there_is_no_text(tmp_path):
    tokenizer = loader_of(0).tokenizer
    with pytest.raises(TypeError, match="no tokenizer to save"):
        tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="cannot encode 1 texts"):
        tokenizer.encode_batch(["a"])
