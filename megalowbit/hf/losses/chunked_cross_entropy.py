"""Cross entropy of a language model without the matrix of all logits.

For 8192 tokens and a vocabulary of 128,256, the logits and their gradients take up to 16 GB. Here output
projection and loss are one operation that goes through the vocabulary in chunks, forward and again backward:

    forward    logits of a chunk → log-sum-exp over the vocabulary, updated chunk by chunk
    backward   the same logits again → gradient of the chunk's logits → its rows of grad_weight, and a part of
               grad_input, which is summed in fp32

Chunks of the vocabulary rather than of the tokens: each row of grad_weight is one product over all tokens,
rounded once, as in the whole computation. Logits are rounded to the model's precision and the loss is
computed in fp32, also as there. Between forward and backward only one number a token is kept. The cost is a
fourth product of the size of the projection, in addition to its three.

`torch.nn.functional.linear_cross_entropy` (torch 2.13) is not used: in half precision it rounds the loss to
half precision, sums grad_weight over its chunks in half precision, and rounds the gradients before they are
multiplied by the loss scale.
Not covered: a bias of the output projection, label smoothing, double backward, models that scale their logits
or add to the loss (Gemma 2, Granite, mixtures of experts).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.derivative_checks import check_backward, reject_transforms
from megalowbit.errors import UserError, shown
from megalowbit.families.registry import FAMILIES
from megalowbit.families.vocabulary import unpadded_size
from megalowbit.labels import IGNORED_LABEL
from megalowbit.layers.matmul.gemms import autocast_dtype, no_autocast
from megalowbit.values import require_module

WHOLE_LOGITS = "set it to false, or leave out mlb.chunk_cross_entropy"
CHUNK_ELEMENTS = 2**25  # logits of a chunk: 128 MiB in fp32
LIBRARIES = ("accelerate", "deepspeed", "megalowbit", "torch")  # whose hooks return what they are given
ALIGNMENT = 128  # rows of a chunk, for the GEMM's tiles


def chunk_cross_entropy(model: Any) -> Any:
    """Make a causal language model of transformers compute its training loss in chunks of the vocabulary.

    In training mode and with `labels=`, the model's output has `loss`, and None as `logits`. Evaluation and
    `generate` are unchanged; so are calls without `labels`, or with `logits_to_keep` or `return_dict=False`,
    whose results would lack the logits. Parameters and state dict are the same.

    Args:
        model: such as `GPT2LMHeadModel`; changed in place. A second call changes nothing, or only an output
            projection that was replaced meanwhile.

    Returns:
        The model.

    Raises:
        UserError: it has no plain output projection, a loss of its own, or a forward that is not known to
            compute its logits by the projection alone.
    """
    require_module(model, "chunk_cross_entropy")
    name = type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if is_chunked(model) and "forward" in vars(head):
        return model
    if type(head) is not nn.Linear or head.bias is not None or not hasattr(model, "loss_function"):
        found = "none" if head is None else type(head).__name__
        raise UserError(
            "chunked_cross_entropy needs a causal language model of transformers whose output projection is "
            f"an nn.Linear without bias; that of {name} is {found}: set it to false, or, if fully_shard has "
            "changed it, call mlb.chunk_cross_entropy before"
        )
    for module in (head,) if is_chunked(model) else (model, head):
        if "forward" in vars(module):
            raise UserError(
                f"chunked_cross_entropy: the forward of {type(module).__name__} has been replaced: "
                "call mlb.chunk_cross_entropy before the library that replaces it"
            )
    _check_loss(model)
    _check_forward(model)
    head.forward = _ChunkedForward(head)
    if not is_chunked(model):
        model.forward = _ChunkedForward(model)
    return model


def is_chunked(model: nn.Module) -> bool:
    """Whether `chunk_cross_entropy` has changed the model."""
    function = getattr(vars(model).get("forward"), "__func__", None)
    return getattr(function, "is_chunked", False)


@contextmanager
def noted_losses(model: Any) -> Iterator[list[Tensor]]:
    """Context in which a model of `chunk_cross_entropy` notes the loss of each position.

    Yields:
        One tensor for each forward with a loss: (batch · tokens,), fp32; 0 where a label is ignored.
    """
    forward = vars(model.get_output_embeddings())["forward"]
    found: list[Tensor] = []
    forward.note = found.append
    try:
        yield found
    finally:
        forward.note = None


def sum_of_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORED_LABEL,
    note: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Sum over the tokens of −log softmax(hidden · weightᵀ)[target], differentiable once.

    Args:
        hidden: (tokens, features).
        weight: (vocabulary, features).
        targets: (tokens,), int64.
        ignore_index: a target with this value counts as 0.
        note: called with the loss of each token, (tokens,).

    Returns:
        0-dim, fp32 (fp64 for fp64).

    Raises:
        UserError: the targets are not int64, or not one for each token; hidden and weight have different
            dtypes without autocast; or a transform of `torch.func` or a forward-mode derivative is active.
    """
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:1]:
        raise UserError(
            f"labels must be int64, one for each of {hidden.shape[0]} tokens, not {targets.dtype} for "
            f"{targets.numel()}: convert them with .long(), and give input_ids and labels of one shape"
        )
    if not torch.compiler.is_compiling():
        reject_transforms(lambda: (hidden, weight), "chunked_cross_entropy", WHOLE_LOGITS)
    dtype = autocast_dtype(hidden.device.type)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    elif hidden.dtype != weight.dtype:  # nn.Linear takes no such pair either
        raise UserError(
            f"the output projection expects hidden states in its {weight.dtype}, not {hidden.dtype}: convert "
            "them, or use autocast"
        )
    total: Tensor = _SumOfLosses.apply(hidden, weight, targets, ignore_index, note)
    return total


