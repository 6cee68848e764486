from pathlib import Path

import megatron_writer
import pytest
import torch
import transformers
from forks import run_script
from programs import call_main
from quick_cases import slow_except
from tiny_models import KINDS, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from launchers import check_refusal
from megalowbit.commands.models import convert
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.hf.folders.shards import ShardWriter
from megalowbit.hf.packed.export import LAYOUTS
from megalowbit.hf.packed.recipes import PRECISIONS

ROOT = Path(__file__).parents[3]
TOOL = "tools/convert_hf.py"
GPT2 = "configs/models/gpt2_tiny.json"


def convert_hf(*arguments):
    return run_script(ROOT / TOOL, *arguments)


@pytest.fixture(autouse=True)
def _progress_bars_as_before():
    """The tool switches those of transformers off."""
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.mark.parametrize("kind", slow_except(["gpt2"], KINDS))
def test_round_trip_from_the_command_line(tmp_path, kind):
    model = tiny_model(kind, vocab_size=256).eval()
    model.save_pretrained(tmp_path / "source")
    start = tmp_path / "start"
    done = convert_hf("to-megalowbit", tmp_path / "source", start, "--recipe", "nvfp4")
    assert done.returncode == 0, done.stderr
    assert f'"model": {{"checkpoint": "{start}"}}' in done.stdout
    named = ["--tokenizer", "byte"] if kind != "qwen2" else []  # which would give other ids
    done = convert_hf("to-hf", start, tmp_path / "back", *named)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'back'} is {start}/step-00000000: load it with transformers." in done.stdout
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = torch.tensor([list(b"import this")])
    if named:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
        assert tokenizer("import this")["input_ids"] == tokens[0].tolist()
    with torch.no_grad():
        assert back(tokens).logits.equal(model(tokens).logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to-megalowbit", "nowhere", "out"], "checkpoint nowhere is not a folder"),
        (["to-hf", "nowhere", "out"], "no complete training checkpoint in nowhere"),
        (["to-hf", "nowhere", "out", "--dtype", "int8"], "unknown dtype 'int8': known: float32"),
        (["to-hf", "nowhere", "out", "--packed", "gguf"], "unknown layout 'gguf': known: compressed-tensors"),
        (["to-hf", "nowhere", "out", "--packed", "modelopt"], "no complete training checkpoint in nowhere"),
        (
            ["to-hf", "nowhere", "out", "--precision", "w4a4"],
            "--precision is for packed weights: add --packed",
        ),
        (
            ["to-hf", "nowhere", "out", "--packed", "modelopt", "--precision", "int4"],
            "unknown precision 'int4': known: w4a16, w4a4",
        ),
        (["to-hf", "nowhere", "out", "--exact"], "--exact is for packed weights: add --packed"),
        (
            ["to-hf", "nowhere", "out", "--packed", "modelopt", "--dtype", "float32"],
            "--dtype float32 does not fit --packed",
        ),
        (["to-hf", "nowhere", "out", "--tokenizer", "bpe"], '--tokenizer "bpe" needs a trained tokenizer'),
        (["to-hf", "nowhere", "out", "--tokenizer", "nope"], "--tokenizer 'nope' is neither \"byte\" nor an"),
        (["to-hf", "nowhere", "out", "--tokenizer", "x" * 300], 'is neither "byte" nor an existing folder'),
        (["to-hf", "nowhere", "x" * 300], "cannot be used (File name too long)"),
        (["to-megalowbit", "x" * 300, "out"], "out (File name too long): name other folders"),
        (["to-megalowbit", "docs", "docs/../docs/new/start"], "start is inside "),
        (["to-megalowbit", "docs", "out", "--config", "nowhere"], "--config nowhere is neither a file nor a"),
        (["to-megalowbit", "docs", "out", "--config", "README.md"], "README.md is not"),
        (["to-megalowbit", "docs", "out", "--config", GPT2], "is neither DeepSpeed's nor Megatron-LM's"),
        (["to-hf", "nowhere", "out", "--config", GPT2], "unrecognized arguments: --config"),
        (["to-hf", "nowhere", "tests"], "tests already exists and is never overwritten"),
        (["to-mars", "a", "b"], "invalid choice: 'to-mars'"),
        (["to-hf", "a"], "the following arguments are required: OUT; see --help"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    done = call_main(TOOL, *arguments, capsys=capsys)
    check_refusal(done, message)


@pytest.mark.slow
def test_a_mistake_ends_the_program_with_exit_code_2():
    check_refusal(convert_hf("to-mars", "a", "b"), "invalid choice: 'to-mars'")


def test_a_checkpoint_of_megatron_lm_from_the_command_line(tmp_path, capsys):
    model = tiny_model("llama", vocab_size=256).eval()
    megatron_writer.write(tmp_path / "megatron", model, ranks=2)
    small = ["--shard-size", "0.00005"]
    command = ["to-megalowbit", tmp_path / "megatron", tmp_path / "to-megalowbit", *small]
    done = call_main(TOOL, *command, "--dry-run", capsys=capsys)
    assert "step-00000000/weights-00001-of-0000" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
    for arguments in (command, ["to-hf", tmp_path / "to-megalowbit", tmp_path / "to-hf"]):
        done = call_main(TOOL, *arguments, "--verify", capsys=capsys)
        assert done.returncode == 0, done.stderr
        assert f"verified: all 21 tensors are those of {arguments[1]}" in done.stdout
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "to-hf").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert back(tokens).logits.equal(model(tokens).logits)


def test_help_names_both_directions(capsys):
    done = call_main(TOOL, "--help", capsys=capsys)
    assert done.returncode == 0
    assert "to-megalowbit" in done.stdout
    assert "to-hf" in done.stdout
    assert "megalowbit convert to-hf runs/tiny/ tiny-hf/" in done.stdout


def test_the_layouts_and_precisions_of_the_tool_are_those_of_the_package():
    """The tool names them without importing torch."""
    assert tuple(LAYOUTS) == convert.LAYOUTS
    assert convert.PRECISIONS == PRECISIONS


def test_packed_folders_from_the_command_line(tmp_path, capsys):
    model = tiny_model("llama", vocab_size=256, intermediate_size=96)
    model.bfloat16().save_pretrained(tmp_path / "source")
    start = tmp_path / "start"
    assert call_main(TOOL, "to-megalowbit", tmp_path / "source", start, capsys=capsys).returncode == 0
    for layout, settings in (("compressed-tensors", "config.json"), ("modelopt", "hf_quant_config.json")):
        done = call_main(
            TOOL, "to-hf", start, tmp_path / layout, "--packed", layout, "--exact", capsys=capsys
        )
        assert done.returncode == 0, done.stderr
        assert f"14 layers packed as NVFP4 (w4a16, {layout})" in done.stdout
        assert "bit for bit those of the recipe's forward" in done.stdout
        assert (tmp_path / layout / settings).is_file()
    arguments = ["to-hf", start, tmp_path / "plan", "--packed", "modelopt", "--dry-run"]
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert "model.safetensors: " in done.stdout
    assert not (tmp_path / "plan").exists()
    done = call_main(TOOL, *arguments[:-1], "--verify", capsys=capsys)
    assert "verified: all 49 tensors are those of" in done.stdout, done.stdout + done.stderr
    arguments = ["to-hf", start, tmp_path / "w4a4", "--packed", "modelopt", "--precision", "w4a4"]
    done = call_main(TOOL, *arguments, capsys=capsys)
    check_refusal(done, 'precision "w4a4" needs the largest input of layer model.layers.0.self_attn.q_proj')


def test_layers_of_8_bits_beside_packed_ones_from_the_command_line(tmp_path, capsys):
    source, start = hf_folder(tmp_path / "source"), tmp_path / "start"
    done = call_main(TOOL, "to-megalowbit", source, start, "--recipe", "nvfp4-attention-fp8", capsys=capsys)
    assert done.returncode == 0, done.stderr
    arguments = ["to-hf", start, tmp_path / "packed", "--packed", "compressed-tensors"]
    for more in (["--exact"], ["--exact", "--dry-run"]):
        check_refusal(call_main(TOOL, *arguments, *more, capsys=capsys), "has 8-bit weights in the forward")
    done = call_main(TOOL, *arguments, "--dry-run", capsys=capsys)
    assert "6 layers as NVFP4 (compressed-tensors); 9 linear layers in bf16" in done.stdout
    assert "8 layers with 8 bits in the recipe's forward are written in bf16" in done.stdout
    assert not (tmp_path / "packed").exists()
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert "WARNING: 8 layers with 8 bits" in done.stdout


def hf_folder(folder):
    tiny_model("llama", vocab_size=256).save_pretrained(folder)
    return folder


def test_a_dry_run_prints_files_and_memory_and_writes_nothing(tmp_path, capsys):
    source = hf_folder(tmp_path / "hf")
    arguments = (
        "to-megalowbit",
        str(source),
        str(tmp_path / "start"),
        "--shard-size",
        "0.00005",
        "--dry-run",
    )
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 0
    assert "step-00000000/weights-00001-of-0000" in done.stdout
    assert "memory: at most" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tokenizer_that_the_model_would_give_other_ids_is_not_saved_with_it(tmp_path, capsys):
    source, run = tmp_path / "source", tmp_path / "run"
    tiny_model("qwen2", vocab_size=256).save_pretrained(source)
    start = run / "checkpoints"  # as in a run's folder
    assert call_main(TOOL, "to-megalowbit", source, start, capsys=capsys).returncode == 0
    ByteTokenizer().save_pretrained(run / "tokenizer")
    done = call_main(TOOL, "to-hf", run, tmp_path / "hf", capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert "no tokenizer was saved: tokenizer " in done.stdout
    assert "cannot be exported with a qwen2 model" in done.stdout
    assert not [*(tmp_path / "hf").glob("tokenizer*")]
    done = call_main(TOOL, "to-hf", run, tmp_path / "named", "--tokenizer", "byte", capsys=capsys)
    check_refusal(done, "tokenizer byte cannot be exported with a qwen2 model")
    assert not (tmp_path / "named").exists()


def test_a_verified_conversion_says_so(tmp_path, capsys):
    source, start, back = hf_folder(tmp_path / "hf"), tmp_path / "start", tmp_path / "back"
    done = call_main(TOOL, "to-megalowbit", str(source), str(start), "--verify", capsys=capsys)
    assert f"verified: all 21 tensors are those of {source}" in done.stdout
    arguments = ("to-hf", str(start), str(back), "--verify", "--shard-size", "0.00005")
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert f"verified: all 21 tensors are those of {start / 'step-00000000'}" in done.stdout
    assert (back / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_a_size_of_files_that_is_none_is_refused(size, capsys):
    done = call_main(TOOL, "to-hf", "a", "b", "--shard-size", size, capsys=capsys)
    check_refusal(done, "is no size in GB: name one above 0")


def test_ctrl_c_says_what_the_same_command_continues_with(tmp_path, monkeypatch, capsys):
    source, start = hf_folder(tmp_path / "hf"), tmp_path / "start"
    written, write = [], ShardWriter.write

    def interrupted(writer, name, tensor):
        if len(written) == 9:
            raise KeyboardInterrupt
        written.append(name)
        return write(writer, name, tensor)

    monkeypatch.setattr(ShardWriter, "write", interrupted)
    arguments = ("to-megalowbit", str(source), str(start), "--shard-size", "0.00002")
    done = call_main(TOOL, *arguments, capsys=capsys)
    assert done.returncode == 130
    assert f"interrupted before {start} was complete: the same command continues" in done.stderr
    monkeypatch.setattr(ShardWriter, "write", write)
    assert call_main(TOOL, *arguments, capsys=capsys).returncode == 0
    assert (start / "latest").is_file()
