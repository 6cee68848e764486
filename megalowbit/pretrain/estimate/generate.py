"""`megalowbit generate`: text from a run, a checkpoint or a Hugging Face folder.

The model runs as `megalowbit evaluate` runs it: with the run's precision and recipe, and the range of inputs
if it was recorded. After a late switch the forward rounds nothing, unless `forward` is "recipe". It is a
plain model in one process, without DeepSpeed and without the optimizer's state, so it needs the memory of the
weights in fp32. Everything is read from the checkpoint; the run's folder adds only the tokenizer.

Not covered: precisions that speculation chose for single layers, and weights that are split into parameters,
which are joined. A line says so.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalowbit.config.engine_settings import EngineSettings
from megalowbit.data.settings import BYTE_TOKENIZER
from megalowbit.data.tokenize import ByteTokenizer, FolderTokenizer
from megalowbit.errors import UserError, shown
from megalowbit.families.vocabulary import num_tokens
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.folders.tokenizer_files import FOLDER, has_tokenizer
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.training_checkpoint import (
    OUR_KEY,
    is_training_checkpoint,
    read_checkpoint,
)
from megalowbit.json_text import read_json_object
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.evaluation import evaluation
from megalowbit.layers.conversion.precision_switch import switch_precision
from megalowbit.layers.conversion.static_inputs import StaticInputs, needs_static_inputs, use_static_inputs
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.optim.precision.autocast import attach_autocast
from megalowbit.optim.precision.fp32_modules import is_kept_fp32, keep_fp32
from megalowbit.pretrain.checks import check_kernels, this_device
from megalowbit.pretrain.components.late_switch import AS_RECIPE, AS_STORED, LateSwitchSettings
from megalowbit.pretrain.resume import parses_special_tokens
from megalowbit.pretrain.run_folder.folder import RunFolder, exported_step, run_folder_of
from megalowbit.values import BLOCK

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Weights and what was recorded with them.

    Attributes:
        path: of the weights: a step's folder or a Hugging Face folder.
        block: the `"megalowbit"` block of the run's configuration; empty: there is none.
        recipe: that the layers were trained with; None: unknown.
        step: of the checkpoint or of the run's export; None: unknown.
        static: the recorded range of the layers' inputs.
        tokenizers: folders that may have the tokenizer, the best first.
    """

    path: Path
    block: Mapping[str, Any]
    recipe: Recipe | None
    step: int | None = None
    static: StaticInputs | None = None
    tokenizers: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A model and its tokenizer, ready to write.

    Attributes:
        model: on its device, in evaluation mode.
        tokenizer: gives ids and takes them back.
        lines: what a person should know about how the model runs.
        is_parsing_known: whether the training says what text is that spells a special token.
    """

    model: PreTrainedModel
    tokenizer: FolderTokenizer
    lines: tuple[str, ...]
    is_parsing_known: bool = True

    def write(self, prompt: str, *, max_tokens: int, temperature: float, seed: int) -> tuple[str, int]:
        """Continue a prompt.

        Args:
            prompt: the text to continue; it may be empty.
            max_tokens: most tokens to add; fewer if the text ends or the model has no more positions.
            temperature: of the softmax; 0: always the most probable token.
            seed: of the random numbers.

        Returns:
            The new text without the prompt, and its number of tokens.

        Raises:
            UserError: the prompt leaves no position for a token.
        """
        if not self.is_parsing_known and (spelled := self.tokenizer.special_tokens_in(prompt)):
            logger.warning(
                "the prompt spells the special token %r, which is read as text: --parse-special-tokens makes "
                "the token of it",
                spelled[0],
            )
        [encoded] = self.tokenizer.encode_batch([prompt])
        end = self.tokenizer.eos_token_id
        ids = [int(number) for number in encoded] or [end]  # as documents begin
        room = int(self.model.config.max_position_embeddings) - len(ids)
        if room < 1:
            raise UserError(
                f"the prompt has {len(ids)} tokens, and the model {room + len(ids)} positions: shorten it"
            )
        input = torch.tensor([ids], device=self.model.device)
        torch.manual_seed(seed)
        chosen: dict[str, Any] = {"do_sample": False}
        if temperature:
            chosen = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with evaluation(self.model, itertools.count()):
            output: Tensor = self.model.generate(
                input,
                attention_mask=torch.ones_like(input),
                max_new_tokens=min(max_tokens, room),
                pad_token_id=end,
                # rows of the vocabulary that no text has: padding, or a tokenizer with fewer ids
                suppress_tokens=list(range(self.tokenizer.vocab_size, self.model.config.vocab_size)) or None,
                use_cache=True,
                **chosen,
            )
        new = output[0, len(ids) :].tolist()
        return self.tokenizer.decode_after(ids, new), len(new)


def generator_of(
    path: Path,
    *,
    recipe: str | None = None,
    tokenizer: str | None = None,
    forward: str = AS_STORED,
    parse_special_tokens: bool | None = None,
) -> Generator:
    """Read the weights in `path` and make them run as they were trained.

    Args:
        path: a run folder, a checkpoint or a Hugging Face folder.
        recipe: another recipe than the recorded one.
        tokenizer: "byte" or a folder; None: the one that was saved with the weights.
        forward: "checkpoint", or "recipe": round as the recipe says, also after a late switch.
        parse_special_tokens: whether a prompt that spells a special token has that token; None: as in the
            run's training, and if there is no run, it is text.

    Raises:
        UserError: weights, recipe or tokenizer cannot be used here.
    """
    from transformers import GenerationConfig

    origin = _training_checkpoint(path) if is_training_checkpoint(path) else _hf_folder(path)
    parses = parse_special_tokens
    if parses is None and origin.block:
        parses = parses_special_tokens({BLOCK: origin.block})
    writer = _tokenizer(origin, tokenizer, parses=bool(parses))
    model = build_model(ModelSettings(checkpoint=origin.path), seed=0)
    if writer.vocab_size > (size := num_tokens(model.config)):
        raise UserError(
            f"tokenizer {writer.name} has {writer.vocab_size:,} ids, and the model in {origin.path} has "
            f"{size:,}: name its own with --tokenizer"
        )
    used = origin.recipe if recipe is None else recipe_of(recipe)
    settings = EngineSettings.model_validate(
        {key: value for key, value in origin.block.items() if key in EngineSettings.model_fields}
    )
    precision = settings.precision if origin.block else _stored_precision(model)
    lines = [f"model     {origin.path}, {precision}"]
    if used is not None and used.quantizes:
        check_kernels(used)
        convert(model, used, seed=0)
    _cast(model, precision, settings)
    lines.append(f"recipe    {'none, nothing is rounded: --recipe names one' if used is None else used.name}")
    lines += _set_forward(model, origin, forward if recipe is None else AS_RECIPE)
    ends = _ends(model.generation_config, writer)
    model.generation_config = GenerationConfig(eos_token_id=ends)  # the folder's may ask for beams
    model.to(this_device()).eval()
    return Generator(model=model, tokenizer=writer, lines=tuple(lines), is_parsing_known=parses is not None)


def _ends(settings: GenerationConfig | None, tokenizer: FolderTokenizer) -> list[int]:
    """The ids that end a text: the tokenizer's, and others that the folder's settings add to it."""
    listed = settings.eos_token_id if settings is not None else None
    own = tokenizer.eos_token_id
    return listed if isinstance(listed, list) and own in listed else [own]


def _training_checkpoint(path: Path) -> Origin:
    stored = read_checkpoint(path)
    step = stored.folder
    ours = stored.header[OUR_KEY]
    block = (ours.get("config") or {}).get(BLOCK, {})
    places = (step.parent / FOLDER, step.parent.parent / FOLDER)
    number = ours.get("step")
    return Origin(
        path=step,
        block=block,
        recipe=stored.recipe,
        step=number if stored.header.get("progress") is not None else None,
        static=stored.static_inputs,
        tokenizers=places,
    )


def _hf_folder(path: Path) -> Origin:
    """A Hugging Face folder; if it is that of a run, with the run's recipe and precision."""
    block: Mapping[str, Any] = {}
    if (run := run_folder_of(path)) is not None:
        block = read_json_object(RunFolder(run).config).get(BLOCK) or {}
    recipe = recipe_of(block["recipe"]) if block.get("recipe") is not None else None
    tokenizers = (path, path.parent / FOLDER)
    return Origin(path=path, block=block, recipe=recipe, step=exported_step(path), tokenizers=tokenizers)


