import logging

import numpy as np
import pytest

from megalowbit.data.corpus import AllSources, BadRecords, TokenCorpus
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.errors import UserError


def test_without_a_limit_the_first_bad_record_is_its_own_error():
    error = UserError("line 3: no text: fix it")
    with pytest.raises(UserError) as caught:
        BadRecords().add(error)
    assert caught.value is error


@pytest.mark.parametrize("limit", [1, 5])
def test_as_many_bad_records_as_the_limit_are_left_out(limit, caplog):
    bad = BadRecords(limit)
    for round_number in range(2):  # `reset` forgets those of the round before
        with caplog.at_level(logging.WARNING):
            for number in range(limit):
                bad.add(UserError(f"line {number}: no text"))
        assert bad.count == limit
        with pytest.raises(
            UserError, match=rf"^line 9: no text \(bad record {limit + 1}, and .* is {limit}\)$"
        ):
            bad.add(UserError("line 9: no text"))
        bad.empty += round_number
        bad.reset()
        assert (bad.count, bad.empty) == (0, 0)
    assert f"left out: line {limit - 1}: no text (bad record {limit} of at most {limit})" in caplog.messages


class Tokens(TokenCorpus):
    name = "tokens"
    fingerprint = "f"
    tokens = np.array([0, 1, 2, 3, 4, 5], np.int32)

    def place_of(self, index):
        return f"place {index}"

    def check_tokens(self, vocab_size, eos_token_id, *, needs_ends=False):
        self.refuse_outside(self.tokens, 0, vocab_size)


def test_the_first_id_outside_the_vocabulary_is_named_by_its_place():
    corpus = Tokens()
    corpus.check_tokens(6, None)
    with pytest.raises(UserError, match="tokens: token id 4 at place 4 is outside the vocabulary of 4"):
        corpus.check_tokens(4, None)
    with pytest.raises(UserError, match="token id -1 at place 3"):
        corpus.refuse_outside(np.array([0, -1, 9]), 2, 6)


def test_token_ids_are_no_text():
    with pytest.raises(UserError, match="corpus tokens consists of token ids, not text"):
        next(Tokens().documents())


def test_a_blend_is_named_by_its_sources_and_not_by_their_files(tmp_path):
    corpora = {}
    for name in ("prose", "code"):
        (tmp_path / f"{name}.txt").write_text(name)
        corpora[name] = LocalCorpus(tmp_path / f"{name}.txt")
    assert AllSources(corpora).name == "blend of prose, code"
