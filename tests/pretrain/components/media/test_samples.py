"""Samples in a run: training does not notice, the texts are the model's, resumes repeat them, refusals."""

import json
import shutil
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from quick_cases import slow_except
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import PreTrainedTokenizerFast

from launchers import SPEEDS, write_config
from megalowbit.data.tokenize import FolderTokenizer
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.components.media.samples import Samples, SamplesSettings, sample_line, seed_of
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.generate import generator_of
from megalowbit.pretrain.run import pretrain
from megalowbit.telemetry.media import TextSample

PROMPTS = ["The ", ""]
SECTION = {"prompts": PROMPTS, "every": 2, "tokens": 6}
SPECULATION = (
    "megalowbit.recipe=speculative-int8",
    'megalowbit.speculation={"candidates": ["int8", "fp8", "bf16"], "threshold_db": 15, "every": 2}',
)
SPLIT = 'megalowbit.recipe={"base": "nvfp4", "split_input": {"rank": 2}, "split_weight": {"rank": 2}}'
DROPOUT = 'megalowbit.model.overrides={"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}'
KINDS = {
    "nvfp4 and dropout": (DROPOUT,),
    "speculation": SPECULATION,
    "switch": ("megalowbit.late_switch.at=3",),
    "splits": (SPLIT,),
    "chunks": ("megalowbit.chunked_cross_entropy=true", 'megalowbit.activation_checkpointing={"every": 1}'),
}


def samples(**more):
    return "megalowbit.samples=" + json.dumps({**SECTION, **more})


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in SPEEDS} for row in rows]


