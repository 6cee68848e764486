import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REFERENCE = Path(__file__).parent.parent / "quantize" / "nvfp4_reference.py"


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The independent NVFP4 of `tests/quantize/nvfp4_reference.py`."""
    spec = importlib.util.spec_from_file_location("nvfp4_reference", REFERENCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
