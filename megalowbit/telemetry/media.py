"""Records of a step that are no single numbers: histograms and texts.

Plain values, as in facts. Components make them, and sinks show them where they can: TensorBoard, W&B and
trackio. The components also write them to JSON lines, which need no viewer.
"""

from __future__ import annotations

from dataclasses import dataclass

SECTION_OF_HISTOGRAMS, SECTION_OF_SAMPLES = "histograms", "samples"


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of values between edges.

    Attributes:
        name: of the curve, such as `weight_block_max_log2/model.layers.0.mlp.up_proj`.
        edges: ascending and finite, one more than `counts`.
        counts: values from an edge up to the next one.
    """

    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need one more edge than {len(self.edges)}")


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """A text that the model has written.

    Attributes:
        number: of the prompt, from 1.
        prompt: the beginning, given.
        text: the continuation, without the prompt.
    """

    number: int
    prompt: str
    text: str


Medium = Histogram | TextSample
