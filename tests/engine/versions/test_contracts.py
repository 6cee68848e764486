"""Contracts checked on changed copies of DeepSpeed; contract/ checks the installed one."""

import json
import os
import subprocess
import sys

import pytest
from deepspeed_copies import copy_deepspeed, environment

pytestmark = (
    pytest.mark.slow
)  # `make test` runs the contracts of the installed DeepSpeed and tests of failing checks
ASK = (
    "import json\n"
    "from megalowbit.engine.process_start import import_deepspeed\n"
    "from megalowbit.engine.versions.contracts import broken_contracts\n"
    "import_deepspeed(is_checked=False)\n"
    "print(json.dumps([[each.name, each.breaks] for each in broken_contracts()]))\n"
)
ZERO = "runtime/zero/stage_1_and_2.py"
# change → the contract that must be reported as broken, and its message
CHANGES = {
    "an internal has another name": (
        (ZERO, "round_robin_bit16_offsets", "bit16_offsets"),
        ("optimizer round_robin_bit16_offsets", "checkpoints record where each parameter is"),
    ),
    "stage 2 reduces in half precision": (
        (ZERO, "dtype=self._gradient_reduction_buffer_dtype()", "dtype=self.dtype"),
        ("_gradient_reduction_buffer_dtype", "half precision"),
    ),
    "bf16 steps are taken whatever the norm": (
        (ZERO, "or self.check_grad_overflow) and is_invalid", ") and is_invalid"),
        ("DeepSpeedZeroOptimizer.step", "apply inf and NaN in bf16"),
    ),
    "a key is new": (
        ("runtime/config.py", "self.train_batch_size = ", "param_dict.get('n'); self.train_batch_size = "),
        ("top-level configuration keys", "silently ignored"),
    ),
    "a step counts otherwise": (
        ("runtime/engine.py", "    self.global_steps += 1\n", "    self.global_steps += 1; self.more += 1\n"),
        ("counters of a step", "counted twice"),
    ),
    "another default of clipping": (
        ("runtime/constants.py", "GRADIENT_CLIPPING_DEFAULT = 1", "GRADIENT_CLIPPING_DEFAULT = 2"),
        ("default of gradient_clipping", "clip differently"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """All changes in one copy, because an import takes seconds; returns contract → what breaks."""
    folder = copy_deepspeed(
        tmp_path_factory.mktemp("copy") / "changed", "0.19.9", [change for change, _ in CHANGES.values()]
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment(folder, os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_breaks_its_contract_and_the_message_says_what_breaks(broken, change):
    name, breaks = CHANGES[change][1]
    found = [text for contract, text in broken.items() if name in contract]
    assert len(found) == 1
    assert breaks in found[0]


def test_unchanged_contracts_are_met(broken):
    assert len(broken) == len(CHANGES)
