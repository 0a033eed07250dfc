"""Who may look at whom: packed documents, answer branches, and cached rows, behind
one function `attend`.

Shapes: B rows  S sequence  H query heads  K kv heads  E head_dim  N = B*S tokens  R cache rows
        T cached positions.
Head h reads kv head h // (H/K) (grouped-query attention). Scale 1/sqrt(E). Softmax in the input
dtype's SDPA arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launch import choose_kernel
from venus.model.cache import KVCache
from venus.model.decode import CachedLayout, attend_cached, causal_tail, varlen_keywords

if TYPE_CHECKING:  # slow to import, with Triton
    from kernels.gt_score import Plan


class Span(NamedTuple):
    """Rows [start, end) of the packed sequence; row r sees the keys [doc, pre) and [start, r]."""

    start: int
    end: int
    doc: int
    pre: int


@dataclass(frozen=True)
class Layout:
    """The visibility of a packed sequence of N tokens, as spans that cover it in order.

    A document is a span without a prefix (doc == pre). An answer branch cut at c is a span with the
    prefix [doc, doc + c) of its document: it sees the trunk up to the cut and itself, never another
    branch. With a cache, the tokens at hand are rows `first` and on; the rows before are in the
    cache.

    Under sequence parallelism a rank has some of the N tokens. to_heads(q, k, v) then trades them
    for all tokens of some heads, and to_sequence(out) trades back. `parallel` sets both; a rank on
    its own has all tokens already.
    """

    spans: tuple[Span, ...]
    first: int = 0
    to_heads: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = field(
        default=lambda *qkv: qkv, repr=False
    )
    to_sequence: Callable[[Tensor], Tensor] = field(default=lambda out: out, repr=False)

    @staticmethod
    def documents(lengths: Sequence[int]) -> "Layout":
        """Causal documents packed one after the other."""
        spans, start = [], 0
        for length in lengths:
            spans.append(Span(start, start + length, start, start))
            start += length
        return Layout(tuple(spans))


class Documents(NamedTuple):
    """Packed documents as flash attention wants them: where each starts and the last one ends
    (int32, on the device), and the longest length.
    """

    starts: Tensor
    longest: int
    to_heads: Callable
    to_sequence: Callable


def plan_attention(
    layout: Layout | CachedLayout | None,
    x_BSD: Tensor,
    num_groups: int,
    kernel: str,
    cache: KVCache | None = None,
) -> "Layout | CachedLayout | Plan | Documents | None":
    """Decide once for all layers what `attend` runs on packed spans. A Layout stays itself where
    torch's SDPA serves, span by span.

    On CUDA in bf16 or fp16, documents go through flash attention (with or without gradients);
    branches, and rows that go into a cache, through the branch kernel when `kernel` is "auto" or
    "triton" and no gradient is wanted.
    """
    if not isinstance(layout, Layout):
        return layout
    is_half = x_BSD.dtype in (torch.bfloat16, torch.float16)
    is_plain = cache is None and all(doc == pre for _, _, doc, pre in layout.spans)
    if is_plain and x_BSD.is_cuda and is_half:
        ends = [end for _, end, _, _ in layout.spans]
        starts = torch.tensor([0, *ends], dtype=torch.int32).to(x_BSD.device)
        longest = max(end - start for start, end, _, _ in layout.spans)
        return Documents(starts, longest, layout.to_heads, layout.to_sequence)
    # "triton" in fp32 is right under the interpreter, and an error on CUDA
    may_use_triton = kernel == "triton" or is_half
    if is_plain or not may_use_triton or choose_kernel(kernel, x_BSD.device) == "torch":
        return layout
    if torch.is_grad_enabled():  # the kernel has no backward
        return layout
    from kernels.gt_score import plan_rows

    rows = {"first_row": layout.first, "num_rows": x_BSD.shape[0] * x_BSD.shape[1]}
    return plan_rows(layout.spans, num_groups, x_BSD.device, **rows)


def attend(
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    layout: "Layout | CachedLayout | Plan | Documents | None",
    cache: KVCache | None = None,
    layer: int = 0,
) -> Tensor:
    """Return the attention output, [B, S, H, E].

    layout None: each of the B rows is one causal document. Layout, or what `plan_attention` made of
    it: the B*S tokens are packed spans, whose earlier rows are in `cache` if there is one.
    CachedLayout: B*S new tokens extend `cache`. New keys and values of layer `layer` are written
    first.
    """
    if layout is None:
        out_BHSE = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE)), is_causal=True, enable_gqa=True
        )
        return out_BHSE.transpose(1, 2)
    is_packed = isinstance(layout, Layout | Documents)
    if is_packed:
        q_BSHE, k_BSKE, v_BSKE = layout.to_heads(q_BSHE, k_BSKE, v_BSKE)
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    if isinstance(layout, Documents):
        from torch.nn.attention.varlen import varlen_attn  # slow to import

        places = (layout.starts, layout.starts, layout.longest, layout.longest)
        out_NHE = varlen_attn(q_NHE, k_NKE, v_NKE, *places, **varlen_keywords())
    elif isinstance(layout, Layout):
        keys_values = _with_earlier(k_NKE, v_NKE, layout.first, cache, layer)
        out_NHE = _attend_spans(q_NHE, *keys_values, layout)
    elif isinstance(layout, CachedLayout):
        assert cache is not None, "a CachedLayout needs its cache"
        count = len(layout.places_NK)
        cache.write(layer, layout.places_NK, k_NKE[:count], v_NKE[:count])
        out_NHE = attend_cached(q_NHE, layout, cache, layer)
    else:
        from kernels.gt_score import branch_attention

        keys_values = _with_earlier(k_NKE, v_NKE, layout.first_row, cache, layer)
        out_NHE, _ = branch_attention(q_NHE, *keys_values, layout)
    out_BSHE = out_NHE.view(q_BSHE.shape)
    return layout.to_sequence(out_BSHE) if is_packed else out_BSHE


def _with_earlier(
    k_NKE: Tensor, v_NKE: Tensor, first: int, cache: KVCache | None, layer: int
) -> tuple[Tensor, Tensor]:
    """Write the keys and values of rows first.. into row 0 of the cache and return those of all
    rows so far; without a cache there is nothing before.
    """
    if cache is None:
        assert first == 0, f"rows from {first} on need the cache with the rows before"
        return k_NKE, v_NKE
    keys_TKE, values_TKE = (
        buffers[layer][0].transpose(0, 1)[: first + len(k_NKE)] for buffers in cache.buffers
    )
    keys_TKE[first:], values_TKE[first:] = k_NKE, v_NKE
    return keys_TKE, values_TKE


def _attend_spans(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, layout: Layout) -> Tensor:
    """Span by span, over the rows from layout.first on; k and v hold all rows so far."""
    outputs = []
    for span_start, span_end, doc, pre in layout.spans:
        start, end = max(span_start, layout.first), min(span_end, layout.first + len(q_NHE))
        if start >= end:
            continue
        keys, values = k_NKE[span_start:end], v_NKE[span_start:end]
        if pre > doc:
            keys, values = torch.cat([k_NKE[doc:pre], keys]), torch.cat([v_NKE[doc:pre], values])
        q_SHE = q_NHE[start - layout.first : end - layout.first]
        out_HSE = causal_tail(*(x.transpose(0, 1) for x in (q_SHE, keys, values)))
        outputs.append(out_HSE.transpose(0, 1))
    return torch.cat(outputs)