def texts(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", slow_except(["nvfp4 and dropout"], KINDS))
def test_training_does_not_notice(resolve, tmp_path, capsys, kind):
    with_them = run(resolve(*KINDS[kind], samples(temperature=1.0)), tmp_path / "with")
    output = capsys.readouterr().out
    without = run(resolve(*KINDS[kind]), tmp_path / "without")
    assert with_them == without
    assert len({row["loss"] for row in without}) == len(without)
    weights = [load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("with", "without")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    written = texts(tmp_path / "with")
    assert [(row["step"], row["prompt"]) for row in written] == [
        (step, prompt) for step in (2, 4, 6) for prompt in PROMPTS
    ]
    assert all(0 <= row["tokens"] <= 6 for row in written)
    assert len({row["text"] for row in written}) > 1
    assert "samples   2 texts of at most 6 tokens, every 2 steps and after the last step" in output
    assert sample_line(4, [TextSample(number=1, **pick(written[2])), None]) in output
    events = EventAccumulator(str(tmp_path / "with" / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.tensor_proto.string_val[0]) for event in events.Tensors("samples/prompt 1")]
    assert [step for step, _ in shown] == [2, 4, 6]
    assert all(text.startswith(b"    The  \xe2\x96\xb6 ") for _, text in shown)


def pick(row):
    return {name: row[name] for name in ("prompt", "text")}


def test_a_text_is_what_generate_writes_with_the_checkpoint(resolve, tmp_path):
    run(resolve(samples(every=6, tokens=12)), tmp_path / "run")
    generator = generator_of(tmp_path / "run")
    for row in texts(tmp_path / "run"):
        text, count = generator.write(row["prompt"], max_tokens=12, temperature=0.0, seed=0)
        assert (row["text"], row["tokens"]) == (text, count)


def test_a_text_keeps_the_space_that_a_decoder_takes_away_at_the_beginning(tmp_path):
    pieces = ["</s>", "▁the", "▁cat", "s"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({each: i for i, each in enumerate(pieces)}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    engine = SimpleNamespace(module=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=9)))
    settings = SamplesSettings(prompts=("the", "the", ""), tokens=4)
    found = Samples(settings, engine, FolderTokenizer(tmp_path), seed=0, total_steps=1)
    found._written = [[2, 3], [3, 2], [2, 1]]
    assert [sample.text for sample in found.media()] == [" cats", "s cat", "cat the"]


def test_a_resumed_run_repeats_the_texts(resolve, tmp_path):
    overrides = (samples(temperature=1.5), "megalowbit.checkpoint.every=3")
    run(resolve(*overrides), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for name in ("hf", "checkpoints/step-00000006"):
        shutil.rmtree(tmp_path / "resumed" / name)
    for name in ("DONE", "summary.json"):
        (tmp_path / "resumed" / name).unlink()
    (tmp_path / "resumed" / "checkpoints" / "latest").write_text("step-00000003")
    run(resolve(*overrides), tmp_path / "resumed", is_resume=True)
    assert texts(tmp_path / "resumed") == texts(tmp_path / "whole")
    # they may be turned off, and others may be asked for
    other = samples(prompts=["Other"], every=1)
    (tmp_path / "resumed" / "DONE").unlink()
    run(resolve(other, "megalowbit.run.steps=7"), tmp_path / "resumed", is_resume=True)
    assert [row["prompt"] for row in texts(tmp_path / "resumed")] == [*PROMPTS * 3, "Other"]


def test_the_same_numbers_are_drawn_for_a_text_only():
    seeds = {seed_of(seed, step, number) for seed in (1, 2) for step in (1, 2, 12) for number in (1, 2, 21)}
    assert len(seeds) == 18
    assert all(0 <= seed < 2**56 for seed in seeds)


def test_the_end_of_the_document_and_logits_that_are_not_finite_end_a_text(build_job, tmp_path, caplog):
    job = build_job(samples(every=1))
    found = job.find(Samples)
    outputs = iter([[0.0, 3.0, 1.0], [0.0, 1.0, 3.0], [9.0, 1.0, 2.0]])

    def engine_with(rows):
        class Engine:
            device = torch.device("cpu")
            process_grid = job.engine.process_grid
            module = job.engine.module

            def zero_optimization_stage(self):
                return 0

            def __call__(self, **inputs):
                logits = torch.full((1, inputs["input_ids"].shape[1], 300), -9.0)
                logits[0, -1, :3] = torch.tensor(next(rows))
                logits[0, -1, 256:] = 99.0  # padding of the vocabulary

                class Output:
                    past_key_values = None

                output = Output()
                output.logits = logits
                return output

        return Engine()

    found._engine = engine_with(outputs)
    assert found._write([5], 1, 1, lambda: None) == [1, 2]  # then 0 ends it
    assert found._nonfinite == set()
    found._engine = engine_with(iter([[0.0, 3.0, 1.0], [float("nan"), 1.0, 3.0]]))
    assert found._write([5], 1, 1, lambda: None) == [1]
    assert found._nonfinite == {1}
    found.open_records(tmp_path, None)
    found._written = [[1], [1, 2]]
    for step in (1, 2):
        list(found.after_step(step, {}))
    found.close_records()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row.get("nonfinite") for row in rows] == [True, None] * 2
    assert [each.getMessage()[:42] for each in caplog.records if each.levelname == "WARNING"] == [
        "samples after step 1: the model's logits a"
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": []}, r"megalowbit\.samples\.prompts"),
        ({"prompts": ["\ud800"]}, r"prompt 1 has a lone surrogate"),
        ({"prompts": "text"}, r"megalowbit\.samples\.prompts"),
        ({"every": 0}, r"megalowbit\.samples\.every"),
        ({"tokens": True}, r"megalowbit\.samples\.tokens"),
        ({"temperature": -1}, r"megalowbit\.samples\.temperature"),
        ({"top_p": 1}, r"megalowbit\.samples.*top_p"),
    ],
)
def test_values_that_mean_nothing_are_refused(resolve, more, message):
    with pytest.raises(UserError, match=message):
        resolve(samples(**more))


def test_runs_that_cannot_write_are_refused_by_name(resolve, build_job, tmp_path):
    two = {"overrides": [samples(), 'pipeline={"stages": 2}'], "world_size": 2}
    with pytest.raises(UserError, match=r"megalowbit\.samples cannot be combined with pipeline.stages = 2"):
        load_config(write_config(tmp_path), **two)
    unknown = r'megalowbit.samples needs a tokenizer, and megalowbit.data.tokenizer is "none"'
    with pytest.raises(UserError, match=unknown):
        resolve(samples(), "megalowbit.data.tokenizer=none", "megalowbit.data.vocab_size=256")
    with pytest.raises(UserError, match=r"prompt 1 has 4 tokens and megalowbit.samples.tokens is 99999"):
        build_job(samples(tokens=99999))


def test_a_line_is_short_and_printable():
    first = TextSample(number=1, prompt="a\nb", text="\x1b[31m" + "x" * 300)
    line = sample_line(3, [first, first])
    assert line.startswith("sample after step 3: a⏎b ▶ \N{REPLACEMENT CHARACTER}[31mxxx")
    assert line.endswith("x… (and 1 more in samples.jsonl)")
    assert len(line) == 100
