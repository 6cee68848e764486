"""The loop with `autocast` and `fp32_norms`, in both half precisions."""

import math

import pytest
import torch

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.pretrain.loop import train_step

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("precision", DTYPES)
def test_low_bit_layers_get_half_precision_inputs_and_norms_fp32(build_job, precision):
    job = build_job(
        f"megalowbit.precision={precision}", "megalowbit.autocast=true", "megalowbit.fp32_norms=true"
    )
    seen = {}

    def note(module, args, output):
        seen.setdefault(type(module), set()).add((args[0].dtype, output.dtype))

    for module in job.engine.module.modules():
        if isinstance(module, (BitLinear, torch.nn.LayerNorm)):
            module.register_forward_hook(note)
    losses = []
    for _ in range(3):
        facts, *_ = train_step(job)
        losses.append(facts["loss"])
    assert all(math.isfinite(loss) for loss in losses)
    half = DTYPES[precision]
    assert {output for _, output in seen[BitLinear]} == {half}
    assert {input for input, _ in seen[torch.nn.LayerNorm]} == {torch.float32}
    dtypes = {type(m): {p.dtype for p in m.parameters()} for m in job.engine.module.modules()}
    assert dtypes[torch.nn.LayerNorm] == {torch.float32}
    assert dtypes[BitLinear] == {half}
