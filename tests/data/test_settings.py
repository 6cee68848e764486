import math
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from megalowbit.data.settings import DataSettings, default_cache_dir


def test_the_defaults_need_only_a_sequence_length():
    settings = DataSettings(sequence_length=128)
    assert (settings.corpus, settings.tokenizer, settings.split) == ("stdlib", "byte", "train")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sequence_length": 1}, "greater than or equal to 2"),
        ({"sequence_length": 8, "tokeniser": "byte"}, "tokeniser"),
        ({"sequence_length": 8, "tokenizer": "bpe"}, "needs vocab_size"),
        ({"sequence_length": 8, "vocab_size": 300}, 'vocab_size 300 is for tokenizers "bpe" and "none" only'),
        ({"sequence_length": 8, "tokenizer": "none"}, 'tokenizer "none" needs vocab_size, the number'),
        (
            {"sequence_length": 8, "tokenizer": "bpe", "vocab_size": 256},
            "vocab_size 256 is too small .* set 257",
        ),
        ({"sequence_length": 8, "packing": "bfd"}, "'wrapped', 'documents' or 'best_fit'"),
        (
            {"sequence_length": 8, "tokenizer": "none", "vocab_size": 9, "packing": "best_fit"},
            'packing "best_fit" needs the end-of-document id, which tokenizer "none" does not know',
        ),
        (
            {"sequence_length": 8, "tokenizer": "none", "vocab_size": 9, "eod_mask_loss": True},
            "eod_mask_loss needs the end-of-document id",
        ),
        ({"sequence_length": 8, "max_bad_records": -1}, "greater than or equal to 0"),
        ({"sequence_length": 8, "workers": 0}, "greater than or equal to 1"),
        ({"sequence_length": 8, "build_timeout": 0}, "greater than 0"),
        ({"sequence_length": 8, "tokenizer": "bpe", "vocab_size": 2**24}, "less than 16777216"),
        ({"sequence_length": 8, "corpus": ""}, "at least 1 character"),
        ({"sequence_length": 8, "seed": -1}, "greater than or equal to 0"),
    ],
)
def test_wrong_values_and_combinations_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        DataSettings(**values)


A, B = ({"corpus": f"{name}.txt", "weight": 1} for name in "ab")
PHASE = {"from_step": 5, "weights": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sources": {}}, "sources is empty: name a text there, or set corpus"),
        (
            {"sources": {"a": {"corpus": "a.txt"}}},
            "it has none of weight, tokens and epochs: set one of them",
        ),
        ({"sources": {"a": {**A, "tokens": 5}}}, "it has weight and tokens of weight, tokens and epochs"),
        ({"sources": {"a": {**A, "weight": -0.5}}}, "greater than or equal to 0"),
        ({"sources": {"a": {**A, "weight": math.nan}}}, "finite number"),
        ({"sources": {"a": {**A, "weight": math.inf}}}, "finite number"),
        ({"sources": {"a": {**A, "weight": True}}}, "write a number, not true or false"),
        ({"sources": {"a": {**A, "weight": "1"}}}, "write a number, without quotes"),
        ({"sources": {"a": {"corpus": "a.txt", "epochs": 0}}}, "greater than 0"),
        ({"sources": {"a": {"corpus": "a.txt", "tokens": 1.5}}}, "valid integer"),
        ({"sources": {"a": {"weight": 1}}}, "Field required"),
        ({"sources": {"a": {**A, "weigth": 1}}}, "weigth"),
        ({"sources": {"a": {**A, "weight": 0}, "b": {**B, "weight": 0}}}, "all weights in sources are 0"),
        ({"sources": {"a.b": A}}, "'a.b' in sources is not a name: use up to 64 letters"),
        ({"sources": {"": A}}, "'' in sources is not a name"),
        ({"sources": {"a": A}, "corpus": "a.txt"}, "corpus is 'a.txt', and sources are set, too"),
        ({"sources": {"a": A}, "split": "test"}, "split has no effect on sources: set it in those"),
        ({"sources": {"a": A}, "corpus_config": "x"}, "corpus_config has no effect on sources"),
        ({"corpus": "blend"}, 'corpus "blend" needs sources: name the texts there'),
        ({"phases": [PHASE]}, "phases needs sources"),
        (
            {"sources": {"a": A, "b": {"corpus": "b.txt", "tokens": 9}}, "phases": [PHASE]},
            "phases change weights, and sources.b has none: give all of them weights",
        ),
        (
            {"sources": {"a": A}, "phases": [PHASE]},
            "the phase from step 5 names 'b', which is not in sources: a",
        ),
        ({"sources": {"a": A, "b": B, "c": B}, "phases": [PHASE]}, "phase from step 5 has no weight for c"),
        (
            {"sources": {"a": A, "b": B}, "phases": [{**PHASE, "weights": {"a": 0, "b": 0}}]},
            "the phase from step 5 has only weights of 0",
        ),
        (
            {"sources": {"a": A, "b": B}, "phases": [{**PHASE, "weights": {"a": -1, "b": 2}}]},
            "greater than or equal to 0",
        ),
        (
            {"sources": {"a": A, "b": B}, "phases": [PHASE, PHASE]},
            "step 5 follows that from step 5: put them",
        ),
        ({"sources": {"a": A, "b": B}, "phases": [{**PHASE, "from_step": 0}]}, "greater than or equal to 1"),
    ],
)
def test_blends_that_are_none_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        DataSettings(sequence_length=8, **values)


def test_a_blend_survives_json_and_has_one_order():
    blend = DataSettings(sequence_length=8, sources={"b": B, "a": A}, phases=[PHASE])
    assert (blend.corpus, list(blend.sources)) == ("blend", ["a", "b"])
    assert DataSettings.model_validate_json(blend.model_dump_json()) == blend


def test_settings_cannot_be_changed_and_survive_json():
    settings = DataSettings(sequence_length=128, tokenizer="bpe", vocab_size=512)
    with pytest.raises(ValidationError):
        settings.seed = 3
    assert DataSettings.model_validate_json(settings.model_dump_json()) == settings


def test_the_cache_follows_the_environment(monkeypatch):
    monkeypatch.delenv("MEGALOWBIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "megalowbit"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/megalowbit")
    monkeypatch.setenv("MEGALOWBIT_CACHE", "/y")
    assert DataSettings(sequence_length=2).cache_dir == Path("/y")


def test_importing_the_settings_is_light():
    code = (
        "import sys, megalowbit.data.settings; "
        "heavy = {'torch', 'datasets', 'tokenizers', 'transformers', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
