"""What README.md and three pages show works: JSON describes what the text says, Python trains.

tests/docs/ checks the commands and blocks of all pages.
"""

import json
import os
import re

import pytest
import torch
from forks import run_script
from tiny_models import tiny_model

import megalowbit as mlb
from launchers import ROOT, write_config
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.dry_run import describe

PAGES = ("README.md", "docs/runs.md", "docs/configuration.md", "docs/library.md")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}


def fences(language, names=PAGES):
    blocks, opened = [], None
    for line in "\n".join(TEXTS[name] for name in names).splitlines():
        if not line.startswith("```"):
            if opened is not None:
                blocks[-1][1].append(line)
        elif opened is None:
            opened = line.removeprefix("```")
            blocks.append((opened, []))
        else:
            opened = None
    return ["\n".join(lines) + "\n" for name, lines in blocks if name == language]


def shown(language, *parts):
    """The only block that has all of these parts."""
    [found] = [block for block in fences(language) if all(part in block for part in parts)]
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_the_configurations_shown_are_valid(tmp_path, page):
    raw = json.loads(fences("json", [page])[0])
    raw["megalowbit"]["model"]["config"] = str(ROOT / "configs" / raw["megalowbit"]["model"]["config"])
    path = tmp_path / "shown.json"
    path.write_text(json.dumps(raw))
    config = load_config(path, [], world_size=2)
    assert "converted 15 layers" in describe(config)


def test_the_recipe_shown_is_valid_for_the_model_shown(tmp_path):
    configuration, recipe = map(json.loads, fences("json", ["docs/configuration.md"]))
    configuration["megalowbit"]["model"]["config"] = str(ROOT / "configs" / "models" / "gpt2_tiny.json")
    configuration["megalowbit"]["recipe"] = recipe
    path = tmp_path / "shown.json"
    path.write_text(json.dumps(configuration))
    described = describe(load_config(path, [], world_size=1))
    assert "converted 12 layers" in described  # block 0 is kept
    assert "tile16" in described


def test_the_code_shown_trains_a_model(tmp_path):
    write_config(tmp_path)
    fields = json.loads((tmp_path / "model.json").read_text())
    prelude = (
        "import torch, transformers\n"
        f"config = transformers.AutoConfig.for_model(**{fields!r})\n"
        "model = transformers.AutoModelForCausalLM.from_config(config).eval()  # as from_pretrained does\n"
        "tokens = torch.randint(0, 256, (2, 32))\n"
        "loader = [{'input_ids': tokens, 'labels': tokens}] * 4\n"
    )
    (tmp_path / "shown.py").write_text(prelude + shown("python", "mlb.initialize("))
    variables = {
        name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")
    }
    done = run_script(tmp_path / "shown.py", env=variables, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gradient_overflow/element_overflow_rate" in done.stdout
    assert "'gradient_overflow/total_elements': 0" not in done.stdout
    assert "converted 7 layers" in done.stdout


def test_the_packed_tensor_shown_comes_back_from_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"mlb": mlb, "x": torch.randn(8, 64)}
    exec(shown("python", "mlb.quantizer("), names)
    assert torch.equal(names["packed"].dequantize(), names["x_again"])
    assert names["packed"].nbytes == 8 * 64 * 4.5 / 8 + 4


def test_every_setting_that_initialize_acts_on_is_named():
    text = TEXTS["docs/library.md"]
    sentence = text[text.index("`mlb.initialize` acts on") :].split(";")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(EngineSettings.model_fields)


@pytest.mark.parametrize(
    "expression", re.findall(r"`(mlb\.\w+\([^`]*\)(?:\(x\))?)`", "\n".join(TEXTS.values()))
)
def test_one_liners_evaluate(expression):
    model = tiny_model("gpt2")
    mlb.convert(model)
    assert eval(expression, {"mlb": mlb, "x": torch.randn(4, 16), "model": model}) is not None
