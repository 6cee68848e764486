"""What files in docs/results say follows from their cells; pages, pictures and other tests read it."""

import json

import pytest
from kept_studies import STUDIES, shown_by


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_kept_gaps_are_those_of_the_kept_cells(path, tmp_path):
    """If the analysis has changed: python tests/docs/kept_studies.py"""
    kept = json.loads(path.read_text())
    now = shown_by(path, tmp_path)
    assert now["groups"], path
    for key, value in now.items():
        assert_close(value, kept.get(key), key)


def assert_close(now, kept, where):
    """Equal, but for the last digits of floats."""
    assert type(now) is type(kept), where
    if isinstance(now, dict):
        assert now.keys() == kept.keys(), where
        for key in now:
            assert_close(now[key], kept[key], f"{where}/{key}")
    elif isinstance(now, list):
        assert len(now) == len(kept), where
        for number, pair in enumerate(zip(now, kept, strict=True)):
            assert_close(*pair, f"{where}/{number}")
    elif isinstance(now, float):
        assert now == pytest.approx(kept, rel=1e-9, abs=1e-12), where
    else:
        assert now == kept, where