def _tokenizer(origin: Origin, name: str | None, *, parses: bool) -> FolderTokenizer:
    if name is None:
        name = next((str(folder) for folder in origin.tokenizers if has_tokenizer(folder)), None)
    if name is None:
        name = (origin.block.get("data") or {}).get("tokenizer")
    if name == BYTE_TOKENIZER:
        with TemporaryDirectory() as folder:
            ByteTokenizer().save_pretrained(folder)
            return FolderTokenizer(Path(folder), parse_special_tokens=parses)
    if name is None or not Path(name).is_dir():
        what = "" if name is None else f", and {shown(name)} is no folder"
        raise UserError(f'{origin.path} has no tokenizer{what}: name "byte" or a folder with --tokenizer')
    return FolderTokenizer(Path(name), parse_special_tokens=parses)


def _stored_precision(model: PreTrainedModel) -> str:
    """That of the weights' files; bf16 if they do not say."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(model.config.dtype, "bf16")


def _cast(model: PreTrainedModel, precision: str, settings: EngineSettings) -> None:
    """Give the parameters the dtypes that they have in training."""
    if settings.fp32_norms:
        keep_fp32(model)
    for parameter in model.parameters():
        if not is_kept_fp32(parameter):
            parameter.data = parameter.data.to(DTYPES[precision])
    if settings.autocast.enabled:
        attach_autocast(model, precision, this_device().type, settings.autocast.op_classes())


def _set_forward(model: PreTrainedModel, origin: Origin, forward: str) -> list[str]:
    """Apply a late switch and recorded inputs; lines about what differs from the run."""
    lines = []
    layers = bit_layers(model).values()
    if layers and _is_switched(origin) and forward == AS_STORED:
        switch_precision(model, LateSwitchSettings.model_validate(origin.block["late_switch"]).scope)
        return ["forward   rounds nothing, as the run since its late switch; --forward recipe rounds"]
    if any(needs_static_inputs(layer.recipe) for layer in layers):
        lines.append(f"inputs    {_use_inputs(model, origin.static)}")
    if origin.block.get("speculation") is not None:
        lines.append("forward   as the recipe rounds: precisions chosen by speculation are not used")
    if origin.recipe is not None and origin.recipe.parameter_split is not None:
        lines.append("forward   with the split weights joined")
    return lines


def _use_inputs(model: PreTrainedModel, static: StaticInputs | None) -> str:
    """Make the layers use the recorded range of their inputs, if they can; says whether they do."""
    reason = "their range was not recorded there"
    if static is not None:
        try:
            use_static_inputs(model, static)
        except UserError as error:
            use_static_inputs(model, None)
            reason = str(error)
        else:
            return "static: quantised by numbers recorded at the end of training"
    return f"dynamic: quantised by the numbers of each batch; {reason}"


def _is_switched(origin: Origin) -> bool:
    """Whether the weights were saved after the run's late switch."""
    settings = origin.block.get("late_switch")
    if settings is None or origin.step is None:
        return False
    return origin.step > LateSwitchSettings.model_validate(settings).step(origin.block["run"]["steps"])
