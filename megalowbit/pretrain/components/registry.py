"""All components that a run may have, in the order in which they act.

First what changes how a step is computed, then what watches it. The order is also that of columns in the
metrics, of states in a checkpoint and of entries in the summary. The engine, which accepts a file with the
loop's sections, lists their names in `config/deepspeed_json.py`.
"""

from __future__ import annotations

from megalowbit.pretrain.components.base import Component
from megalowbit.pretrain.components.late_switch import LateSwitch
from megalowbit.pretrain.components.loss_guard import LossGuard
from megalowbit.pretrain.components.overflow_counts import OverflowCounts
from megalowbit.pretrain.components.parameter_split import ParameterSplitting
from megalowbit.pretrain.components.speculation import Speculation

# off where their section is null or left out
OPTIONAL: tuple[type[Component], ...] = (LateSwitch, Speculation)
# part of every run; without a section they have its defaults
ALWAYS_ON: tuple[type[Component], ...] = (LossGuard,)
COMPONENTS: tuple[type[Component], ...] = (OverflowCounts, *OPTIONAL, *ALWAYS_ON, ParameterSplitting)
