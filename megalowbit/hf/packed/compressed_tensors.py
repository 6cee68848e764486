"""The layout of compressed-tensors 0.15 to 0.20, which transformers and vLLM read.

`weight_packed` holds the codes, `weight_scale` the block scales: E4M3 (NVFP4) or the exponents of E8M0 as
bytes (MXFP4). `weight_global_scale` of NVFP4 is a divisor: weight = value · (weight_scale /
weight_global_scale). So is `input_global_scale`, which exists only if servers round inputs to NVFP4; to MXFP4
they round them without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalowbit.hf.packed.layout import PackedLayout, element_values, times_block_scales
from megalowbit.hf.packed.recipes import PackedFormat
from megalowbit.quantize.quantized_tensor import QuantizedTensor

E8M0_BIAS = 127


class CompressedTensors(PackedLayout):
    """`nvfp4-pack-quantized` and `mxfp4-pack-quantized`."""

    name = "compressed-tensors"
    formats = ("nvfp4", "mxfp4")
    usage = (
        "Load it with\n`transformers.AutoModelForCausalLM.from_pretrained` and the package "
        "`compressed-tensors`, or with vLLM."
    )

    def tensors(self, layer: str, packed: QuantizedTensor, input_scale: Tensor | None) -> dict[str, Tensor]:
        """See `PackedLayout.tensors`."""
        is_mxfp4 = packed.scales.dtype == torch.float8_e8m0fnu
        scales = packed.scales.view(torch.uint8) if is_mxfp4 else packed.scales
        found = {f"{layer}.weight_packed": packed.codes, f"{layer}.weight_scale": scales}
        if packed.tensor_scale is not None:
            found[f"{layer}.weight_global_scale"] = packed.tensor_scale.reciprocal().reshape(1)
        if input_scale is not None:
            found[f"{layer}.input_global_scale"] = input_scale.reciprocal().reshape(1)
        return found

    def decoded(self, layer: str, read: Callable[[str], Tensor]) -> Tensor:
        """See `PackedLayout.decoded`."""
        values, scales = element_values(read(f"{layer}.weight_packed")), read(f"{layer}.weight_scale")
        if scales.dtype == torch.uint8:
            exponents = scales.to(torch.int32) - E8M0_BIAS
            return times_block_scales(values, torch.ldexp(torch.ones(exponents.shape), exponents))
        return times_block_scales(values, scales.float() / read(f"{layer}.weight_global_scale"))

    def quantization_config(self, format: PackedFormat, ignored: Sequence[str]) -> dict[str, Any]:
        """See `PackedLayout.quantization_config`."""
        is_nvfp4 = format.name == "nvfp4"
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group" if is_nvfp4 else "group",
            "group_size": format.block_size,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8",
        }
        # "local": the tensor scale is in the file, block scales come from each input
        inputs = {**weights, "dynamic": "local" if is_nvfp4 else True}
        name = f"{format.name}-pack-quantized"
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs if format.input_encoding is not None else None,
                    "output_activations": None,
                    "format": name,
                }
            },
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
