"""docs/names.md names what there is: every name in its right columns is looked up."""

import importlib
import re
from pathlib import Path

import pytest

import megalowbit as mlb
from megalowbit.quantize.names import quantizer

PAGE = (Path(__file__).parent.parent / "docs" / "names.md").read_text(encoding="utf-8")
ROWS = [row.strip("| ").split(" | ", 1) for row in re.findall(r"^\| .*", PAGE, re.M)]
HERE = " ".join(row[1] for row in ROWS)


def found(path):
    """The object that a dotted name stands for."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"{path} does not exist")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:mlb|megalowbit)\.[\w.]+)`", HERE))))
def test_names_exist(name):
    assert found(name.replace("mlb.", "megalowbit.")) is not None
    if name.startswith("mlb."):
        assert name.split(".")[1] in mlb.__all__


def test_tags_are_recorded_and_quantizers_can_be_built():
    tags = set(re.findall(r"`(gradient_overflow/\w+)`", HERE))
    assert len(tags) == 4
    assert tags <= mlb.GradientOverflowTracker().end_step().facts().keys()
    names = set(re.findall(r"`(\w*(?:fp4e2m1|int8e5m2)\w*(?::\w+)?)`", HERE))
    assert len(names) == 3
    assert all(quantizer(name) is not None for name in names)


# All identifiers of the five documents but those that the page leaves out.
NAMES = {
    "overflow tracking": """
        BitLinear LinearLowbitFunction Cast2Fp4e2m1 Cast2Fp4e2m1Block Cast2Fp4e2m1Random BlockQuantFunc
        block_shape quant get_scalar fp4_max_value svd_quant rank niter broadcast_dim adaptive_schedule
        quant_func schedule_none schedule_l1_m1p5_s2 schedule_list split GradientOverflowTracker
        gradient_overflow_tracker record_overflow get_stats reset total_elements overflow_elements
        overflow_count total_quantizations overflow_rate batch_overflow_rate grad_overflow_rate
    """,
    "mixed precision": """
        get_megatron_optimizer MegatronOptimizer Float16OptimizerWithFloat16Params FP32Optimizer
        ChainedOptimizer MegatronGradScaler ConstantGradScaler DynamicGradScaler scale inv_scale update
        state_dict load_state_dict initial_scale min_scale growth_factor backoff_factor growth_interval
        hysteresis _growth_tracker _hysteresis_tracker get_loss_scale scale_loss step update_successful
        grad_norm num_zeros_in_grad clip_grad_norm clip_grad count_zeros found_inf
        _amp_foreach_non_finite_check_and_unscale_ _copy_model_grads_to_main_grads
        _unscale_main_grads_and_check_for_nan _copy_main_params_to_model_params
        _copy_model_params_to_main_params _get_model_and_main_params_data_float16 _dummy_overflow_buf
        _multi_tensor_copy_this_to_that reload_model_params zero_grad _zero_grad_group_helper
        _get_params_for_weight_decay_optimization copy_tensor_model_parallel_attributes
        get_model_parallel_group float16_groups fp32_from_float16_groups fp32_from_fp32_groups
        fp32_from_fp16_params fp32_from_fp16 setup_model_and_optimizer param_groups grad_scaler lr
        loss_scale log_num_zeros_in_grad optimizer_state_dict params_have_main_grad main_grad DDP_impl
        cpu_optimizer initial_loss_scale min_loss_scale loss_scale_window weight_decay adam_beta1
        adam_beta2 adam_eps sgd_momentum get_timers
    """,
    "precision speculation": "P_zero",
    "gradient scaling": """
        GradScaler LossScaleOptimizer init_scale growth_factor backoff_factor growth_interval target_max
        ema_decay threshold_high threshold_low
    """,
    "mixed-precision training": "softplus",
}


@pytest.mark.parametrize("document", NAMES)
def test_every_name_of_the_documents_is_in_a_left_column(document):
    there = set(re.findall(r"\w+", " ".join(row[0] for row in ROWS)))
    assert [name for name in NAMES[document].split() if name not in there] == []
