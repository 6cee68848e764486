"""`"autocast"` of the configuration: whether operations run by class, and what differs from the table.

Imports no torch, so that a misspelt operation is an error of the configuration file, before anything starts.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from megalowbit.optim.precision.op_classes import OpClasses, checked_names
from megalowbit.values import SettingsModel


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError('expected a list of ops, for example ["gelu"]')
    return checked_names(value, "the list")


Ops = Annotated[tuple[str, ...], BeforeValidator(_names)]


class AutocastSettings(SettingsModel):
    """`true`, `false`, or the operations to move: `{"float32": ["gelu"], "promote": […]}`, which is on, too.

    Attributes:
        enabled: whether operations run by class; off, they run in their inputs' type.
        float16: operations to run in half precision, beside those of the table.
        float32: operations to run in fp32.
        promote: operations to run in their inputs' widest type.
    """

    enabled: bool = True
    float16: Ops = ()
    float32: Ops = ()
    promote: Ops = ()

    @model_validator(mode="before")
    @classmethod
    def _a_switch_is_a_block(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return {"enabled": value}
        if not isinstance(value, (dict, cls)):
            raise ValueError('expected true, false, or ops to move, for example {"float32": ["gelu"]}')
        return value

    @model_validator(mode="after")
    def _each_in_one_class(self) -> AutocastSettings:
        self.op_classes()
        return self

    def op_classes(self) -> OpClasses:
        """The table with these changes."""
        return OpClasses.default().with_changes(
            float16=self.float16, float32=self.float32, promote=self.promote
        )