class _SumOfLosses(torch.autograd.Function):
    """See `sum_of_losses`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        note: Callable[[Tensor], None] | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        is_counted = targets != ignore_index
        known = torch.where(is_counted, targets, 0)
        # a target outside the vocabulary fails in this gather, as in nll_loss; on CUDA without a host read
        of_target = torch.zeros(weight.shape[0], dtype=wide, device=weight.device).gather(0, known)
        log_sum = torch.full_like(of_target, -torch.inf)
        with no_autocast(hidden.device.type):
            for start, rows in _chunks(weight, hidden.shape[0]):
                logits = (hidden @ rows.T).to(wide)  # (tokens, chunk)
                log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1))
                is_inside, column = _place(known, start, rows)
                of_target = torch.where(is_inside, logits.gather(1, column)[:, 0], of_target)
        ctx.save_for_backward(hidden, weight, known, is_counted, log_sum)
        losses = torch.where(is_counted, log_sum - of_target, 0)
        if note is not None:
            note(losses)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(grad_loss, "chunked_cross_entropy", WHOLE_LOGITS)
        hidden, weight, known, is_counted, log_sum = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        factors = torch.where(is_counted, grad_loss, 0)[:, None]  # (tokens, 1), with the loss scale
        with no_autocast(hidden.device.type):
            for start, rows in _chunks(weight, hidden.shape[0]):
                gradient = (hidden @ rows.T).to(log_sum.dtype).sub_(log_sum[:, None]).exp_()  # probabilities
                is_inside, column = _place(known, start, rows)
                own = gradient.gather(1, column)
                gradient.scatter_(1, column, own - is_inside[:, None].to(own.dtype))
                grad_logits = gradient.mul_(factors).to(hidden.dtype)  # (tokens, chunk)
                del gradient
                if grad_hidden is not None:
                    grad_hidden += grad_logits @ rows
                if grad_weight is not None:
                    stop = start + rows.shape[0]
                    torch.mm(grad_logits.T, hidden, out=grad_weight[start:stop])
        narrow = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return narrow, grad_weight, None, None, None


def chunk_size(num_tokens: int) -> int:
    """Rows of the weight in a chunk, for a micro-batch of so many tokens."""
    return max(ALIGNMENT, CHUNK_ELEMENTS // max(1, num_tokens) // ALIGNMENT * ALIGNMENT)


def _chunks(weight: Tensor, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """The weight's rows in chunks, each with the index of its first row."""
    size = chunk_size(num_tokens)
    for start in range(0, weight.shape[0], size):
        yield start, weight[start : start + size]


