"""The recording of the Metis repository: inputs, the uniform numbers and factors it drew, and its outputs.

It is looked for at $MEGALOWBIT_METIS_RECORDING, else beside the checkout; without it tests that are marked
`needs_recording` are skipped.
"""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

VARIABLE = "MEGALOWBIT_METIS_RECORDING"
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "metis_golden.safetensors"
PATH = Path(os.environ.get(VARIABLE, BESIDE))
CASES = ("gauss", "heavy", "small")
needs_recording = pytest.mark.skipif(
    not PATH.is_file(), reason=f"no recording of Metis at {PATH}: set {VARIABLE}"
)


def load_recording():
    """Its tensors by name."""
    return load_file(PATH)
