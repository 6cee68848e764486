"""Exports a low-bit model with packed weights: a Hugging Face folder that inference servers read.

The codes and scales in the folder are those that the forward of the training made from the weights, in the
dtype in which the model computed. All other tensors are written in bf16. One tensor after the other, or one
fused group after the other, is read, quantised and written, and the folder appears as a whole. Before that,
the weights are decoded from the files as their layout defines it, and compared with those of the forward.

Not covered: layers that replace transformers' `Conv1D` (GPT-2), models of which each rank holds shards,
precisions that speculation has chosen, and a late switch of precision: the recipe of the layers counts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from megalowbit.errors import UserError, unknown_name
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import num_tokens, pad_config
from megalowbit.hf.folders.config_file import config_from_dict
from megalowbit.hf.folders.new_folder import new_folder, refuse_existing
from megalowbit.hf.folders.shards import SHARD_SIZE, ShardWriter, TensorSpec
from megalowbit.hf.folders.stored_weights import (
    misshapen,
    refuse_differences,
    refuse_nonfinite_weight,
    tied_names,
)
from megalowbit.hf.folders.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megalowbit.hf.folders.tokenizer_files import copy_tokenizer
from megalowbit.hf.generation import restore_generation, save_settings, store_generation, stored_generation
from megalowbit.hf.model import SavableTokenizer, quiet_transformers, random_model, use_end_of_text
from megalowbit.hf.packed.compressed_tensors import CompressedTensors
from megalowbit.hf.packed.fused_groups import Packed, pack, pack_group
from megalowbit.hf.packed.layout import PackedLayout
from megalowbit.hf.packed.modelopt import ModelOpt
from megalowbit.hf.packed.plan import PackingPlan, plan_packing
from megalowbit.hf.packed.recipes import PRECISIONS, Precision, packed_format
from megalowbit.hf.packed.report import PackingReport, RoundedLayer
from megalowbit.hf.training_checkpoint import find_checkpoint, read_checkpoint
from megalowbit.layers.conversion.convert import convert
from megalowbit.quantize.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

LAYOUTS: dict[str, PackedLayout] = {each.name: each for each in (CompressedTensors(), ModelOpt())}
HIGH_PRECISION = torch.bfloat16
SLACK = 2.0**-22  # relative; with an fp32 tensor scale, layouts multiply in another order than the forward


def export_packed_checkpoint(
    source: Path,
    folder: Path,
    layout: str,
    *,
    precision: Precision = "w4a16",
    input_maxima: Mapping[str, float] | None = None,
    is_exact: bool = False,
    tokenizer: SavableTokenizer | None = None,
) -> PackingReport:
    """Convert a training checkpoint to a Hugging Face folder with packed weights.

    Args:
        source: a step folder, a `checkpoints/` folder or a run's folder.
        folder: a new folder.
        layout: `compressed-tensors` or `modelopt`.
        precision: `w4a16`: weights are packed; `w4a4`: servers also round inputs.
        input_maxima: largest magnitude of the input of each packed layer; for `w4a4` in NVFP4.
        is_exact: refuse the export if a value would differ from that of the training's forward.
        tokenizer: saved with the weights; `None`: the tokenizer kept in a checkpoint to start from, if any.

    Raises:
        UserError: no undamaged checkpoint in `source`; layout or servers cannot hold the model; `folder`
            exists and is not empty, or cannot be written.
    """
    _check_names(layout, precision)
    refuse_existing(folder)
    stored = read_checkpoint(source)
    packed_format(stored.recipe, precision)  # before the model, which a recipe may not convert at all
    model = random_model(config_from_dict(stored.hf_config, {}, str(source)), seed=0, device="meta")
    convert(model, stored.recipe)
    store_generation(model, stored.generation)
    kept = find_checkpoint(source).parent / TOKENIZER_FOLDER
    plan = plan_packing(model, LAYOUTS[layout], precision, input_maxima)
    weights = _Weights(model, stored.half_state_dict, str(source))
    files = kept if tokenizer is None and kept.is_dir() else None
    return _export(weights, plan, folder, precision, tokenizer, files, is_exact=is_exact)


def export_packed_model(
    model: PreTrainedModel,
    folder: Path,
    layout: str,
    *,
    precision: Precision = "w4a16",
    input_maxima: Mapping[str, float] | None = None,
    is_exact: bool = False,
    tokenizer: SavableTokenizer | None = None,
) -> PackingReport:
    """Write a converted model in memory, which does not change; otherwise as `export_packed_checkpoint`."""
    _check_names(layout, precision)
    plan = plan_packing(model, LAYOUTS[layout], precision, input_maxima)
    weights = _Weights(model, model.state_dict(), "the model")
    return _export(weights, plan, Path(folder), precision, tokenizer, None, is_exact=is_exact)


def _check_names(layout: str, precision: str) -> None:
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)


class _Weights:
    """The tensors of a model as an exported folder has them: without copies of tied ones and padding.

    Attributes:
        model: converted; gives names and shapes.
        names: of all tensors.
    """

    def __init__(self, model: PreTrainedModel, state: Mapping[str, Tensor], where: str) -> None:
        self.model, self._state, self._where = model, state, where
        expected = model.state_dict(keep_vars=True)
        refuse_differences(expected.keys() - state.keys(), state.keys() - expected.keys(), where)
        self.names = [names[0] for names in tied_names(expected)]
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


def _export(
    weights: _Weights,
    plan: PackingPlan,
    folder: Path,
    precision: Precision,
    tokenizer: SavableTokenizer | None,
    tokenizer_files: Path | None,
    *,
    is_exact: bool,
) -> PackingReport:
    """Write the folder."""
    specs = _specs(weights, plan)
    with new_folder(folder) as draft:
        with ShardWriter(draft, specs, shard_size=SHARD_SIZE) as writer:
            rounded = _write_weights(weights, plan, writer, is_exact=is_exact)
        _verify(draft, weights, plan, {each.name: each.num_rounded for each in rounded})
        _write_settings(weights.model, plan, draft, tokenizer)
        if tokenizer_files is not None:
            copy_tokenizer(tokenizer_files, draft, with_config=False)
    report = PackingReport(
        layout=plan.layout.name,
        format=plan.format.name,
        precision=precision,
        num_packed=len(plan.shapes),
        ignored=plan.ignored,
        nbytes=sum(each.nbytes for each in specs),
        rounded=tuple(rounded),
    )
    if rounded:
        logger.warning("%s", report)
    return report


def _specs(weights: _Weights, plan: PackingPlan) -> list[TensorSpec]:
    """All tensors of the folder; those of packed layers are where their weights are in the model."""
    specs: list[TensorSpec] = []
    for name in weights.names:
        layer = name.removesuffix(".weight")
        if layer not in plan.shapes or layer == name:
            specs.append(weights.spec(name))
            continue
        tensors = plan.layout.tensors(layer, _empty(plan, layer), plan.input_scales.get(layer))
        specs += [TensorSpec(each, value.dtype, tuple(value.shape)) for each, value in tensors.items()]
    return specs


def _empty(plan: PackingPlan, layer: str) -> QuantizedTensor:
    """The packed weight of a layer without its numbers."""
    with torch.device("meta"):
        return pack(plan.format.quantizer, torch.empty(plan.shapes[layer], dtype=torch.bfloat16))


def _write_weights(
    weights: _Weights, plan: PackingPlan, writer: ShardWriter, *, is_exact: bool
) -> list[RoundedLayer]:
    """Write all tensors; returns the layers with blocks that were rounded again."""
    first = {f"{group[0]}.weight": group for group in plan.groups}
    packed = {f"{layer}.weight" for layer in plan.shapes}
    rounded = []
    for name in weights.names:
        if name in first:
            group = {layer: weights.read(f"{layer}.weight") for layer in first[name]}
            made = pack_group(plan.format.quantizer, group)
            rounded += _rounded(made)
            if rounded and is_exact:
                raise UserError(
                    f"layer {rounded[0]} would have to be rounded again to have the tensor scale of the "
                    "layers that servers fuse with it: export without requiring exact values"
                )
            for layer, each in made.items():
                tensors = plan.layout.tensors(layer, each.tensor, plan.input_scales.get(layer))
                for part, value in tensors.items():
                    writer.write(part, value)
        elif name not in packed:
            writer.write(name, weights.read(name).to(HIGH_PRECISION))
    return rounded


def _rounded(made: Mapping[str, Packed]) -> list[RoundedLayer]:
    return [
        RoundedLayer(layer, each.num_rounded, each.num_blocks, each.relative_change)
        for layer, each in made.items()
        if each.num_rounded
    ]


def _verify(folder: Path, weights: _Weights, plan: PackingPlan, rounded: Mapping[str, int]) -> None:
    """Decode the files and compare with the weights of the forward; `rounded` blocks may differ."""
    with _opened(folder) as read:
        for layer in plan.shapes:
            expected = pack(plan.format.quantizer, weights.read(f"{layer}.weight"))
            values = expected.operand(torch.float32)
            if expected.operand_scale is not None:
                values = values * expected.operand_scale
            found = plan.layout.decoded(layer, read)
            allowed = 0.0 if expected.operand_scale is None else SLACK
            differs = (found - values.cpu()).abs() > allowed * values.cpu().abs()
            blocks = differs.unflatten(1, (-1, plan.format.block_size)).any(2).sum()
            if int(blocks) > rounded.get(layer, 0):
                raise RuntimeError(f"layer {layer}: {int(blocks)} blocks in the file have other values")


@contextmanager
def _opened(folder: Path) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads tensors of a folder's files by name."""
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    yield lambda name: places[name].get_tensor(name)


def _write_settings(
    model: PreTrainedModel, plan: PackingPlan, folder: Path, tokenizer: SavableTokenizer | None
) -> None:
    """Write configuration, generation settings and tokenizer."""
    config = type(model.config).from_dict(model.config.to_dict())
    pad_config(config, None)
    plain = random_model(config, seed=0, device="meta")  # for the generation settings
    restore_generation(stored_generation(model), plain)
    if tokenizer is not None:
        use_end_of_text(plain, tokenizer)
    plain.config.quantization_config = plan.layout.quantization_config(plan.format, plan.ignored)
    with quiet_transformers():
        save_settings(plain, folder, HIGH_PRECISION)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    further: dict[str, dict[str, Any]] = plan.layout.further_files(plan.format, plan.ignored)
    for name, content in further.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
