"""The sections of the `"megalowbit"` block that the pretraining loop reads, by name alone.

An engine without the loop accepts them unread, so that one file serves both. The loop lies above
this room and reads what stands here: each name of the first two tuples is also a file in
`pretrain/components`, whose class (`late_switch` → `LateSwitch`) has the section's settings.
"""

OPTIONAL_COMPONENTS = (  # off where the section is null or left out
    "late_switch",
    "speculation",
)
STANDING_COMPONENTS = ("loss_guard",)  # part of every run; without a section they have its defaults
LOOP_SECTIONS = (
    "model",
    "data",
    "run",
    "checkpoint",
    "telemetry",
    *STANDING_COMPONENTS,
    *OPTIONAL_COMPONENTS,
)
