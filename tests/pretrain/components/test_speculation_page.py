"""docs/speculation.md matches the code: keys and defaults, commands, JSON and code samples."""

import json
import re
import shlex
from dataclasses import fields

import pytest
import torch
import transformers

from launchers import ROOT, write_config
from megalowbit.pretrain.command_line import build_parser, main
from megalowbit.pretrain.config import load_config
from megalowbit.speculation.report import GemmRow
from megalowbit.speculation.settings import SpeculationSettings

PAGE = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## In a run") :].split("\n## ")[0]
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
COMMANDS = [line for name, text in FENCES if not name for line in text.splitlines() if line]


def cells(heading):
    """Rows of the table below a heading line."""
    lines = SECTION[SECTION.index(heading) :].splitlines()[2:]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    ]


def shown(language):
    return [text for name, text in FENCES if name == language]


def test_every_setting_named_is_one_and_the_table_is_not_repeated():
    named = re.findall(r"^- `(\w+)` ", SECTION, re.MULTILINE)
    assert named
    assert set(named) <= set(SpeculationSettings.model_fields)
    assert "configuration.md#speculation" in SECTION


def test_every_key_of_a_line_is_explained():
    named = {name for keys, _ in cells("| key | |") for name in re.findall(r"`(\w+)`", keys)}
    assert named == {"step", "next_precision", *(field.name for field in fields(GemmRow))}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse_and_name_a_real_configuration(command):
    arguments = shlex.split(command)
    assert arguments[:2] == ["python", "launch/pretrain.py"]
    options = build_parser().parse_args(arguments[2:])
    config = load_config(ROOT / options.ds_config, options.overrides, world_size=1)
    assert config.settings.speculation is not None


@pytest.mark.slow
def test_the_dry_run_shown_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (command,) = [each for each in COMMANDS if each.endswith("--dry-run")]
    assert main(shlex.split(command)[2:]) == 0
    assert "== speculation\nint8, mixed, bf16 at 15 dB" in capsys.readouterr().out


def test_the_block_shown_is_valid(resolve):
    (text,) = shown("json")
    block = json.loads(f"{{{text}}}")["speculation"]
    settings = resolve(f"megalowbit.speculation={json.dumps(block)}")
    assert settings.settings.speculation.threshold("int8") == 20


def test_the_documented_lines_have_the_logged_form():
    lines = [line.strip() for line in SECTION.splitlines() if line.startswith("    step ")]
    form = (
        r"step \d+: (\S+ (output|grad_input|grad_weight) \w+ → \w+( at \S+ dB)? \([\w ]+\)|and \d+ more, .*)"
    )
    assert len(lines) == 2
    assert all(re.fullmatch(form, line) for line in lines)


@pytest.mark.slow
def test_the_loop_shown_trains(tmp_path, capsys):
    write_config(tmp_path)
    config = transformers.AutoConfig.for_model(**json.loads((tmp_path / "model.json").read_text()))
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    names = {
        "model": model,
        "loader": [{"input_ids": tokens, "labels": tokens}] * 12,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
    }
    (code,) = shown("python")
    exec(code, names)
    assert names["controller"].step == 12
    assert names["report"] is None
    assert names["controller"].totals().share_8bit > 0.5
    assert "share_8bit" in capsys.readouterr().out
