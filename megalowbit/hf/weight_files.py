"""What the weight files of a Hugging Face folder hold, seen without reading the weights.

transformers casts every stored tensor to the dtype asked for, an int8 one as well, whose values then lack
their scale; so the stored dtypes have to be looked at. Its order of preference is kept: safetensors, else
pickles.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of every tensor in `model*.safetensors`, or else in `pytorch_model*.bin`, by name.

    Raises:
        Exception: of many kinds, if a file is damaged.
    """
    found: dict[str, torch.dtype] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:  # maps it into memory
            found.update((name, file.get_tensor(name).dtype) for name in file.keys())  # noqa: SIM118
    if found:
        return found
    for path in sorted(folder.glob("pytorch_model*.bin")):
        content = torch.load(path, map_location="meta", weights_only=True)
        found.update((name, value.dtype) for name, value in content.items())
    return found
