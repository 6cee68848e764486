"""Leaves out tests that load exported folders, where compressed-tensors cannot be installed."""

import sys

NEED_COMPRESSED_TENSORS = ["test_compressed_tensors.py", "test_export.py", "test_rounded_inputs.py"]
collect_ignore = NEED_COMPRESSED_TENSORS if sys.version_info < (3, 11) else []
