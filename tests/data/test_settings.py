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
