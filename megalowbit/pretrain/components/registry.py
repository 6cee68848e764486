"""All components that a run may have, in the order in which they act.

First what changes how a step is computed, then what watches it. The order is also that of columns in the
metrics, of states in a checkpoint and of entries in the summary.
"""

from __future__ import annotations

from importlib import import_module

from megalowbit.config.loop_sections import OPTIONAL_COMPONENTS, STANDING_COMPONENTS
from megalowbit.pretrain.components.base import Component
from megalowbit.pretrain.components.overflow_counts import OverflowCounts
from megalowbit.pretrain.components.parameter_split import ParameterSplitting


def _component(section: str) -> type[Component]:
    """The class in the file of that name: `late_switch` → `late_switch.LateSwitch`."""
    module = import_module(f"megalowbit.pretrain.components.{section}")
    found: type[Component] = getattr(module, section.title().replace("_", ""))
    return found


SECTIONS = {name: _component(name) for name in (*OPTIONAL_COMPONENTS, *STANDING_COMPONENTS)}
COMPONENTS: tuple[type[Component], ...] = (OverflowCounts, *SECTIONS.values(), ParameterSplitting)
