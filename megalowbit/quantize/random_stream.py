"""Random numbers for stochastic rounding, addressed rather than consumed.

Each draw has its own generator, seeded by a 64-bit hash of (seed, step, layer, role, rank): what one layer
draws depends on nothing drawn before, so a resumed run, a recomputed activation or a layer added elsewhere
changes no number. Tensors all ranks hold alike (weights) leave the rank out and are rounded alike
everywhere.

torch's CPU generator keeps 32 bits of a seed: two of many million draws may then share their numbers, far
apart, which harms nothing. The hash still decides all bits, so neighbouring steps have nothing in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from megalowbit.errors import UserError

_SEED_MASK = (1 << 64) - 1
_PROBE_SIZE = 256


class RandomStream:
    """Generators by (step, layer, role) for one seed and one rank.

    Args:
        seed: any integer; the same on all ranks.
        rank: this process's data-parallel rank.

    Attributes:
        step: micro-batches seen; part of every key.
    """

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed = int(seed)
        self.rank = int(rank)
        self.step = 0
        self._checked: set[str] = set()

    def advance(self) -> None:
        """Move on to the next micro-batch."""
        self.step += 1

    def generator(
        self,
        layer: str,
        role: str,
        device: torch.device | str,
        *,
        step: int | None = None,
        is_shared: bool = False,
    ) -> torch.Generator:
        """A fresh generator for one tensor.

        Args:
            layer: name of the layer.
            role: which of its tensors, and which use of it.
            device: where the numbers will be drawn.
            step: the micro-batch; `None` is the current one.
            is_shared: whether all ranks hold this tensor and must round it alike.

        Raises:
            RuntimeError: this device's generator draws constants or numbers outside [0, 1).
        """
        generator = self._keyed(layer, role, device, self.step if step is None else step, is_shared)
        if generator.device.type not in self._checked:
            other = self._keyed(layer, role + "'", device, self.step, is_shared)
            samples = [fill_uniform(torch.empty(_PROBE_SIZE, device=g.device), g) for g in (generator, other)]
            check_samples(samples[0], samples[1], generator.device)
            self._checked.add(generator.device.type)
            return self._keyed(layer, role, device, self.step if step is None else step, is_shared)
        return generator

    def _keyed(
        self, layer: str, role: str, device: torch.device | str, step: int, is_shared: bool
    ) -> torch.Generator:
        key = repr((self.seed, step, layer, role, None if is_shared else self.rank))
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") & _SEED_MASK)

    def state_dict(self) -> dict[str, int]:
        """Seed and step: all there is to resume from. The rank belongs to the process."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            UserError: a key is missing or not a whole number ≥ 0 (the step).
        """
        for key in ("seed", "step"):
            if not isinstance(state.get(key), int) or (key == "step" and state[key] < 0):
                raise UserError(
                    f"random stream state has {key} = {state.get(key)!r}: expected a whole number, "
                    "use a state written by RandomStream.state_dict"
                )
        self.seed, self.step = state["seed"], state["step"]


def check_samples(sample: Tensor, other: Tensor, device: torch.device) -> None:
    """Refuse a generator whose numbers could not round without bias.

    Args:
        sample: uniform numbers drawn with one key.
        other: as many drawn with another key.
        device: named in the message.

    Raises:
        RuntimeError: the numbers are constant, leave [0, 1), are lopsided, or do not depend on the key.
    """
    first = sample.to("cpu", torch.float64)
    if not bool(((first >= 0) & (first < 1)).all()):
        problem = "draws numbers outside [0, 1)"
    elif bool((first == first[0]).all()):
        problem = f"draws the constant {float(first[0])}"
    elif abs(float(first.mean()) - 0.5) > 0.2:  # eleven standard deviations of 256 draws
        problem = f"draws numbers with mean {float(first.mean()):.3f} instead of 0.5"
    elif bool((first == other.to("cpu", torch.float64)).all()):
        problem = "draws the same numbers for two seeds"
    else:
        return
    raise RuntimeError(
        f"random generator of device {device} {problem}: stochastic rounding with it would be biased; "
        "use a nearest-even quantiser (…nosr) or another device"
    )


def fill_uniform(out: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `out` with uniform numbers in [0, 1), multiples of 2⁻²³ or finer.

    Args:
        out: fp32, contiguous, an even number of elements.
        generator: on that device; `None` is torch's default generator, as for `torch.rand`.

    Returns:
        `out`.
    """
    if out.device.type != "cpu":
        return out.uniform_(generator=generator)
    # One 64-bit draw makes two numbers, in 60 % of the time `uniform_` needs on a CPU. The mantissa's 23 bits
    # under the exponent of 1 are a number in [1, 2).
    out.view(-1).view(torch.int64).random_(-(2**63), None, generator=generator)
    out.view(torch.int32).bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000)
    return out.sub_(1.0)
