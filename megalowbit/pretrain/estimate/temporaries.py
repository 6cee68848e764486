"""Memory beside the training state and the tensors saved for backward, of one process.

`temporaries` is the largest of what exists for a moment only:

    loss, whole       gradients of the log-probabilities and of the logits, both in fp32
    loss, in chunks   a chunk's logits in both precisions and while they are reduced, the gradient of the
                      hidden states in fp32, the gradient of the projection's weight
    a linear layer    its decoded operands, the product in fp32, the rounded result, and the gradients of the
                      activations around it

Operands and products are those of a bf16 GEMM; a recipe with another needs less. Not covered: what a kernel
allocates inside, such as attention's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megalowbit.hf.losses.chunked_cross_entropy import chunk_size
from megalowbit.layers.conversion.kept_layers import linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP32 = 4
# CUDA's context, the loaded kernels and the workspaces of cuBLAS; an allowance, not measured
CONTEXT = 2**30
# NCCL's buffers for one group of processes. Reports: 544 and 688 MB on four A100 (NVIDIA/nccl issue 964), and
# 1.06 GB for a first group on eight H100 (issue 1685), which includes part of the context
COMMUNICATOR = 3 * 2**28
# gradients of activations that a block's backward holds at once: of a gated MLP's three tensors and its input
GRADIENTS_ALIVE = 4


def temporaries(model: PreTrainedModel, num_tokens: int, *, chunks_loss: bool) -> int:
    """Largest sum of bytes that exists for a moment, for a micro-batch of `num_tokens` tokens."""
    head = model.get_output_embeddings().weight
    layers: Iterable[Any] = linear_layers(model).values()
    sizes = [layer.weight.shape for layer in layers if layer.weight is not head]
    half = head.element_size()
    alive = GRADIENTS_ALIVE * num_tokens * max(map(max, sizes), default=0) * half
    of_layers = max((_of_layer(*size, num_tokens=num_tokens, half=half) for size in sizes), default=0)
    of_loss = _of_loss(*head.shape, num_tokens=num_tokens, half=half, is_chunked=chunks_loss)
    return max(of_loss, of_layers + alive)


def outside_tensors(axes: Iterable[int]) -> int:
    """Bytes of a device that hold no tensors, for these numbers of processes along each axis of the grid."""
    divided = sum(size > 1 for size in axes)
    num_groups = divided + (divided > 1)  # with several axes, all processes are a further group
    return CONTEXT + num_groups * COMMUNICATOR


def _of_layer(out_features: int, in_features: int, *, num_tokens: int, half: int) -> int:
    output, input = num_tokens * out_features, num_tokens * in_features
    weight = out_features * in_features
    return max(
        result * (FP32 + half) + (left + right) * half
        for left, right, result in ((input, weight, output), (output, weight, input), (output, input, weight))
    )


def _of_loss(vocab_size: int, hidden_size: int, *, num_tokens: int, half: int, is_chunked: bool) -> int:
    weight, hidden = vocab_size * hidden_size * half, num_tokens * hidden_size
    if is_chunked:
        chunk = num_tokens * min(vocab_size, chunk_size(num_tokens))
        forward = chunk * (half + 3 * FP32)  # log-sum-exp subtracts and exponentiates in fp32
        backward = chunk * (FP32 + 2 * half) + hidden * (FP32 + half) + weight
        return max(forward, backward)
    logits = num_tokens * vocab_size
    return max(logits * 2 * FP32, logits * half + weight + hidden * half)
