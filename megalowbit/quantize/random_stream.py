"""Counter-based random numbers for stochastic rounding.

The random bits of a tensor are Philox of a key and a counter (`philox.py`). The key is a 64-bit hash of seed,
layer, role, use and rank; the upper half of the counter is the micro-batch. Draws therefore do not depend on
earlier draws, the device or other layers, and a resumed run repeats them. For tensors that all ranks share
(weights), the key has no rank, so all ranks round them in the same way. A stream without a given rank looks
up the process's rank in torch.distributed's default group at each draw, because models may be converted
before the group exists. Layers that share an input draw its numbers under one name (`layers.siblings`).

The micro-batch is stored in a CPU tensor, because a compiled model must read and advance it at run time; a
Python number would become a constant of the graph. GPU kernels read it in device memory (`step_counters`).

A micro-batch begins at each training forward of the converted model, whose hook calls `advance`. Where a part
of the model is called (`model.model(…)`), no hook runs. There, a micro-batch begins at the first training
forward of a layer after a backward (`finish`, `begin`), and draws the numbers that a call of the model would
draw. Forwards of parts without a backward between them are one micro-batch, in which layers count their uses.

Known limit: a recomputed activation uses the current micro-batch. It repeats its first draws only if no other
forward has begun since, or if the caller resets the stream with `at`, as pipelines do
(`engine/pipeline/stage.py`). `layers/matmul/use_counter.py` describes the other cases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit import cuda_graphs
from megalowbit.errors import UserError
from megalowbit.formats.block_format import NVFP4
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import Encoded, EncodeRequest, Encoding
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.triton.step_counters import CountedStep, StepCounters

Encode = Callable[[EncodeRequest], Encoded]


_LAST_STEP = 2**63 - 1  # largest int64
_KEPT_USES = 4  # uses of a layer per micro-batch whose keys are cached; hashing one takes 1 µs


class RandomStream:
    """Random keys by (step, layer, role) for one seed and one rank.

    Args:
        seed: any integer; the same on all ranks.
        rank: this process's data-parallel rank, ≥ 0; `None`: its rank in the default process group, or 0
            without one.

    Attributes:
        seed: as given; `load_state_dict` replaces it by the saved one.
        given_rank: the rank as given or set; copies and pickles keep it.

    Raises:
        UserError: seed or rank is not a valid integer.
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        if not _is_whole(seed):
            raise UserError(f"random stream seed = {seed!r}: expected a whole number")
        if rank is not None and (not _is_whole(rank) or rank < 0):
            raise UserError(f"random stream rank = {rank!r}: expected a whole number of 0 or more, or None")
        self.seed = seed
        self.given_rank = rank
        self._finished = -1  # the last micro-batch that has had a backward
        self._checked: set[str] = set()
        self._keys: dict[tuple[object, ...], int] = {}
        self._set_step(0)

    def _set_step(self, step: int) -> None:
        # memory estimates build models from fake tensors; a model converted for inference may train later
        with _disable_current_modes(), torch.inference_mode(False):
            self.step_tensor = torch.tensor(step, dtype=torch.int64, device="cpu")
            self._step = self.step_tensor.numpy()  # the same memory, read without torch
        self._counters = StepCounters(self._step)

    @property
    def rank(self) -> int:
        """The data-parallel rank, part of the keys of tensors that differ between ranks; may be set."""
        return own_rank() if self.given_rank is None else self.given_rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self.given_rank = rank

    @property
    def step(self) -> int:
        """The micro-batch; the upper half of every counter."""
        return self._step.item()

    def advance(self) -> None:
        """Move on to the next micro-batch.

        Raises:
            UserError: the counter has reached 2⁶³ − 1.
        """
        step = self.step
        check_advance(step)
        self._step[...] = step + 1  # `+= 1` takes NumPy ten times as long

    def is_finished(self, step: int) -> bool:
        """Whether this micro-batch has had a backward."""
        return step == self._finished

    def begin(self, step: int) -> int:
        """Begin the micro-batch after `step`, unless another layer has begun it, and return it.

        In a compiled graph, `step` may be from before the layers that have run already.

        Raises:
            UserError: the counter has reached 2⁶³ − 1.
        """
        if self.step == step:
            self.advance()
        return self.step

    def finish(self, step: int) -> None:
        """Note that this micro-batch has had a backward, so the next training forward begins another one."""
        self._finished = max(step, self._finished)

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Context manager: set the stream to an earlier micro-batch, whose forward is recomputed."""
        current = self.step
        self._step[...] = step
        try:
            yield
        finally:
            self._step[...] = current

    def key(
        self,
        layer: str,
        role: str,
        *,
        step: int | None = None,
        use: int = 0,
        is_shared: bool = False,
        shard: int | None = None,
    ) -> RandomKey:
        """The key of one tensor.

        Args:
            layer: name of the layer.
            role: role of the tensor in the layer.
            step: the micro-batch; `None`: the current one.
            use: number of the use of the layer within the micro-batch.
            is_shared: whether all data-parallel ranks hold this tensor and must round it in the same way.
            shard: index of this tensor-parallel rank's shard; `None`: the tensor is not sharded.
        """
        rank = self.given_rank
        if is_shared:
            rank = None
        elif rank is None:
            rank = own_rank()
        address: tuple[object, ...] = (self.seed, layer, role, use, rank)
        if shard is not None:  # keys of full tensors are as in earlier versions
            address = (*address, "shard", shard)
        key = self._keys.get(address)
        if key is None:
            key = _hash(address, 8)
            if use < _KEPT_USES:  # in evaluation the number of uses is unlimited
                self._keys[address] = key
        return RandomKey(key, CountedStep.of(self.step if step is None else step, self._counters))

    def hadamard_signs(self, step: int | None = None) -> int:
        """16 bits for the random Hadamard transform: a function of the seed, one choice for the run.

        With `step`, one choice for each micro-batch.
        """
        address: tuple[object, ...] = (self.seed, "hadamard signs")
        return _hash(address if step is None else (*address, step), 2)

    def check(self, device: torch.device, encode: Encode = backends.encode) -> None:
        """Test, once for each type of device, that stochastic rounding is unbiased.

        Args:
            device: device of the tensors.
            encode: function that quantises them.

        Raises:
            RuntimeError: see `check_rounding`.
            UserError: a CUDA graph is being captured.
        """
        if device.type in self._checked or device.type == "meta":
            return
        cuda_graphs.refuse(device, "the test of stochastic rounding", "run one step first, as the warm-up")
        with _disable_current_modes():
            check_rounding(device, encode)
        self._checked.add(device.type)

    def state_dict(self) -> dict[str, int]:
        """Seed and step. The rank is a property of the process and not saved."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore seed and step; the next training forward begins another micro-batch.

        Raises:
            UserError: not a mapping, or a key is missing or not an integer (step: 0 ≤ step < 2⁶³).
        """
        if not isinstance(state, Mapping):
            raise UserError(
                f"random stream state is {state!r}: expected a mapping of seed and step, "
                "use a state written by RandomStream.state_dict"
            )
        for key in ("seed", "step"):
            value = state.get(key)
            if not _is_whole(value) or (key == "step" and not 0 <= state[key] <= _LAST_STEP):
                raise UserError(
                    f"random stream state has {key} = {value!r}: expected a whole number, "
                    "use a state written by RandomStream.state_dict"
                )
        self.seed = state["seed"]
        self._step[...] = state["step"]  # in place: a compiled model holds the tensor
        self._finished = state["step"]

    def __getstate__(self) -> dict[str, Any]:
        state = {"seed": self.seed, "rank": self.given_rank, "step": self.step}
        return {**state, "finished": self._finished}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["seed"], state["rank"])  # type: ignore[misc]
        self._set_step(state["step"])
        self._finished = state.get("finished", state["step"])  # pickles of earlier versions lack it


def check_advance(step: int) -> None:
    """Raise at the last micro-batch that the counter can represent.

    Raises:
        UserError: `step` is 2⁶³ − 1.
    """
    if step >= _LAST_STEP:
        raise UserError(
            f"random stream is at step {step}, the last there is: load a state with a smaller step"
        )


def own_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _hash(address: tuple[object, ...], size: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(address).encode(), digest_size=size).digest(), "little")


_RAMP = 16  # positions between two codes: 0, 1/16 … 15/16
_ROWS = 256  # elements at each position
_NVFP4 = Encoding(format=NVFP4, is_stochastic=True)
_OTHER_KEYS = {
    "key": (RandomKey(2, 3), RandomKey(1 << 32 | 1, 3)),
    "step": (RandomKey(1, 4), RandomKey(1, 1 << 32 | 3)),
}


def check_rounding(device: torch.device, encode: Encode) -> None:
    """Round a ramp of known numbers, with the function that layers use, and check the codes.

    Raises:
        RuntimeError: equal numbers always get the same code, rounding is biased or does not give a neighbour,
            or two keys or two steps give the same codes.
    """

    def rounded(random_key: RandomKey) -> Tensor:
        codes = encode(EncodeRequest(ramp, _NVFP4, random_key)).codes.to("cpu")
        return torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :-1].to(torch.float64)

    # Each block ends in a 6, its largest element. With S = 448 the others are scaled by exactly 1, and are
    # between the codes 0 and 1 (numbers 0 and 0.5).
    position = torch.arange(_RAMP, dtype=torch.float64, device="cpu") / _RAMP
    position[-1] = 12.0
    ramp = (position / 2).to(torch.float32).repeat(_ROWS, 1).to(device)
    ups, position = rounded(RandomKey(1, 3)), position[:-1]
    rates, excess = ups.mean(0), (ups - position).mean()
    problem = None
    if bool((ups > 1).any()):
        problem = "rounds numbers to codes that are not their neighbours"
    elif bool((ups == ups[0]).all()):
        problem = (
            f"draws a constant: it rounds equal numbers in the same way everywhere (up: {rates.mean():.2f})"
        )
    elif abs(excess) > 0.05:  # seven standard deviations of the mean, 0.42 / √(15 · 256)
        problem = f"is biased: it rounds up {excess:+.3f} more often than it should"
    for name, keys in _OTHER_KEYS.items():
        if problem is None and any(bool((rounded(key) == ups).all()) for key in keys):
            problem = f"draws the same numbers for another {name}"
    if problem is not None:
        raise RuntimeError(
            f"stochastic rounding on device {device} {problem}, and gradients would be biased: "
            "use a nearest-even quantizer (…nosr), or MEGALOWBIT_BACKEND=torch"
        )
