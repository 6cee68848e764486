"""A byte-level BPE with merges."""

import pytest

from megalowbit.data.corpus import Corpus
from megalowbit.data.tokenize import train_bpe


class Words(Corpus):
    name, fingerprint = "words", "0123"

    def documents(self):
        yield "low precision numerics need few bits and much care to train " * 20


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(Words(), 300, tmp_path_factory.mktemp("cache"))