def _place(targets: Tensor, start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each target is in the chunk (tokens,), and its column there (tokens, 1), else any column."""
    column = targets - start
    is_inside = (column >= 0) & (column < rows.shape[0])
    return is_inside, column.clamp(0, rows.shape[0] - 1)[:, None]


def _head_forward(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor | None = None,
    ignore_index: int = IGNORED_LABEL,
    size: int | None = None,
) -> Tensor:
    """Logits, as before; with targets (…,), the sum of their losses over the first `size` tokens.

    The loss is computed in the module's forward, because ZeRO 3 gathers its weight there and in its backward.
    """
    if targets is None:
        return type(head).forward(head, hidden)
    note = getattr(vars(head).get("forward"), "note", None)
    weight = head.weight if size is None else head.weight[:size]  # a slice's gradient would be copied
    return sum_of_losses(
        hidden.flatten(0, -2), weight, targets.flatten(), ignore_index=ignore_index, note=note
    )


class _ChunkedForward:
    """The forward of a model or its head, like a bound method, which could not be pickled."""

    def __init__(self, module: Any) -> None:
        is_head = type(module) is nn.Linear
        self.__self__ = module
        self.note: Callable[[Tensor], None] | None = None  # of a head; see `noted_losses`
        # Accelerate looks for it, and binds a function in which it has wrapped it
        self.__func__ = _head_forward if is_head else _forward_like(type(module).forward)
        self.__signature__ = inspect.signature(MethodType(self.__func__, module))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__func__(self.__self__, *args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: the module's copy gets a forward of its own."""
        return type(self), (self.__self__,)


def _forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of `original`, with its signature: Trainer drops columns it does not name."""
    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())[1:]  # without `self`
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    def forward(model: Any, *args: Any, **options: Any) -> Any:
        if len(args) > len(names):
            return original(model, *args, **options)  # raises
        return _model_forward(model, **dict(zip(names, args, strict=False)), **options)

    # not `__wrapped__`: Accelerate would restore the innermost function when it unwraps a model
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.is_chunked = True  # type: ignore[attr-defined]
    return forward


def _model_forward(
    model: Any, *, labels: Tensor | None = None, needs_logits: bool | None = None, **options: Any
) -> Any:
    """The model's forward; in training with `labels`, through `_head_forward` with targets.

    `needs_logits=False` does so in evaluation, too (see `token_losses`).
    """
    needs_logits = (
        (not model.training if needs_logits is None else needs_logits)
        or options.get("logits_to_keep", 0) not in (0, None)
        or options.get("return_dict", model.config.return_dict) is False
    )
    if labels is None or needs_logits:
        return type(model).forward(model, labels=labels, **options)
    _check_loss(model)
    head = model.get_output_embeddings()
    _check_head(head)
    options.pop("logits_to_keep", None)
    count = options.pop("num_items_in_batch", None)
    shifted = options.pop("shift_labels", None)
    ignore_index = options.pop("ignore_index", IGNORED_LABEL)
    found = model.base_model(**{**options, "return_dict": True})
    if shifted is None:  # the token at position n predicts the label at n + 1
        shifted = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    hidden = found.last_hidden_state
    shifted = shifted.to(hidden.device)
    # in evaluation without the rows that pad the vocabulary
    size = None if model.training else unpadded_size(model.config)
    total = head(hidden, shifted, ignore_index, size)
    if count is None:
        count = (shifted != ignore_index).sum()
    elif isinstance(count, Tensor):
        count = count.to(total.device)
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    return CausalLMOutputWithCrossAttentions(
        loss=total / count,
        past_key_values=found.past_key_values,
        hidden_states=found.hidden_states,
        attentions=found.attentions,
        cross_attentions=found.get("cross_attentions"),
    )


def _check_loss(model: Any) -> None:
    """Reject a model with a loss other than the cross entropy of the next token."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        name = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        raise UserError(
            f"chunked_cross_entropy computes the cross entropy of the next token, but the loss of "
            f"{type(model).__name__} is {name}: set it to false"
        )


def _check_head(head: nn.Module) -> None:
    """Reject a replaced output projection, and hooks that would see losses instead of logits."""
    if "forward" not in vars(head):
        raise UserError(
            "the output projection has been replaced since chunk_cross_entropy changed the model: call it "
            "again"
        )
    for hook in (*head._forward_hooks.values(), *head._backward_hooks.values()):
        origin = str(getattr(getattr(hook, "func", hook), "__module__", ""))
        if origin.partition(".")[0] not in LIBRARIES:
            raise UserError(
                f"chunked_cross_entropy: a hook of the output projection ({shown(hook)}) would see the sum "
                "of the losses instead of the logits: remove it, or set chunked_cross_entropy to false"
            )


def _check_forward(model: Any) -> None:
    """Reject a model that may do more than project: scale or cap its logits, or add to the loss."""
    config, origin = getattr(model, "config", None), type(model).forward.__module__
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES or not origin.startswith("transformers.models."):
        raise UserError(
            f"chunked_cross_entropy knows the forward of transformers' models {', '.join(FAMILIES)}, but not "
            f"that of {type(model).__name__} (model_type {kind!r}, {origin}), which may scale its logits or "
            "add to the loss: set it to false"
        )
