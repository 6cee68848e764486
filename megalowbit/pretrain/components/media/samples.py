"""Samples: texts that the model writes during training, from the same prompts each time.

They go to `samples.jsonl`, TensorBoard and trackers, and the first of them to the console. Every rank
computes every text, so shards of tensor parallelism and ZeRO stage 3 work as in training: all ranks run the
same forwards in the same order, and the main process records. The model runs as in a validation
(`layers/conversion/evaluation.py`), and sampling has its own generator: training does not notice, bit for
bit. A text depends on the weights, the prompt, the seed and the step, so a resumed run repeats it.

Not covered: pipelines, whose stages have no forward of the whole model; recipes whose blocks must be filled
with tokens, because the model reads one token at a time. Both are refused.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from megalowbit.data.settings import NO_TOKENIZER
from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import Component, RunParts
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import Medium, TextSample
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    from torch import Tensor

    from megalowbit.data.tokenize import FolderTokenizer, Tokenizer
    from megalowbit.layers.recipe import Recipe
    from megalowbit.telemetry.sinks.jsonl import JsonlFile

logger = logging.getLogger(__name__)

KEY = "megalowbit.samples"
LINE_WIDTH = 100


class SamplesSettings(SettingsModel):
    """How often the model writes texts, and which."""

    prompts: tuple[str, ...] = Field(
        min_length=1,
        description="beginnings of the texts. An empty one stands for the beginning of a document",
    )
    every: int = Field(
        default=500,
        ge=1,
        description="interval between samples. The last step always has some",
        json_schema_extra=unit("steps"),
    )
    tokens: int = Field(
        default=50,
        ge=1,
        description="most tokens of a text; it ends earlier at the end of a document",
        json_schema_extra=unit("tokens"),
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="of the softmax from which tokens are drawn. 0: always the most probable token",
    )

    @field_validator("prompts")
    @classmethod
    def _are_unicode(cls, prompts: tuple[str, ...]) -> tuple[str, ...]:
        for number, prompt in enumerate(prompts, start=1):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise ValueError(f"prompt {number} has a lone surrogate, which is no character") from None
        return prompts


class Samples(Component):
    """Lets the model write texts.

    Args:
        settings: when and what.
        engine: DeepSpeed's engine around the converted model.
        tokenizer: of the run.
        seed: of the run.
        total_steps: optimizer steps of the run.

    Raises:
        UserError: a prompt leaves no room for the tokens.
    """

    key = "samples"
    settings_class = SamplesSettings
    description = "let the model write texts during training; off unless set"
    may_change = (KEY, f"{KEY}.*")
    records = ("samples.jsonl",)

    def __init__(
        self, settings: SamplesSettings, engine: Any, tokenizer: Tokenizer, *, seed: int, total_steps: int
    ) -> None:
        self._settings, self._engine, self._tokenizer = settings, engine, tokenizer
        self._seed, self._total_steps = seed, total_steps
        end = tokenizer.eos_token_id
        assert end is not None  # checked with the configuration
        self._end = end
        encoded = tokenizer.encode_batch(list(settings.prompts))
        self._prompts = [[int(number) for number in ids] or [end] for ids in encoded]
        _check_room(self._prompts, settings.tokens, engine.module.config)
        self._decoder: FolderTokenizer | None = None
        self._file: JsonlFile | None = None  # on the main process
        self._written: list[list[int]] = []  # tokens of the texts of this step
        self._nonfinite: set[int] = set()  # numbers of those texts that logits with inf or NaN have ended
        self._has_warned = False

    @classmethod
    def check_recipe(cls, settings: SamplesSettings, recipe: Recipe) -> None:
        """Reject a recipe whose forward needs a multiple of tokens."""
        from megalowbit.layers.seed_sizes import needed_blocks

        for need in (need for each in recipe.variants for need in needed_blocks(each)):
            if need.axis == "tokens" and not need.is_of_backward:
                raise UserError(
                    f"recipe {recipe.name!r} needs a multiple of {need.multiple} tokens "
                    f"({need.field} = {need.name!r}), and samples read one token at a time: leave it out"
                )

    @classmethod
    def build(cls, settings: SamplesSettings, parts: RunParts) -> Samples:
        return cls(
            settings,
            parts.engine,
            parts.loader.tokenizer,
            seed=parts.run.seed,
            total_steps=parts.run.steps,
        )

    def startup_line(self) -> str:
        count = len(self._prompts)
        return (
            f"samples   {count} text{'s' * (count > 1)} of at most {self._settings.tokens} tokens, every "
            f"{self._settings.every} steps and after the last step"
        )

    def evaluate(self, step: int, progress: Callable[[], None]) -> Facts:
        """Write the texts of this step; the metrics get nothing."""
        self._written, self._nonfinite = [], set()
        if step != self._total_steps and step % self._settings.every:
            return {}
        from megalowbit.layers.conversion.evaluation import evaluation

        # codes of full weights on every rank would need the memory that stage 3 saves
        keeps_weights = self._engine.zero_optimization_stage() < 3
        with evaluation(self._engine.module, itertools.count(), keeps_weights=keeps_weights):
            self._written = [
                self._write(ids, step, number, progress) for number, ids in enumerate(self._prompts, start=1)
            ]
        return {}

    def _write(
        self, prompt: Sequence[int], step: int, number: int, progress: Callable[[], None]
    ) -> list[int]:
        """The tokens after a prompt, without the end of the document."""
        import torch

        generator = torch.Generator().manual_seed(seed_of(self._seed, step, number))
        engine, device = self._engine, self._engine.device
        # where forwards have collectives, ranks must not end at different tokens, whatever rounding does
        is_sharded = engine.zero_optimization_stage() == 3 or engine.process_grid.tensor_size > 1
        new, cache, has_ended = list[int](), None, False
        input = torch.tensor([prompt], device=device)  # (1, tokens)
        for _ in range(self._settings.tokens):
            progress()
            output = engine(input_ids=input, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            token = self._choose(output.logits[0, -1], generator)
            if token is None and not has_ended:
                self._nonfinite.add(number)
            token = self._end if token is None else token
            has_ended = has_ended or token == self._end
            if not has_ended:
                new.append(token)
            elif not is_sharded:
                break
            input = torch.tensor([[token]], device=device)
        return new

    def _choose(self, logits: Tensor, generator: Any) -> int | None:
        """A token from logits (vocabulary,); None if they are not finite."""
        import torch

        logits = logits[: self._tokenizer.vocab_size].double().cpu()  # others are padding
        if not torch.isfinite(logits).all():
            return None
        if not self._settings.temperature:
            return int(logits.argmax())
        shares = torch.softmax((logits - logits.max()) / self._settings.temperature, dim=0)
        return int(torch.multinomial(shares, 1, generator=generator))

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        """Record the texts on the main process; returns a line with the first."""
        if self._file is None or not self._written:
            return ()
        samples = self._samples()
        for sample, tokens in zip(samples, self._written, strict=True):
            record = {"step": step, "prompt": sample.prompt, "text": sample.text, "tokens": len(tokens)}
            self._file.append(record | ({"nonfinite": True} if sample.number in self._nonfinite else {}))
        if self._nonfinite and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "samples after step %d: the model's logits are inf or NaN and ended %d of %d texts; "
                '"nonfinite" marks them in samples.jsonl',
                step,
                len(self._nonfinite),
                len(samples),
            )
        return (sample_line(step, samples),)

    def media(self) -> Sequence[Medium]:
        return self._samples() if self._written else ()

    def _samples(self) -> list[TextSample]:
        if self._decoder is None:
            self._decoder = decoder_of(self._tokenizer)
        return [
            TextSample(number=number, prompt=prompt, text=self._decoder.decode_after(ids, tokens))
            for number, (prompt, ids, tokens) in enumerate(
                zip(self._settings.prompts, self._prompts, self._written, strict=True), start=1
            )
        ]

    def open_records(self, folder: Path, resume_step: int | None) -> None:
        from megalowbit.telemetry.sinks.jsonl import JsonlFile  # it imports torch

        self._file = JsonlFile(folder / self.records[0], resume_step=resume_step)

    def close_records(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def check_samples(settings: SamplesSettings | None, *, tokenizer: str | None, stages: int) -> None:
    """Reject samples of runs that cannot write texts.

    Args:
        settings: the section; None: it is off.
        tokenizer: `data.tokenizer`.
        stages: of the pipeline.
    """
    if settings is None:
        return
    if stages > 1:
        raise UserError(
            f"{KEY} cannot be combined with pipeline.stages = {stages}: no stage can write a text; leave it "
            "out, and use `megalowbit generate` on a checkpoint"
        )
    if tokenizer == NO_TOKENIZER:
        raise UserError(
            f'{KEY} needs a tokenizer, and megalowbit.data.tokenizer is "{NO_TOKENIZER}": name the tokenizer '
            "of the ids, or leave it out"
        )


def _check_room(prompts: Sequence[Sequence[int]], tokens: int, model_config: Any) -> None:
    """Reject prompts that do not leave room for the tokens of their texts."""
    positions = int(model_config.max_position_embeddings)
    for number, ids in enumerate(prompts, start=1):
        if len(ids) + tokens > positions:
            raise UserError(
                f"{KEY}: prompt {number} has {len(ids)} tokens and {KEY}.tokens is {tokens}, but the model "
                f"has {positions} positions: shorten one of them"
            )


def seed_of(seed: int, step: int, number: int) -> int:
    """The seed of a text's random numbers."""
    digest = hashlib.sha256(f"sample:{seed}:{step}:{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def decoder_of(tokenizer: Tokenizer) -> FolderTokenizer:
    """The tokenizer as a Hugging Face one, which turns ids into text."""
    from megalowbit.data.tokenize import FolderTokenizer

    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return FolderTokenizer(Path(folder))


def sample_line(step: int, samples: Sequence[TextSample]) -> str:
    """The first text on one line of the console, shortened."""
    first = samples[0]
    others = f" (and {len(samples) - 1} more in samples.jsonl)" if len(samples) > 1 else ""
    begin = f"sample after step {step}: "
    room = LINE_WIDTH - len(begin) - len(others)
    text = f"{first.prompt} ▶ {first.text}".replace("\n", "⏎")
    printable = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return begin + (printable if len(printable) <= room else printable[: room - 1] + "…") + others
