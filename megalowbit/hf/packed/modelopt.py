"""The layout of NVIDIA's ModelOpt, which vLLM, SGLang and TensorRT-LLM read; transformers does not.

`weight` holds the codes, `weight_scale` the E4M3 block scales. `weight_scale_2` is a factor: weight = value ·
(weight_scale · weight_scale_2). So is `input_scale`, which exists only if servers round inputs. The same
settings are in `hf_quant_config.json` and, in another form, in `config.json`. For MXFP4 it has no weights
alone that servers read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megalowbit.hf.packed.layout import PackedLayout, element_values, times_block_scales
from megalowbit.hf.packed.recipes import PackedFormat
from megalowbit.quantize.quantized_tensor import QuantizedTensor

QUANT_CONFIG_FILE = "hf_quant_config.json"
# servers look for the producer; the version is the one whose layout this is
PRODUCER = {"name": "modelopt", "version": "0.46.0"}


class ModelOpt(PackedLayout):
    """`NVFP4` and `W4A16_NVFP4`."""

    name = "modelopt"
    formats = ("nvfp4",)
    usage = "It is in ModelOpt's\nlayout, which vLLM, SGLang and TensorRT-LLM read."

    def tensors(self, layer: str, packed: QuantizedTensor, input_scale: Tensor | None) -> dict[str, Tensor]:
        """See `PackedLayout.tensors`."""
        assert packed.tensor_scale is not None
        found = {
            f"{layer}.weight": packed.codes,
            f"{layer}.weight_scale": packed.scales,
            f"{layer}.weight_scale_2": packed.tensor_scale,
        }
        if input_scale is not None:
            found[f"{layer}.input_scale"] = input_scale
        return found

    def decoded(self, layer: str, read: Callable[[str], Tensor]) -> Tensor:
        """See `PackedLayout.decoded`."""
        scales = read(f"{layer}.weight_scale").float() * read(f"{layer}.weight_scale_2")
        return times_block_scales(element_values(read(f"{layer}.weight")), scales)

    def quantization_config(self, format: PackedFormat, ignored: Sequence[str]) -> dict[str, Any]:
        """See `PackedLayout.quantization_config`."""
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": format.block_size}
        group: dict[str, Any] = {"weights": numbers, "targets": ["Linear"]}
        if format.input_encoding is not None:
            group["input_activations"] = numbers
        return {
            "quant_method": "modelopt",
            "quant_algo": _algorithm(format),
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "producer": PRODUCER,
        }

    def further_files(self, format: PackedFormat, ignored: Sequence[str]) -> dict[str, dict[str, Any]]:
        """`hf_quant_config.json`; vLLM requires all fields of its `quantization`."""
        quantization = {
            "quant_algo": _algorithm(format),
            "kv_cache_quant_algo": None,
            "group_size": format.block_size,
            "exclude_modules": list(ignored),
        }
        return {QUANT_CONFIG_FILE: {"producer": PRODUCER, "quantization": quantization}}


def _algorithm(format: PackedFormat) -> str:
    return "NVFP4" if format.input_encoding is not None else "W4A16_NVFP4"
