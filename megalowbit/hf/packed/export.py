"""Exports a low-bit model with packed weights: a Hugging Face folder that inference servers read.

The codes and scales in the folder are those that the recipe's forward makes of the weights, in the dtype in
which the model computed. All other tensors are written in bf16. One tensor after the other, or one
fused group after the other, is read, quantised and written, and the folder appears as a whole. Before that,
the weights are decoded from the files as their layout defines it, and compared with those of the forward.

Not covered: layers that replace transformers' `Conv1D` (GPT-2), models of which each rank holds shards,
precisions that speculation has chosen, and a late switch of precision: the recipe of the layers counts.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from safetensors import safe_open
from torch import Tensor

from megalowbit.checkpoints.shards import reading
from megalowbit.durable_files import MANIFEST, sha256_of
from megalowbit.errors import UserError, unknown_name
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import num_tokens, pad_config
from megalowbit.hf.checkpoint import open_folder
from megalowbit.hf.folders.config_file import config_from_dict
from megalowbit.hf.folders.conversion import Conversion, identity_of
from megalowbit.hf.folders.model_card import ORIGIN, model_card
from megalowbit.hf.folders.new_folder import refuse_existing
from megalowbit.hf.folders.shards import SHARD_SIZE, TensorSpec
from megalowbit.hf.folders.stored_weights import (
    misshapen,
    refuse_differences,
    refuse_nonfinite_weight,
    tied_names,
)
from megalowbit.hf.folders.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megalowbit.hf.generation import generation_to_export, restore_generation, store_generation
from megalowbit.hf.model import SavableTokenizer, random_model, write_settings
from megalowbit.hf.packed.compressed_tensors import CompressedTensors
from megalowbit.hf.packed.fused_groups import Packed, pack, pack_group
from megalowbit.hf.packed.layout import PackedLayout
from megalowbit.hf.packed.modelopt import ModelOpt
from megalowbit.hf.packed.plan import PackingPlan, plan_packing
from megalowbit.hf.packed.recipes import PRECISIONS, Precision, check_formats
from megalowbit.hf.packed.report import PackingReport, RoundedLayer, note_about_wide, notes_about_run
from megalowbit.hf.training_checkpoint import (
    TrainingCheckpoint,
    is_training_checkpoint,
    read_checkpoint,
)
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.quantize.quantized_tensor import QuantizedTensor
from megalowbit.values import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

LAYOUTS: dict[str, PackedLayout] = {each.name: each for each in (CompressedTensors(), ModelOpt())}
HIGH_PRECISION = torch.bfloat16
LOST = 0.5  # a change of the weight's norm above which a packed layer is of no use
SLACK = 2.0**-22  # relative; with an fp32 tensor scale, layouts multiply in another order than the forward


class Options(TypedDict, total=False):
    """Options of a packed export.

    Attributes:
        precision: `w4a16` (the default): weights are packed; `w4a4`: servers also round inputs.
        input_maxima: largest magnitude of the input of each packed layer; for `w4a4` in NVFP4. Default: those
            that the run has recorded, see `layers.conversion.static_inputs`.
        is_exact: refuse the export if a weight would differ from that of the recipe's forward, or if a tensor
            that is not packed would be rounded to bf16.
        tokenizer: saved with the weights; default: the tokenizer kept in a checkpoint to start from, if any.
        shard_size: limit of the bytes of tensors in a file.
        examine: called with the unfinished folder and its packed layers before it appears; may add files.
    """

    precision: Precision
    input_maxima: Mapping[str, float] | None
    is_exact: bool
    tokenizer: SavableTokenizer | None
    shard_size: int
    examine: Callable[[Path, Iterator[PackedLayer]], None]


class PackedLayer(NamedTuple):
    """A layer as it was given and as a server decodes it.

    Attributes:
        name: its name.
        weight: (out_features, in_features), as given.
        decoded: the same from the files, fp32.
    """

    name: str
    weight: Tensor
    decoded: Tensor


def export_packed_checkpoint(
    source: Path, folder: Path, layout: str, **options: Unpack[Options]
) -> PackingReport:
    """Convert a training checkpoint to a Hugging Face folder with packed weights.

    Args:
        source: a step folder, a `checkpoints/` folder or a run's folder.
        folder: a new folder.
        layout: `compressed-tensors` or `modelopt`.
        options: see `Options`.

    Raises:
        UserError: see `plan_packed_export` and `PackedExport.run`.
    """
    refuse_existing(folder)  # first, because verifying a large checkpoint takes minutes
    return _warned(plan_packed_export(source, layout, **options).run(folder))


def export_packed_model(
    model: PreTrainedModel, folder: Path, layout: str, **options: Unpack[Options]
) -> PackingReport:
    """Write a converted model in memory, which does not change; otherwise as `export_packed_checkpoint`."""
    precision = _checked(layout, options)
    plan = plan_packing(model, LAYOUTS[layout], precision, options.get("input_maxima"))
    weights = _Weights(model, model.state_dict(keep_vars=True), "the model")
    key = {"source": uuid.uuid4().hex}  # a later attempt may have other weights, and must not continue
    return _warned(PackedExport(weights, plan, Path(folder), options, key).run(Path(folder)))


def _warned(report: PackingReport) -> PackingReport:
    """The report, which is logged if it has warnings: callers in Python may not print it."""
    if report.rounded or report.notes:
        logger.warning("%s", report)
    return report


def plan_packed_export(source: Path, layout: str, **options: Unpack[Options]) -> PackedExport:
    """The export of a training checkpoint; nothing is written yet.

    For the arguments see `export_packed_checkpoint`.

    Raises:
        UserError: no undamaged checkpoint in `source`; layout or servers cannot hold the model.
    """
    precision = _checked(layout, options)
    stored = read_checkpoint(source)
    step = stored.folder
    check_formats(stored.recipe, precision)  # before the model, which a recipe may not convert at all
    with reading(f"checkpoint {step}"):
        config = config_from_dict(stored.hf_config, {}, str(source))
        model = random_model(config, seed=0, device="meta", where=str(source))
        convert(model, stored.recipe)
        store_generation(model, stored.generation)
    maxima = options.get("input_maxima")
    if maxima is None and stored.static_inputs is not None:
        maxima = stored.static_inputs.maxima
    plan = plan_packing(model, LAYOUTS[layout], precision, maxima)
    weights = _Weights(model, stored.half_state_dict, str(source))
    return PackedExport(weights, plan, step, options, {"source": sha256_of(step / MANIFEST)}, stored)


def plan_packed_folder(
    source: Path, recipe: Recipe | str, layout: str, **options: Unpack[Options]
) -> PackedExport:
    """The export of an ordinary Hugging Face folder, with its weights rounded; nothing is written yet.

    Args:
        source: `config.json` and weights of a model of a known family.
        recipe: says which layers are packed and how they are rounded.
        layout: see `export_packed_checkpoint`.
        options: see `Options`.

    Raises:
        UserError: see `plan_import`; layout or servers cannot hold the model.
    """
    precision = _checked(layout, options)
    chosen = recipe_of(recipe)
    check_formats(chosen, precision)  # before the folder, whose weights may be many
    if is_training_checkpoint(source):
        raise UserError(f"{source} is a training checkpoint: use megalowbit convert to-hf with --packed")
    config_file, model, weights = open_folder(source)
    convert(model, chosen)
    plan = plan_packing(model, LAYOUTS[layout], precision, options.get("input_maxima"))
    key = {"source": identity_of([config_file, *weights.paths], source)}
    return PackedExport(_Weights(model, weights, str(source)), plan, source, options, key)


def _checked(layout: str, options: Options) -> Precision:
    precision = options.get("precision", "w4a16")
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    return precision


class _Weights:
    """The tensors of a model as an exported folder has them: without copies of tied ones and padding.

    Attributes:
        model: converted; gives names and shapes.
        names: of all tensors.
    """

    def __init__(self, model: PreTrainedModel, state: Mapping[str, Tensor], where: str) -> None:
        self.model, self._state, self._where = model, state, where
        expected = model.state_dict(keep_vars=True)
        self.names = [names[0] for names in tied_names(expected)]  # folders hold no others
        refuse_differences(set(self.names) - state.keys(), state.keys() - expected.keys(), where)
        self._shapes = {name: tuple(value.shape) for name, value in expected.items()}
        self._num_tokens = num_tokens(model.config)
        names = family(model.config.model_type)
        self._padded = {f"{names.tokens}.weight", f"{names.head}.weight"}

    def spec(self, name: str) -> TensorSpec:
        """The tensor in high precision."""
        shape = self._shapes[name]
        return TensorSpec(
            name, HIGH_PRECISION, (self._num_tokens, *shape[1:]) if name in self._padded else shape
        )

    def read(self, name: str) -> Tensor:
        """The tensor in the dtype in which the model computed.

        Raises:
            UserError: it is not finite, or has another shape than the model's.
        """
        tensor = self._state[name].detach()
        if tuple(tensor.shape) != self._shapes[name]:
            raise misshapen(self._where, name, tensor.shape, self._shapes[name])
        refuse_nonfinite_weight(name, tensor, self._where)
        return tensor[: self._num_tokens] if name in self._padded else tensor


class PackedExport:
    """A packed export, described before anything is written.

    Args:
        weights: of the converted model.
        plan: what is packed.
        source: where the weights are from, for messages.
        options: see `Options`.
        key: identity of the weights, see `Conversion`.
        stored: the checkpoint, if they are from one.

    Attributes:
        conversion: writes the folder.
        report: what was written; None before.

    Raises:
        UserError: with `is_exact`, layers of 8 bits would be in bf16.
    """

    def __init__(
        self,
        weights: _Weights,
        plan: PackingPlan,
        source: Path,
        options: Options,
        key: Mapping[str, Any],
        stored: TrainingCheckpoint | None = None,
    ) -> None:
        self._weights, self._plan, self._stored = weights, plan, stored
        self._tokenizer, self._examine = options.get("tokenizer"), options.get("examine")
        self._is_exact = options.get("is_exact", False)
        if self._is_exact and plan.wide:
            raise UserError(
                f"layer {plan.wide[0]} has 8-bit weights in the forward, and they would be in bf16: export "
                "without requiring exact values, or train with a recipe without 8-bit layers, such as nvfp4"
            )
        self._groups = {layer: group for group in plan.groups for layer in group}
        self._layers: dict[str, str] = {}  # tensor → the packed layer that it is a part of
        self._made: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})  # the last group, and its tensors
        self.report: PackingReport | None = None
        self._settings = plan.layout.quantization_config(plan.format, plan.ignored)
        scales = {name: float(scale) for name, scale in plan.input_scales.items()}
        self.conversion = Conversion(
            source=source,
            tensors=tuple(self._specs()),
            read=self._read,
            read_dtype=torch.float64,  # several weights of a group, and one in fp32
            finish=self._finish,
            key={
                **key,
                "packed": self._settings,
                "quantizer": plan.format.quantizer.name,
                "input_scales": scales,
                "exact": self._is_exact,
            },
            shard_size=options.get("shard_size", SHARD_SIZE),
        )

    @property
    def packed(self) -> tuple[str, ...]:
        """Names of the packed layers."""
        return tuple(self._plan.shapes)

    @property
    def rounds_inputs(self) -> bool:
        """Whether servers round the inputs of packed layers."""
        return self._plan.format.input_encoding is not None

    @property
    def needs_input_maxima(self) -> bool:
        """Whether the files hold scales of inputs."""
        return bool(self._plan.input_scales)

    def describe(self, folder: Path) -> str:
        """What `run` would write, in lines of text."""
        plan = self._plan
        kept = f"; {counted(len(plan.ignored), 'linear layer')} in bf16" if plan.ignored else ""
        return (
            f"{self.conversion.describe(folder)}\n"
            f"{counted(len(plan.shapes), 'layer')} as {plan.format.name.upper()} ({plan.layout.name}){kept}"
            + "".join(f"\n{note}" for note in note_about_wide(plan.wide))
        )

    def run(self, folder: Path) -> PackingReport:
        """Write `folder`, completely or not at all.

        Raises:
            UserError: see `Conversion.run`; with `is_exact`, a block would have to be rounded again, or a
                tensor that is not packed to be rounded to bf16.
        """
        self.conversion.run(folder)
        assert self.report is not None  # made by `_finish`
        return self.report

    def _specs(self) -> Iterator[TensorSpec]:
        """All tensors; those of a packed layer are where its weight is in the model."""
        for name in self._weights.names:
            layer = name.removesuffix(".weight")
            if layer == name or layer not in self._groups:
                yield self._weights.spec(name)
                continue
            with torch.device("meta"):
                empty = pack(self._plan.format.quantizer, torch.empty(self._plan.shapes[layer]))
            for part, value in self._parts(layer, empty).items():
                self._layers[part] = layer
                yield TensorSpec(part, value.dtype, tuple(value.shape))

    def _parts(self, layer: str, packed: QuantizedTensor) -> dict[str, Tensor]:
        return self._plan.layout.tensors(layer, packed, self._plan.input_scales.get(layer))

    def _pack(self, group: tuple[str, ...]) -> dict[str, Packed]:
        weights = {layer: self._weights.read(f"{layer}.weight") for layer in group}
        packed = pack_group(self._plan.format.quantizer, weights)
        rounded = _rounded(packed)
        if self._is_exact and rounded:
            raise UserError(
                f"{counted(rounded[0].num_rounded, 'block')} of layer {rounded[0].name} would have to be "
                "rounded again to have the tensor scale of the layers that servers fuse with it: export "
                "without requiring exact values"
            )
        lost = next((each for each in rounded if each.relative_change > LOST), None)
        if lost is not None:
            raise UserError(
                f"layer {lost.name} would lose {lost.relative_change:.0%} of its norm: servers give it the "
                "tensor scale of layers whose weights are much larger; keep all of them in high precision "
                "(the recipe's keep)"
            )
        return packed

    def _read(self, name: str) -> Tensor:
        """A tensor as it is written; those of a group are made together and kept until the next group."""
        layer = self._layers.get(name)
        if layer is None:
            return self._in_high_precision(name)
        group = self._groups[layer]
        if self._made[0] != group:
            self._made = (), {}  # free the last group before the next is made
            parts: dict[str, Tensor] = {}
            for each, packed in self._pack(group).items():
                parts |= self._parts(each, packed.tensor)
            self._made = group, parts
        return self._made[1][name]

    def _in_high_precision(self, name: str) -> Tensor:
        tensor = self._weights.read(name)
        written = tensor.to(HIGH_PRECISION)
        if self._is_exact and not torch.equal(written.to(tensor.dtype), tensor):
            raise UserError(
                f"{name} in {tensor.dtype} would be rounded to {HIGH_PRECISION}: export without requiring "
                "exact values"
            )
        return written

    def _finish(self, draft: Path, _: Any) -> None:
        """Check the files of weights, and write the others."""
        self._made = (), {}
        plan, stored = self._plan, self._stored
        self.report = PackingReport(
            layout=plan.layout.name,
            format=plan.format.name,
            precision="w4a16" if plan.format.input_encoding is None else "w4a4",
            num_packed=len(plan.shapes),
            ignored=plan.ignored,
            nbytes=self.conversion.nbytes,
            rounded=tuple(self._compare(draft)),
            notes=(
                *note_about_wide(plan.wide),
                *(() if stored is None else notes_about_run(stored.header, has_one_format=not plan.wide)),
            ),
        )
        self._write_settings(draft, self._card(self.report))
        if self._examine is not None:
            self._examine(draft, self._packed_layers(draft))

    def _card(self, report: PackingReport) -> str:
        """The model card; of weights that are not from a checkpoint, it has only what the model tells."""
        plan, model = self._plan, self._weights.model
        header: Mapping[str, Any] = {"megalowbit": {"hf_config": model.config.to_dict()}}
        origin = "whose weights megalowbit has rounded without training it"
        if self._stored is not None:
            header, origin = self._stored.header, ORIGIN
        dtype = f"{report.format} ({report.precision}, {report.layout}), others bfloat16"
        stored = self._stored
        recipe = bit_layers(model)[plan.groups[0][0]].recipe.name if stored is None else stored.recipe.name
        usage, notes = plan.layout.usage, report.notes
        return model_card(header, recipe, dtype=dtype, usage=usage, origin=origin, notes=notes)

    def _packed_layers(self, draft: Path) -> Iterator[PackedLayer]:
        with _opened(draft) as read:
            for name in self.packed:
                weight = self._weights.read(f"{name}.weight")
                yield PackedLayer(name, weight, self._plan.layout.decoded(name, read))

    def _compare(self, draft: Path) -> Iterator[RoundedLayer]:
        """Decode the files and compare with the weights of the forward; yields layers rounded again."""
        with _opened(draft) as read:
            for group in self._plan.groups:
                rounded = {each.name: each for each in _rounded(self._pack(group))}
                for layer in group:
                    allowed = rounded[layer].num_rounded if layer in rounded else 0
                    differing = self._differing_blocks(layer, self._plan.layout.decoded(layer, read))
                    if differing > allowed:
                        raise RuntimeError(f"layer {layer}: {differing} blocks in the file have other values")
                yield from rounded.values()

    def _differing_blocks(self, layer: str, found: Tensor) -> int:
        """The number of blocks in which `found` is not the weight of the forward."""
        packed = pack(self._plan.format.quantizer, self._weights.read(f"{layer}.weight"))
        expected, slack = packed.operand(torch.float32), 0.0
        if packed.operand_scale is not None:
            expected, slack = expected * packed.operand_scale, SLACK
        expected = expected.cpu()
        differs = (found - expected).abs() > slack * expected.abs()
        return int(differs.unflatten(1, (-1, self._plan.format.block_size)).any(2).sum())

    def _write_settings(self, draft: Path, card: str) -> None:
        """Write configuration, generation settings, tokenizer, model card and the layout's own files."""
        model, plan, source = self._weights.model, self._plan, self.conversion.source
        config = type(model.config).from_dict(model.config.to_dict())
        pad_config(config, None)
        plain = random_model(config, seed=0, device="meta")  # for the generation settings
        restore_generation(generation_to_export(model), plain)
        plain.config.quantization_config = self._settings
        write_settings(
            plain,
            draft,
            dtype=HIGH_PRECISION,
            tokenizer=self._tokenizer,
            tokenizer_files=source if self._stored is None else source.parent / TOKENIZER_FOLDER,
            card=card,
        )
        for name, content in plan.layout.further_files(plan.format, plan.ignored).items():
            (draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _rounded(made: Mapping[str, Packed]) -> list[RoundedLayer]:
    return [
        RoundedLayer(layer, each.num_rounded, each.num_blocks, each.relative_change)
        for layer, each in made.items()
        if each.num_rounded
    ]


@contextmanager
def _opened(folder: Path) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads tensors of a folder's files by name."""
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    yield lambda name: places[name].get_tensor(name)
