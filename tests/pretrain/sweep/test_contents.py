"""What a configuration has by name or path: read again, it differs where a file has changed."""

import json
from pathlib import Path

from launchers import write_config
from megalowbit.pretrain.checks import load_checked_config
from megalowbit.pretrain.sweep.contents import contents_of, differences, texts_of


def resolved(folder, *overrides):
    return load_checked_config(folder / "tiny.json", list(overrides), world_size=1)


def test_the_model_counts_by_its_fields_and_the_text_by_its_bytes(tmp_path):
    write_config(tmp_path)
    config = resolved(tmp_path)
    before, text = contents_of(config), texts_of(config)
    assert before == contents_of(resolved(tmp_path))
    model = Path(config.to_dict()["megalowbit"]["model"]["config"])
    model.write_text(json.dumps({**json.loads(model.read_text()), "n_head": 4}))
    assert list(differences(before, contents_of(resolved(tmp_path)))) == [("model.n_head", 2, 4)]
    corpus = Path(config.settings.data.corpus)
    corpus.write_text(corpus.read_text() + "one more line\n")
    again = texts_of(resolved(tmp_path))
    assert again.keys() == text.keys()
    assert again != text


def test_a_recipe_counts_by_its_fields_whatever_it_is_called(tmp_path):
    write_config(tmp_path)
    own = 'megalowbit.recipe={"base": "nvfp4", "name": "nvfp4", "keep_last": 1}'
    named, changed = (contents_of(resolved(tmp_path, each)) for each in ("megalowbit.recipe=nvfp4", own))
    assert list(differences(named, changed)) == [("recipe.keep_last", 0, 1)]


def test_differences_are_dotted_keys():
    before = {"a": {"b": 1, "c": [1]}, "d": 1}
    now = {"a": {"b": 2, "c": [1]}, "e": None, "d": True}
    assert list(differences(before, now)) == [("a.b", 1, 2), ("d", 1, True), ("e", "nothing", None)]
