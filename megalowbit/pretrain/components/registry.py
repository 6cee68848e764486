"""The registry of all components, in the order in which they act.

Components that change how a step is computed come first, then those that monitor it. Columns of the metrics,
states in a checkpoint and entries of the summary have the same order. The engine accepts configuration files
with the loop's sections; `config/deepspeed_json.py` lists their names.
"""

from __future__ import annotations

from megalowbit.pretrain.components.base import Component
from megalowbit.pretrain.components.late_switch import LateSwitch
from megalowbit.pretrain.components.loss_guard import LossGuard
from megalowbit.pretrain.components.machine.memory import Memory
from megalowbit.pretrain.components.machine.rank_comparison import RankComparison
from megalowbit.pretrain.components.machine.throughput import Throughput
from megalowbit.pretrain.components.media.histograms import Histograms
from megalowbit.pretrain.components.media.samples import Samples
from megalowbit.pretrain.components.oscillation_reset import OscillationReset
from megalowbit.pretrain.components.overflow_counts import OverflowCounts
from megalowbit.pretrain.components.parameter_split import ParameterSplitting
from megalowbit.pretrain.components.profiler import Profiler
from megalowbit.pretrain.components.source_losses import SourceLosses
from megalowbit.pretrain.components.speculation import Speculation
from megalowbit.pretrain.components.static_inputs import StaticInputRecord
from megalowbit.pretrain.components.validation import Validation

# off if their section is null or left out
OPTIONAL: tuple[type[Component], ...] = (
    LateSwitch,
    Speculation,
    OscillationReset,
    Profiler,
    Samples,
    Histograms,
)
# part of every run; without a section they use default settings
ALWAYS_ON: tuple[type[Component], ...] = (LossGuard, Validation, StaticInputRecord)
COMPONENTS: tuple[type[Component], ...] = (
    OverflowCounts,
    *OPTIONAL,
    *ALWAYS_ON,
    ParameterSplitting,
    SourceLosses,
    RankComparison,
    Throughput,
    Memory,
)
