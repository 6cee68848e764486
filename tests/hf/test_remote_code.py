"""Code in a downloaded folder never runs, even if standard input would confirm it."""

import ast
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.data.hub import HubCorpus
from megalowbit.data.tokenize import ByteTokenizer, FolderTokenizer
from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model, import_checkpoint
from megalowbit.hf.settings import ModelSettings

GPT2 = GPT2Config(
    vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
ROOT = Path(__file__).parents[2]
LOADERS = {"from_pretrained", "from_config", "load_dataset"}
CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import GPT2Config as Config, GPT2LMHeadModel as Model, PreTrainedTokenizerFast as Tokenizer
def generate(model, **more):
    return None
"""


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that the code would leave; somebody answers yes to every question, and must not be asked."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()
    assert answers.tell() == 0


def bring_code(folder, marker, **auto_map):
    """Put a module into `folder`, and name it in every file that transformers reads."""
    code = CODE.format(marker=str(marker))
    (folder / "brought.py").write_text(code)
    (folder / "custom_generate").mkdir(exist_ok=True)
    (folder / "custom_generate" / "generate.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists():
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**content, "auto_map": auto_map}))


@pytest.mark.parametrize("tokenizer_class", ["Brought", "GPT2Tokenizer", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("model_type", [None, "brought", "gpt2"])
def test_a_tokenizer_with_code_is_read_without_it_or_refused(tmp_path, marker, tokenizer_class, model_type):
    folder = tmp_path / "tokenizer"
    ByteTokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": tokenizer_class}))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    bring_code(folder, marker, AutoTokenizer=[None, "brought.Tokenizer"], AutoConfig="brought.Config")
    outcome = read_or_refused(folder)
    if isinstance(outcome, str):
        assert outcome.startswith(f"no usable tokenizer in folder {folder} (it needs its own code")
        assert "\n" not in outcome
    else:
        assert outcome == list(b"import this")


def read_or_refused(folder):
    try:
        [ids] = FolderTokenizer(folder).encode_batch(["import this"])
    except UserError as error:
        return str(error)
    return ids.tolist()


def test_a_model_with_code_is_read_without_it(tmp_path, marker):
    folder = tmp_path / "hf"
    model = GPT2LMHeadModel(GPT2)
    model.save_pretrained(folder)
    bring_code(folder, marker, AutoConfig="brought.Config", AutoModelForCausalLM="brought.Model")
    loaded = build_model(ModelSettings(checkpoint=folder), seed=0)
    assert loaded.transformer.wpe.weight.equal(model.transformer.wpe.weight)
    import_checkpoint(folder, tmp_path / "start")


def test_a_model_of_an_unknown_kind_with_code_is_refused(tmp_path, marker):
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "brought"}))
    bring_code(folder, marker, AutoConfig="brought.Config", AutoModelForCausalLM="brought.Model")
    with pytest.raises(UserError, match="model_type"):
        build_model(ModelSettings(checkpoint=folder), seed=0)


def test_a_data_set_with_a_script_is_refused(tmp_path, marker, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(CODE.format(marker=str(marker)))
    with pytest.raises(UserError, match="cannot be loaded"):
        HubCorpus(str(folder))


def test_every_call_that_could_run_remote_code_disables_it():
    calls = []
    for folder in ("megalowbit", "tools", "launch", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                owner = ast.unparse(node.func.value)
                if node.func.attr in LOADERS and owner not in (
                    "cls",
                    "ProcessGrid",
                    "ModelLayout",
                    "ZeroSharing",
                ):
                    said = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
                    calls.append((str(path), node.lineno, [ast.unparse(value) for value in said]))
    assert len(calls) >= 3
    assert [call for call in calls if call[2] != ["False"]] == []
