"""The package itself reads what is written: its formula, its codes, its configuration, its loader."""

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from megalowbit.hf.packed.compressed_tensors import CompressedTensors
from megalowbit.hf.packed.fused_groups import pack, pack_group
from megalowbit.hf.packed.recipes import packed_format
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer

LAYOUT = CompressedTensors()
CASES = [  # recipe, compressor, preset without and with rounded inputs
    ("nvfp4", NVFP4PackedCompressor, "NVFP4A16", "NVFP4"),
    ("nvidia-nvfp4", NVFP4PackedCompressor, "NVFP4A16", "NVFP4"),
    ("four-over-six", NVFP4PackedCompressor, "NVFP4A16", None),
    ("mxfp4", MXFP4PackedCompressor, "MXFP4A16", "MXFP4"),
]


def weight_of(seed, rows=24, columns=96):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, columns // 32, generator=generator).exp().repeat_interleave(32, 1)
    return (torch.randn(rows, columns, generator=generator) * spread).bfloat16()


@pytest.mark.parametrize(("name", "compressor", "preset", "_"), CASES)
def test_its_decompression_gives_the_weights_of_the_forward(name, compressor, preset, _):
    scheme = preset_name_to_scheme(preset, ["Linear"])
    format = packed_format(recipe(name), "w4a16")
    weights = {"q": weight_of(0), "k": weight_of(1) * 0.1}
    for layer, packed in pack_group(format.quantizer, weights).items():
        written = LAYOUT.tensors(layer, packed.tensor, None)
        state = {key.removeprefix(f"{layer}."): value for key, value in written.items()}
        assert {*state} == {*compressor.compression_param_names(scheme)}
        expected = format.quantizer(weights[layer])
        decompressed = compressor.decompress(state, scheme)["weight"]
        assert decompressed.dtype == torch.bfloat16
        assert decompressed.equal(expected)
        assert LAYOUT.decoded(layer, written.__getitem__).equal(expected.float())


@pytest.mark.parametrize(("name", "compressor", "preset", "_"), CASES)
def test_its_compression_of_these_weights_gives_the_same_codes_and_scales(name, compressor, preset, _):
    scheme = preset_name_to_scheme(preset, ["Linear"])
    packed = pack(packed_format(recipe(name), "w4a16").quantizer, weight_of(2))
    written = LAYOUT.tensors("layer", packed, None)
    state = {"weight": packed.dequantize().float(), "weight_scale": packed.scales.float()}
    if packed.tensor_scale is not None:
        state["weight_global_scale"] = written["layer.weight_global_scale"]
    theirs = compressor.compress(state, scheme)
    ours = written["layer.weight_packed"]
    for shift in (0, 4):  # both codes of a byte; the package drops the sign of zeros
        own, other = ours >> shift & 15, theirs["weight_packed"] >> shift & 15
        assert torch.where(own == 8, 0, own).equal(torch.where(other == 8, 0, other))
    for key, value in theirs.items():
        if key not in ("weight", "weight_packed"):
            assert value.dtype == written[f"layer.{key}"].dtype
            assert value.view(torch.uint8).equal(written[f"layer.{key}"].view(torch.uint8))


@pytest.mark.parametrize(("name", "_", "weights_only", "with_inputs"), CASES)
def test_the_configuration_means_its_own_presets(name, _, weights_only, with_inputs):
    for precision, preset in (("w4a16", weights_only), ("w4a4", with_inputs)):
        if preset is None:
            continue
        format = packed_format(recipe(name), precision)
        config = QuantizationConfig.model_validate(LAYOUT.quantization_config(format, ["lm_head", "a.b"]))
        assert config.ignore == ["lm_head", "a.b"]
        assert config.quantization_status == "compressed"
        (scheme,) = config.config_groups.values()
        expected = preset_name_to_scheme(preset, ["Linear"])
        assert scheme.format == config.format == f"{format.name}-pack-quantized"
        for field in ("weights", "input_activations", "output_activations"):
            ours, theirs = (
                None if each is None else {**each.model_dump(), "observer": None, "zp_dtype": None}
                for each in (getattr(scheme, field), getattr(expected, field))
            )
            assert ours == theirs


def test_the_extremes_of_scales_are_decoded():
    """Block scales from the smallest subnormal number to the largest, and exponents of MXFP4."""
    rows = torch.exp2(torch.linspace(-17, 0, 256)).unsqueeze(1) * torch.linspace(-6, 6, 32)
    for name, compressor, preset in (
        ("nvfp4e2m1bnosr", NVFP4PackedCompressor, "NVFP4A16"),
        ("mxfp4e2m1bnosr", MXFP4PackedCompressor, "MXFP4A16"),
    ):
        weight = torch.cat([rows, rows * 2.0**-90, torch.zeros(1, 32)]).bfloat16()
        packed = pack(quantizer(name), weight)
        state = {key.removeprefix("l."): value for key, value in LAYOUT.tensors("l", packed, None).items()}
        decompressed = compressor.decompress(state, preset_name_to_scheme(preset, ["Linear"]))["weight"]
        assert decompressed.equal(quantizer(name)(weight))
