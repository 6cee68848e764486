"""megalowbit pretrains language models in FP4 with DeepSpeed.

The names below are the public API. Each is imported on first use: `import megalowbit` is fast and imports
neither deepspeed nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalowbit.engine.checkpoints.store import CheckpointStore
    from megalowbit.engine.initialize import initialize
    from megalowbit.engine.parameters.split import split_weights
    from megalowbit.engine.pipeline.setup import pipeline_module
    from megalowbit.errors import UserError
    from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
    from megalowbit.hf.trainer_callback import MegalowbitCallback
    from megalowbit.layers.bitlinear import BitLinear
    from megalowbit.layers.conversion.convert import (
        bit_layers,
        cache_weights,
        convert,
        product_counts,
        random_stream,
        restore,
        set_observer,
    )
    from megalowbit.layers.conversion.other_loops import check_training
    from megalowbit.layers.conversion.precision_switch import switch_precision
    from megalowbit.layers.conversion.static_inputs import StaticInputs, record_inputs, use_static_inputs
    from megalowbit.layers.recipe import Recipe, recipe, recipes
    from megalowbit.layers.regularizer import DualRangeRegularizer
    from megalowbit.layers.settings import RegularizerSettings
    from megalowbit.optim.instruments import Instruments
    from megalowbit.optim.local_ddp import LocalDDP
    from megalowbit.optim.loss_scale.base import MegatronGradScaler
    from megalowbit.optim.loss_scale.constant import ConstantGradScaler
    from megalowbit.optim.loss_scale.controller import ControllerGradScaler
    from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
    from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
    from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
    from megalowbit.optim.loss_scale.norm_ratio import NormRatioGradScaler
    from megalowbit.optim.optimizers.base import MegatronOptimizer
    from megalowbit.optim.optimizers.chained import ChainedOptimizer
    from megalowbit.optim.optimizers.megatron import OptimizerConfig, get_megatron_optimizer
    from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
    from megalowbit.optim.optimizers.trainer import trainer_optimizers
    from megalowbit.optim.precision.autocast import attach_autocast, autocast
    from megalowbit.optim.precision.fp32_modules import keep_fp32
    from megalowbit.optim.precision.op_classes import OpClasses
    from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings
    from megalowbit.quantize.names import quantizer, quantizer_names
    from megalowbit.quantize.packed_file import load_quantized, save_quantized
    from megalowbit.speculation.controller import PrecisionController
    from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker

__version__ = "0.1.0"

# name → module below megalowbit that defines it
_MODULES = {
    "BitLinear": "layers.bitlinear",
    "ChainedOptimizer": "optim.optimizers.chained",
    "CheckpointStore": "engine.checkpoints.store",
    "ConstantGradScaler": "optim.loss_scale.constant",
    "ControllerGradScaler": "optim.loss_scale.controller",
    "DualRangeRegularizer": "layers.regularizer",
    "DynamicGradScaler": "optim.loss_scale.dynamic",
    "FP32Optimizer": "optim.optimizers.mixed_precision",
    "Float16OptimizerWithFloat16Params": "optim.optimizers.mixed_precision",
    "GradientOverflowTracker": "telemetry.overflow.tracker",
    "Instruments": "optim.instruments",
    "LayerScalingSettings": "optim.statistics.layer_scaling_settings",
    "LocalDDP": "optim.local_ddp",
    "MaxNormGradScaler": "optim.loss_scale.max_norm",
    "MaxValueGradScaler": "optim.loss_scale.max_value",
    "MegalowbitCallback": "hf.trainer_callback",
    "MegatronGradScaler": "optim.loss_scale.base",
    "MegatronOptimizer": "optim.optimizers.base",
    "NormRatioGradScaler": "optim.loss_scale.norm_ratio",
    "OpClasses": "optim.precision.op_classes",
    "OptimizerConfig": "optim.optimizers.megatron",
    "PrecisionController": "speculation.controller",
    "Recipe": "layers.recipe",
    "RegularizerSettings": "layers.settings",
    "StaticInputs": "layers.conversion.static_inputs",
    "UserError": "errors",
    "attach_autocast": "optim.precision.autocast",
    "autocast": "optim.precision.autocast",
    "bit_layers": "layers.conversion.convert",
    "cache_weights": "layers.conversion.convert",
    "check_training": "layers.conversion.other_loops",
    "chunk_cross_entropy": "hf.losses.chunked_cross_entropy",
    "convert": "layers.conversion.convert",
    "get_megatron_optimizer": "optim.optimizers.megatron",
    "initialize": "engine.initialize",
    "keep_fp32": "optim.precision.fp32_modules",
    "load_quantized": "quantize.packed_file",
    "pipeline_module": "engine.pipeline.setup",
    "product_counts": "layers.conversion.convert",
    "quantizer": "quantize.names",
    "quantizer_names": "quantize.names",
    "random_stream": "layers.conversion.convert",
    "recipe": "layers.recipe",
    "record_inputs": "layers.conversion.static_inputs",
    "recipes": "layers.recipe",
    "restore": "layers.conversion.convert",
    "save_quantized": "quantize.packed_file",
    "set_observer": "layers.conversion.convert",
    "split_weights": "engine.parameters.split",
    "switch_precision": "layers.conversion.precision_switch",
    "trainer_optimizers": "optim.optimizers.trainer",
    "use_static_inputs": "layers.conversion.static_inputs",
}

__all__ = [
    "BitLinear",
    "ChainedOptimizer",
    "CheckpointStore",
    "ConstantGradScaler",
    "ControllerGradScaler",
    "DualRangeRegularizer",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "GradientOverflowTracker",
    "Instruments",
    "LayerScalingSettings",
    "LocalDDP",
    "MaxNormGradScaler",
    "MaxValueGradScaler",
    "MegalowbitCallback",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "NormRatioGradScaler",
    "OpClasses",
    "OptimizerConfig",
    "PrecisionController",
    "Recipe",
    "RegularizerSettings",
    "StaticInputs",
    "UserError",
    "attach_autocast",
    "autocast",
    "bit_layers",
    "cache_weights",
    "check_training",
    "chunk_cross_entropy",
    "convert",
    "get_megatron_optimizer",
    "initialize",
    "keep_fp32",
    "load_quantized",
    "pipeline_module",
    "product_counts",
    "quantizer",
    "quantizer_names",
    "random_stream",
    "recipe",
    "recipes",
    "record_inputs",
    "restore",
    "save_quantized",
    "set_observer",
    "split_weights",
    "switch_precision",
    "trainer_optimizers",
    "use_static_inputs",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'megalowbit' has no attribute {name!r}")
    value = getattr(import_module(f"megalowbit.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
