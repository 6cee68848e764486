"""`python -m megalowbit quantize`: an ordinary Hugging Face folder, packed for inference servers.

The weights are rounded as the forward of a recipe rounds them, without training. The new folder holds
`quantization_report.json`: the error of each layer's weight and, if a text is given, the loss on it before
and after. Both are computed in bf16. The loss after uses the weights that a server decodes from the new
files; with static inputs, also its rounding of inputs by the scales in these files.

These scales come from a part of the text: one sequence in four calibrates, with nothing rounded, and the
other three are evaluated. Sequences predict different tokens. If the tokenizer begins texts with a token, as
LLaMA's does, sequences for calibration begin with it, because a trained model may have its largest inputs
there; evaluated ones do not. All figures are known before the folder
appears.

Runs in one process. Without a text, memory holds one group of tensors at a time; with one, the model in bf16.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megalowbit.data.settings import DataSettings, ValidationSource
from megalowbit.data.tokenize import Tokenizer, build_tokenizer
from megalowbit.data.validation import Batch, TextLoss, ValidationText, open_validation
from megalowbit.errors import UserError
from megalowbit.families.config_checks import check_fits
from megalowbit.families.registry import family
from megalowbit.hf.batches.upload import upload
from megalowbit.hf.checkpoint import open_folder
from megalowbit.hf.folders.new_folder import refuse_existing
from megalowbit.hf.folders.tokenizer_files import has_tokenizer
from megalowbit.hf.losses.token_losses import sum_of_model_losses
from megalowbit.hf.model import load_weights
from megalowbit.hf.packed.export import PackedExport, PackedLayer, plan_packed_folder
from megalowbit.hf.packed.report import WeightError, weight_error, worst_errors
from megalowbit.labels import IGNORED_LABEL
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.evaluation import evaluation
from megalowbit.layers.conversion.precision_switch import switched
from megalowbit.layers.conversion.static_inputs import (
    InputRanges,
    StaticInputs,
    beyond_range,
    use_static_inputs,
)
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.values import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

REPORT_FILE = "quantization_report.json"
INPUTS = ("none", "static")
WORST = 10  # layers in the printed table
LONGEST = 2048  # tokens of a sequence, by default
TOKENS = 2**18  # of the text, by default
EVERY = 4  # one sequence in so many calibrates


class TextOptions(NamedTuple):
    """The text, and how it is read.

    Attributes:
        path: a file, a folder or a glob, as `data.corpus` names it; None: no text.
        tokenizer: "byte" or a folder; None: that of the model.
        tokens: predict only so many, in sequences that are spread evenly over the text.
        sequence_length: in tokens; None: that of the model, at most `LONGEST`.
    """

    path: str | None = None
    tokenizer: str | None = None
    tokens: int = TOKENS
    sequence_length: int | None = None


def quantize(
    source: Path,
    folder: Path,
    *,
    recipe: str | Mapping[str, Any] = "nvfp4",
    layout: str = "compressed-tensors",
    inputs: str = "none",
    text: TextOptions = TextOptions(),  # noqa: B008  it does not change
    is_dry_run: bool = False,
) -> dict[str, Any] | None:
    """Write the packed folder and print its report.

    Args:
        source: a Hugging Face folder.
        folder: a new folder.
        recipe: how weights, and inputs that are not left alone, are rounded: a name, or a configuration
            block.
        layout: see `export_packed_checkpoint`.
        inputs: one of `INPUTS`: whether servers round inputs, too.
        text: for calibration and losses.
        is_dry_run: only print what would be written.

    Returns:
        The report; None in a dry run.

    Raises:
        UserError: the folder cannot be read, packed or written; the text or its tokenizer cannot be used.
    """
    refuse_existing(folder)
    if source.resolve() in folder.resolve().parents:
        raise UserError(f"{folder} is inside {source}, which must not change: name a folder outside of it")
    chosen, is_static = recipe_of(recipe), inputs == "static"
    planned = plan_packed_folder(source, chosen, layout)
    if is_static:  # with any maxima: those of the text are not known yet
        ones = dict.fromkeys(planned.packed, 1.0)
        planned = plan_packed_folder(source, chosen, layout, precision="w4a4", input_maxima=ones)
    if planned.needs_input_maxima and text.path is None:
        raise UserError("--inputs static needs a text that gives the range of the inputs: add --text")
    opened = None if text.path is None else _open_text(source, text)
    if is_dry_run:
        print(planned.describe(folder))
        if opened is not None:
            print(opened.describe(is_calibrated=planned.needs_input_maxima))
        return None
    measured = None
    if opened is not None:
        measured = _Measured(source, chosen, opened, planned)
    report = _Report(source, chosen, measured)
    options: dict[str, Any] = {"examine": report.examine}
    if is_static:
        options |= {"precision": "w4a4", "input_maxima": {} if measured is None else measured.maxima}
    export = plan_packed_folder(source, chosen, layout, **options)
    packed = export.run(folder)
    print(f"{folder} is {source}: {packed}\n\n{report.describe()}")
    return report.content


class _Text(NamedTuple):
    """An opened text.

    Attributes:
        text: its sequences.
        tokenizer: that made the tokens.
    """

    text: ValidationText
    tokenizer: Tokenizer

    def parts(self, *, is_calibrated: bool) -> tuple[list[int], list[int]]:
        """The numbers of the sequences that calibrate, and of those that are evaluated."""
        numbers = list(range(self.text.num_sequences))
        if not is_calibrated:
            return [], numbers
        if len(numbers) == 1:
            return numbers, numbers
        return numbers[::EVERY], [number for number in numbers if number % EVERY]

    def describe(self, *, is_calibrated: bool) -> str:
        """One line of text."""
        calibration, evaluated = self.parts(is_calibrated=is_calibrated)
        sequences = counted(len(evaluated), "sequence")
        line = f"text: {self.text.name}, {sequences} of {self.text.sequence_length} tokens"
        begin = "" if self.tokenizer.begin is None else f", after {self.tokenizer.begin[1]!r} as on servers"
        if calibration == evaluated:
            return f"{line}; it is too short for two parts, so the same sequence calibrates{begin}"
        return line + f", and {len(calibration):,} more for calibration{begin}" * is_calibrated


def _open_text(source: Path, options: TextOptions) -> _Text:
    """Open and tokenise the text.

    Raises:
        UserError: it cannot be read, or the model cannot process it.
    """
    config = open_folder(source)[1].config
    if options.tokenizer is None and not has_tokenizer(source):
        raise UserError(f'{source} has no tokenizer: name its folder, or "byte", with --tokenizer')
    length = options.sequence_length or _longest(config)
    settings = DataSettings(
        tokenizer=str(source) if options.tokenizer is None else options.tokenizer,
        sequence_length=length,
        validation=ValidationSource(corpus=options.path),
    )
    tokenizer = build_tokenizer(settings)
    check_fits(config, vocab_size=tokenizer.vocab_size, sequence_length=length)
    try:
        text = open_validation(settings, tokenizer, is_training=False)
    except UserError as error:
        raise UserError(f"--text {options.path}: {str(error).removeprefix('data.validation: ')}") from error
    assert text is not None  # the settings name one
    if options.tokens < length:
        raise UserError(
            f"--tokens {options.tokens} is less than a sequence of {length} tokens: raise it, or lower "
            "--sequence-length"
        )
    text = text.limited(options.tokens)
    text.count_bytes(tokenizer)  # checks the ids
    return _Text(text, tokenizer)


def _longest(config: PretrainedConfig) -> int:
    limit: int = getattr(config, family(config.model_type).position_limit)
    return min(LONGEST, limit)


class _Measured:
    """The model in bf16, whose loss and inputs are measured before its weights are replaced.

    Args:
        source: its folder.
        recipe: which layers are packed, and how inputs are rounded.
        text: for calibration and losses.
        planned: the export, with any maxima.

    Attributes:
        before: the loss with nothing rounded.
        maxima: of the inputs of the packed layers; empty if servers need none.
        after: the loss as a server computes it; None before `finish`.
        beyond: share of the rounded inputs beyond their calibrated range; None: no static scales.
    """

    def __init__(self, source: Path, recipe: Recipe, text: _Text, planned: PackedExport) -> None:
        self._text, self._is_static = text, planned.needs_input_maxima
        self.rounds_inputs, self._packed = planned.rounds_inputs, frozenset(planned.packed)
        config = open_folder(source)[1].config
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_weights(config, source, dtype=torch.bfloat16).to(self._device).eval()
        convert(self._model, recipe)
        self._layers = bit_layers(self._model)
        calibration, evaluated = text.parts(is_calibrated=self._is_static)
        self.maxima: Mapping[str, float] = {}
        if calibration:
            ranges = InputRanges(self._model)
            self._loss(calibration, is_quantized=False, ranges=ranges)
            maxima = ranges.result().maxima
            self.maxima = {name: maxima[name] for name in maxima if name in self._packed}
        self.before = self._loss(evaluated, is_quantized=False)
        self.after: TextLoss | None = None
        self.beyond: float | None = None

    def replace_weight(self, layer: PackedLayer) -> None:
        """Give a layer the weight that a server decodes."""
        with torch.no_grad():
            self._layers[layer.name].weight.copy_(layer.decoded)

    def finish(self) -> None:
        """Measure the loss with the replaced weights, which are not rounded again."""
        if self.rounds_inputs:
            for name, layer in self._layers.items():
                rounded, layer.recipe = layer.recipe.q_forward_input, switched(layer.recipe, "all")
                if name in self._packed:
                    layer.recipe = replace(layer.recipe, q_forward_input=rounded)
        if self._is_static:
            use_static_inputs(self._model, StaticInputs(maxima=self.maxima), count_beyond=True)
        _, evaluated = self._text.parts(is_calibrated=self._is_static)
        self.after = self._loss(evaluated, is_quantized=self.rounds_inputs)
        if self._is_static:
            elements, beyond = beyond_range(self._model).tolist()
            self.beyond = beyond / max(1, elements)

    def as_json(self) -> dict[str, Any]:
        """The losses, where they are from, and the range of the inputs."""
        assert self.after is not None
        calibration, evaluated = self._text.parts(is_calibrated=self._is_static)
        text, begin = self._text.text, self._text.tokenizer.begin
        return {
            "text": {
                "name": text.name,
                "sequence_length": text.sequence_length,
                "sequences": len(evaluated),
                "tokens": self.before.num_tokens,
                "calibration_sequences": len(calibration),
                "calibration_is_evaluated": bool(calibration) and calibration == evaluated,
                "calibration_begins_with": begin[1] if calibration and begin is not None else None,
            },
            "rounds_inputs": self.rounds_inputs,
            "before": _losses(self.before),
            "after": _losses(self.after),
            "input_maxima": dict(self.maxima),
            "inputs_beyond_range": self.beyond,
        }

    def describe(self) -> str:
        """The losses, in lines of text."""
        assert self.after is not None
        rounded = "weights and inputs" if self.rounds_inputs else "weights"
        lines = [
            self._text.describe(is_calibrated=self._is_static),
            f"before, in bf16: {_line(self.before)}",
            f"after, {rounded} rounded: {_line(self.after)} ({self.after.loss - self.before.loss:+.4f})",
        ]
        if self.beyond is not None:
            lines.append(f"{self.beyond:.2%} of the inputs beyond their calibrated range")
        return "\n".join(lines)

    def _loss(
        self, numbers: Sequence[int], *, is_quantized: bool, ranges: InputRanges | None = None
    ) -> TextLoss:
        """The loss on some sequences, one after the other; `ranges` records their inputs."""
        text, tokenizer = self._text
        sums, num_tokens, num_bytes = [], 0, 0
        with evaluation(self._model, numbers, is_quantized=is_quantized, keeps_weights=False):
            if ranges is not None:
                ranges.record(is_on=True)
            for number in numbers:
                batch = text.batch(number, 1)
                if ranges is not None:
                    batch = _begun(batch, tokenizer)
                sums.append(_sum_of_losses(self._model, batch, self._device))
                is_label = batch["labels"] != IGNORED_LABEL
                num_tokens += int(is_label.sum())
                ids, before = (batch[name][is_label].numpy() for name in ("labels", "input_ids"))
                num_bytes += tokenizer.count_bytes(ids, before)
        return TextLoss(nats=math.fsum(sums), num_tokens=num_tokens, num_bytes=num_bytes)


def _begun(batch: Batch, tokenizer: Tokenizer) -> Batch:
    """Sequences of the same length after the token that begins texts, if there is one; their loss is void."""
    if tokenizer.begin is None:
        return batch
    ids = batch["input_ids"]
    first = torch.full_like(ids[:, :1], tokenizer.begin[0])
    return {**batch, "input_ids": torch.cat([first, ids[:, :-1]], dim=1)}


def _sum_of_losses(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], device: torch.device) -> float:
    return float(sum_of_model_losses(model, model, upload(batch, device, model.config)))


def _losses(found: TextLoss) -> dict[str, float | None]:
    values = {name: getattr(found, name) for name in ("loss", "perplexity", "bits_per_byte")}
    return {
        name: value if value is not None and math.isfinite(value) else None for name, value in values.items()
    }


def _line(found: TextLoss) -> str:
    line = f"loss {found.loss:.4f} nats, perplexity {found.perplexity:.4g}"
    return line if found.bits_per_byte is None else f"{line}, {found.bits_per_byte:.4f} bits per byte"


class _Report:
    """Collects the figures of an export and writes them into the unfinished folder."""

    def __init__(self, source: Path, recipe: Recipe, measured: _Measured | None) -> None:
        self._measured = measured
        self._errors: list[WeightError] = []
        self.content: dict[str, Any] = {"source": str(source), "recipe": recipe.to_dict()}

    def examine(self, draft: Path, layers: Iterator[PackedLayer]) -> None:
        """See `Options.examine`."""
        measured = self._measured
        for layer in layers:
            self._errors.append(weight_error(*layer))
            if measured is not None:
                measured.replace_weight(layer)
        self.content["layers"] = [_finite(asdict(each)) for each in self._errors]
        if measured is not None:
            measured.finish()
            assert measured.after is not None
            self.content |= measured.as_json()
        (draft / REPORT_FILE).write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")

    def describe(self) -> str:
        """The worst layers and the losses, in lines of text."""
        lines = [worst_errors(self._errors, WORST)]
        if self._measured is not None:
            lines.append(self._measured.describe())
        return "\n\n".join(lines)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with null for numbers that JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
