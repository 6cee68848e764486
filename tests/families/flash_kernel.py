"""The kernels of flash-attn on a CPU: the same functions with plain attention, one document after another.

Everything else is transformers' own: how it chooses a kernel, and what it passes on.
"""

from itertools import pairwise

import torch
from transformers import PreTrainedModel, modeling_flash_attention_utils

NAME = "flash_attention_2"


class FlashKernel:
    """What transformers imports from flash-attn.

    Attributes:
        calls: the bounds of documents in each call with them; None for one without.
        dtypes: of all operands.
        is_deterministic: of the last call.
    """

    def __init__(self):
        self.calls, self.dtypes, self.is_deterministic = [], set(), None

    def varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        """`flash_attn_varlen_func`: (tokens, heads, features), and int32 bounds."""
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert not dropout_p
        self.dtypes |= {q.dtype, k.dtype, v.dtype}
        self.is_deterministic = deterministic
        if q.is_meta:
            return q * k.sum() * v.sum()
        self.calls.append(cu_seqlens_q.tolist())
        assert self.calls[-1] == cu_seqlens_k.tolist()
        assert self.calls[-1][0] == 0
        assert self.calls[-1][-1] == len(q) == len(k) == len(v)
        assert max_seqlen_q == max_seqlen_k == max(stop - start for start, stop in pairwise(self.calls[-1]))
        documents = [slice(*bounds) for bounds in pairwise(self.calls[-1])]
        options = {"scale": softmax_scale, "causal": causal, "window": window_size}
        return torch.cat([attention(q[each], k[each], v[each], **options) for each in documents])

    def dense(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        deterministic=False,
    ):  # fmt: skip
        """`flash_attn_func`: (rows, tokens, heads, features)."""
        self.calls.append(None)
        if q.is_meta:
            return q * k.sum() * v.sum()
        options = {"scale": softmax_scale, "causal": causal, "window": window_size}
        return torch.stack([attention(*row, **options) for row in zip(q, k, v, strict=True)])


def attention(q, k, v, *, scale, causal, window):
    """Of one sequence, (tokens, heads, features); groups of heads of `q` share one of `k` and `v`."""
    assert causal
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance > window[0] if window[0] >= 0 else distance < 0)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def install(monkeypatch):
    """Let transformers find the kernels; returns them."""
    kernel, place = FlashKernel(), modeling_flash_attention_utils
    functions = (kernel.dense, kernel.varlen, None, place._pad_input, place._unpad_input)
    monkeypatch.setattr(place, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(place, "_loaded_implementation", None)  # and what was loaded is not used afterwards
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    return kernel
