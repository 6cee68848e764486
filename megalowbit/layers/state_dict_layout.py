"""State dicts in transformers' layout: a layer that replaces a `Conv1D` has its weight as (in, out).

Such a layer stores its parameter as (out, in), like every other. Into a state dict it writes a transposed
view of the parameter (a copy if the parameter is part of a flat buffer), and it expects the same when
reading. So `save_pretrained`, `load_state_dict` and their callers find the names and shapes of the
unconverted model. megalowbit's checkpoint files hold parameters in their own layout; code that writes or
reads them uses `parameter_layout`.

Not covered: `torch.func.functional_call`, which takes parameters and not state dicts. With a converted GPT-2,
torch rejects FSDP 1's sharded state dicts, which must be contiguous, and, with FSDP 2, `broadcast_from_rank0`
of `torch.distributed.checkpoint.state_dict`, which takes shapes from parameters. Full state dicts work.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# Hint for a weight that has the shape of the parameter instead of the transposed one.
OUT_BY_IN = (
    " (it is stored as (out, in), as in older state dicts of converted models: transpose it, and square "
    "weights such as attn.c_proj too)"
)


def _transposed(weight: Tensor) -> Tensor:
    """A transposed view, or a copy if the parameter is in a flat buffer of ZeRO 1 or 2.

    transformers' `save_pretrained` searches for overlaps of tensors that share a buffer, and fails on a
    transposed view of one.
    """
    is_in_buffer = weight.untyped_storage().nbytes() > weight.nbytes
    return weight.t().contiguous() if is_in_buffer else weight.t()


class HFStateDict(nn.Linear):
    """A linear layer whose state dict is that of the layer it replaces.

    Attributes:
        is_transposed: whether that layer is a transformers `Conv1D`, which stores its weight as (in, out).
    """

    is_transposed: bool = False
    _is_in_parameter_layout = False

    def put_in_hf_layout(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Convert this layer's entries of a state dict to those of the Hugging Face model, in place.

        A weight that ZeRO 3 has partitioned does not change.
        """
        weight = state.get(f"{prefix}weight")
        if self.is_transposed and isinstance(weight, Tensor) and weight.dim() == 2:
            state[f"{prefix}weight"] = _transposed(weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._is_in_parameter_layout:
            self.put_in_hf_layout(destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        given = None if self._is_in_parameter_layout or not self.is_transposed else state_dict.get(key)
        error = None
        if isinstance(given, Tensor) and not given.dim() == self.weight.dim() == 1:  # partitioned by ZeRO 3
            expected = self.weight.shape[::-1]
            if given.shape == expected:
                given = given.t()
                # an assigned tensor becomes the parameter, which must be contiguous
                given = given.contiguous() if local_metadata.get("assign_to_params_buffers") else given
                state_dict = {**state_dict, key: given}
            else:
                error = _size_mismatch(key, given, expected)
                state_dict = {name: value for name, value in state_dict.items() if name != key}
        missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        if error is not None:
            error_msgs.append(error)
        missing_keys += [name for name in missing if name != key or error is None]


def put_in_hf_layout(model: nn.Module, state: MutableMapping[str, Any]) -> None:
    """Convert a state dict of the parameters of `model` to that of the Hugging Face model, in place.

    It must have full tensors, also if ranks hold parts of them.
    """
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, HFStateDict):
            layer.put_in_hf_layout(state, f"{name}." if name else "")


@contextmanager
def parameter_layout(model: nn.Module) -> Iterator[None]:
    """Within this context, state dicts of `model` and its parts hold the parameters as stored: (out, in)."""
    layers = [layer for layer in model.modules() if isinstance(layer, HFStateDict)]
    changed = [layer for layer in layers if not layer._is_in_parameter_layout]
    for layer in changed:
        layer.__dict__["_is_in_parameter_layout"] = True
    try:
        yield
    finally:
        for layer in changed:
            del layer.__dict__["_is_in_parameter_layout"]


def _size_mismatch(key: str, given: Tensor, expected: Any) -> str:
    """Torch's own message, which programs search for."""
    hint = OUT_BY_IN if given.shape == expected[::-1] else ""
    return (
        f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, "
        f"the shape in current model is {expected}.{hint}"
    )
