import json

import pytest

from megalowbit.errors import UserError, lines_of
from megalowbit.pretrain.sweep.study.study_file import read_study

GOOD = {
    "base": "base.json",
    "sizes": [{"name": "small"}],
    "texts": [{"name": "python", "source": "stdlib"}],
    "seeds": [1, 2],
    "steps": [10],
    "recipes": [
        {"name": "bf16", "set": {"megalowbit.recipe": "bf16"}},
        {"name": "nvfp4", "set": {"megalowbit.recipe": "nvfp4"}, "lr_factors": [1, 2]},
    ],
    "baseline": "bf16",
    "replicas": [{"name": "again", "of": "bf16", "lr_factor": 1.000001}],
}


def read(tmp_path, **changes):
    path = tmp_path / "study.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return read_study(path)


def test_a_study_has_paths_relative_to_its_file_and_defaults(tmp_path):
    study = read(tmp_path, texts=[{"name": "t", "source": "file", "path": "texts"}])
    assert study.base == tmp_path / "base.json"
    assert study.texts[0].path == tmp_path / "texts"
    assert study.recipe("nvfp4").lr_factors == (1, 2)
    assert study.recipe("bf16").lr_factors == (1.0,)
    assert (study.window, study.heldout_bytes, study.keep_weights) == (100, 65536, False)


TWICE = [{"name": "bf16"}, {"name": "bf16"}]
MISTAKES = [
    ({"recipe": []}, "unknown key 'recipe': did you mean 'recipes'?"),
    (
        {"recipes": [{"name": "bf16", "sets": {}}]},
        "unknown key of 'bf16' in recipes: 'sets': did you mean 'set'?",
    ),
    ({"baseline": "fp16"}, "unknown baseline 'fp16': did you mean 'bf16'? known: bf16, nvfp4"),
    ({"recipes": TWICE, "replicas": []}, "two recipes and replicas are called 'bf16': rename one"),
    ({"sizes": [{"name": "s"}, {"name": "s"}]}, "two sizes are called 's': rename one"),
    ({"replicas": [{"name": "nvfp4", "of": "bf16"}]}, "two recipes and replicas are called 'nvfp4'"),
    (
        {"replicas": [{"name": "x", "of": "nvfp"}]},
        "unknown recipe of replica 'x': 'nvfp': did you mean 'nvfp4'?",
    ),
    ({"baseline_forks": ["nvfp"]}, "unknown baseline_forks: 'nvfp': did you mean 'nvfp4'?"),
    ({"baseline_forks": ["bf16"]}, "unknown baseline_forks: 'bf16'"),
    (
        {"baseline_forks": ["again"], "replicas": [{"name": "again", "of": "nvfp4"}]},
        "baseline_forks: 'again' is a replica of 'nvfp4': leave it out",
    ),
    ({"baseline_forks": ["again", "again"]}, "baseline_forks has 'again' twice: remove one"),
    ({"sizes": [{"name": "a/b"}]}, "sizes.0.name = 'a/b' is not valid"),
    (
        {"sizes": [{"name": "small"}, {"name": "hot", "stress_of": "smal"}]},
        "unknown unstressed size of 'hot': 'smal': did you mean 'small'? known: small",
    ),
    (
        {"sizes": [{"name": "a", "stress_of": "b"}, {"name": "b", "stress_of": "a"}]},
        "unknown unstressed size of 'a': 'b'",
    ),
    ({"sizes": [{"name": "s", "steps": [0]}]}, "size 's' has 0 steps: use positive numbers"),
    (
        {"sizes": [{"name": "s"}, {"name": "hot", "stress_of": "s", "steps": [9, 40]}]},
        "size 'hot' has 9 steps, too few to judge whether a run is broken: use at least 20, or a smaller",
    ),
    ({"sizes": [{"name": "s", "steps": [5, 5]}]}, "size 's' has 5 steps twice: remove one"),
    ({"sizes": [{"name": "s", "lr_factor": 0}]}, "sizes.0.lr_factor = 0"),
    ({"instability": {"gap": 0}}, "instability.gap = 0"),
    ({"seeds": []}, "seeds is empty: list at least one"),
    ({"seeds": [1, 1]}, "seeds has 1 twice: remove one"),
    ({"steps": [0]}, "steps has 0: use positive numbers"),
    ({"recipes": [{"name": "bf16", "lr_factors": [1, 0]}]}, "recipe 'bf16' has lr factor 0.0"),
    (
        {"recipes": [{"name": "bf16", "lr_factors": [1, 50.00001, 50.00002]}]},
        "recipe 'bf16' has lr factor 50 twice",  # as cells are named
    ),
    ({"recipes": [{"name": "b" * 61}]}, "60 characters"),
    ({"set": {"megalowbit.run.seed": 3}}, "megalowbit.run.seed in `set` of the study is decided by the grid"),
    ({"sizes": [{"name": "s", "set": {"a b": 1}}]}, "'a b' in `set` of 's' is not a dotted key"),
    ({"texts": [{"name": "t", "source": "file"}]}, "text 't' of source 'file' needs 'path'"),
    (
        {"texts": [{"name": "t", "source": "stdlib", "packages": ["numpy"]}]},
        "text 't' of source 'stdlib' has no use for 'packages'",
    ),
    ({"texts": [{"name": "all", "source": "stdlib"}]}, "a text is called 'all', as the rows over all texts"),
    (
        {"recipes": [{"name": "bf16", "lr_factors": [2]}], "replicas": []},
        "baseline 'bf16' needs lr factor 1: add it",
    ),
    (
        {"set": {"optimizer.params": {"lr": 1}}},
        "optimizer.params in `set` of the study would replace optimizer.params.lr too: name the keys inside",
    ),
    (
        {"sizes": [{"name": "s", "set": {"megalowbit.model": {}}}]},
        "megalowbit.model in `set` of 's' would replace megalowbit.model.config too",
    ),
    ({"texts": [{"name": "t", "source": "hub"}]}, "texts.0.source = 'hub' is not valid"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_named_with_the_file(tmp_path, changes, message):
    with pytest.raises(UserError) as caught:
        read(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'study.json'}: ")
    assert message in str(caught.value)


def test_all_mistakes_are_named_together(tmp_path):
    with pytest.raises(UserError) as caught:
        read(tmp_path, baseline="fp16", seeds=[1, 1])
    assert len(lines_of(caught.value)) == 2


def test_a_study_that_is_no_object_or_has_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "study.json"
    for text, message in (("[]", "not an object"), ('{"seeds": [1], "seeds": [2]}', "occurs twice")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_study(path)
