"""Who may look at whom: packed documents, answer branches, and cached rows, behind one function `attend`.

Shapes: B rows  S sequence  H query heads  K kv heads  E head_dim  N = B*S tokens  R cache rows  T cached positions.
Head h reads kv head h // (H/K) (grouped-query attention). Scale 1/sqrt(E). Softmax in the input dtype's SDPA arithmetic.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from kernels.gt_score import Plan, branch_attention, plan_rows
from kernels.launch import choose_kernel
from venus.cache import KVCache

TAIL_ROWS = 1024  # rows of one mask, when a chunk of a sequence looks back at what came before: more would be quadratic in memory


class Span(NamedTuple):
    """Rows [start, end) of the packed sequence; row r sees the keys [doc, pre) and [start, r]."""

    start: int
    end: int
    doc: int
    pre: int


@dataclass(frozen=True)
class Layout:
    """The visibility of a packed sequence of N tokens, as spans that cover it in order.

    A document is a span without a prefix (doc == pre). An answer branch cut at c is a span with the prefix [doc, doc + c) of its document: it sees the
    trunk up to the cut and itself, never another branch. With a cache, the tokens at hand are rows `first` and on; the rows before are in the cache.
    """

    spans: tuple[Span, ...]
    first: int = 0

    @staticmethod
    def documents(lengths: Sequence[int]) -> "Layout":
        """Causal documents packed one after the other."""
        spans, start = [], 0
        for length in lengths:
            spans.append(Span(start, start + length, start, start))
            start += length
        return Layout(tuple(spans))


@dataclass(frozen=True)
class CachedLayout:
    """New tokens of some cache rows, packed in the order of `rows`: `counts[i]` tokens for row `rows[i]`, placed after its `past[i]` cached ones."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    past: tuple[int, ...]
    rows_N: Tensor
    positions_N: Tensor
    decode_bias_R11T: Tensor | None  # the batched path, one new token in each row 0..R-1: 0 where a row sees a cached position, else -inf

    @staticmethod
    def of(cache: KVCache, rows: Sequence[int], counts: Sequence[int], device: torch.device | str = "cpu") -> "CachedLayout":
        """Plan `counts[i]` new tokens for each row of `rows`; the caller advances the cache afterwards. ValueError beyond the capacity."""
        past = [cache.lengths[row] for row in rows]
        cache.reserve(max((start + count for start, count in zip(past, counts, strict=True)), default=0))
        rows_N = torch.tensor([row for row, count in zip(rows, counts, strict=True) for _ in range(count)], device=device)
        positions_N = torch.tensor([p + i for p, count in zip(past, counts, strict=True) for i in range(count)], device=device)
        bias = None
        if list(rows) == list(range(len(cache.lengths))) and all(count == 1 for count in counts):
            # rounded up so that the shapes, and with them the last bits, hardly depend on the batch mates
            width = min(-(-(max(past) + 1) // 64) * 64, cache.keys_RKTE[0].shape[2])
            hidden = (torch.arange(width, device=device) > positions_N[:, None])[:, None, None]
            bias = torch.zeros(hidden.shape, dtype=cache.keys_RKTE[0].dtype, device=device).masked_fill_(hidden, float("-inf"))
        return CachedLayout(tuple(rows), tuple(counts), tuple(past), rows_N, positions_N, bias)


class Documents(NamedTuple):
    """Packed documents as flash attention wants them: where each starts and the last one ends (int32, on the device), and the longest length."""

    starts: Tensor
    longest: int


def plan_attention(
    layout: Layout | CachedLayout | None, x_BSD: Tensor, num_groups: int, kernel: str, cache: KVCache | None = None
) -> Layout | CachedLayout | Plan | Documents | None:
    """Decide once for all layers what `attend` runs on packed spans. A Layout stays itself where torch's SDPA serves, span by span.

    On CUDA in bf16 or fp16, documents go through flash attention (with or without gradients); branches, and rows that go into a cache, through the
    branch kernel when `kernel` is "auto" or "triton" and no gradient is wanted.
    """
    if not isinstance(layout, Layout):
        return layout
    is_half = x_BSD.dtype in (torch.bfloat16, torch.float16)
    is_plain = cache is None and all(doc == pre for _, _, doc, pre in layout.spans)
    if is_plain and x_BSD.is_cuda and is_half:
        ends = [end for _, end, _, _ in layout.spans]
        starts = torch.tensor([0, *ends], dtype=torch.int32).to(x_BSD.device)
        return Documents(starts, max(end - start for start, end, _, _ in layout.spans))
    may_use_triton = kernel == "triton" or is_half  # "triton" in fp32 is right under the interpreter, and an error on CUDA
    if not is_plain and may_use_triton and choose_kernel(kernel, x_BSD.device) == "triton" and not torch.is_grad_enabled():
        return plan_rows(layout.spans, num_groups, x_BSD.device, first_row=layout.first, num_rows=x_BSD.shape[0] * x_BSD.shape[1])
    return layout


@functools.cache
def varlen_keywords() -> dict:
    """The keywords that make `varlen_attn` causal and grouped in this version of torch. ValueError when it cannot be."""
    parameters = inspect.signature(varlen.varlen_attn).parameters
    if "window_size" not in parameters:
        raise ValueError(f"torch {torch.__version__}: torch.nn.attention.varlen.varlen_attn has no keyword window_size; torch 2.11 or newer is needed")
    grouped = {"enable_gqa": True} if "enable_gqa" in parameters else {}  # before it had this keyword, it took fewer kv heads without being told
    return {"window_size": (-1, 0)} | grouped


def attend(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, layout: Layout | CachedLayout | Plan | Documents | None, cache: KVCache | None = None, layer: int = 0
) -> Tensor:
    """Return the attention output, [B, S, H, E].

    layout None: each of the B rows is one causal document. Layout, or what `plan_attention` made of it: the B*S tokens are packed spans, whose
    earlier rows are in `cache` if there is one. CachedLayout: B*S new tokens extend `cache`. New keys and values of layer `layer` are written first.
    """
    if layout is None:
        out_BHSE = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE)), is_causal=True, enable_gqa=True)
        return out_BHSE.transpose(1, 2)
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    if isinstance(layout, Documents):
        starts, longest = layout
        out_NHE = varlen.varlen_attn(q_NHE, k_NKE, v_NKE, starts, starts, longest, longest, **varlen_keywords())
    elif isinstance(layout, Plan):
        out_NHE, _ = branch_attention(q_NHE, *_with_earlier(k_NKE, v_NKE, layout.first_row, cache, layer), layout)
    elif isinstance(layout, Layout):
        out_NHE = _attend_spans(q_NHE, *_with_earlier(k_NKE, v_NKE, layout.first, cache, layer), layout)
    else:
        assert cache is not None, "a CachedLayout needs its cache"
        cache.write(layer, layout.rows_N, layout.positions_N, k_NKE, v_NKE)
        keys_RKTE, values_RKTE = cache.keys_RKTE[layer], cache.values_RKTE[layer]
        if layout.decode_bias_R11T is not None:
            out_NHE = _attend_decode(q_NHE, keys_RKTE, values_RKTE, layout.decode_bias_R11T)
        else:
            out_NHE = _attend_rows(q_NHE, keys_RKTE, values_RKTE, layout)
    return out_NHE.view(q_BSHE.shape)


def _with_earlier(k_NKE: Tensor, v_NKE: Tensor, first: int, cache: KVCache | None, layer: int) -> tuple[Tensor, Tensor]:
    """Write the keys and values of rows first.. into row 0 of the cache and return those of all rows so far; without a cache there is nothing before."""
    if cache is None:
        assert first == 0, f"rows from {first} on need the cache with the rows before"
        return k_NKE, v_NKE
    stop = first + len(k_NKE)
    for buffer_RKTE, new_NKE in ((cache.keys_RKTE[layer], k_NKE), (cache.values_RKTE[layer], v_NKE)):
        buffer_RKTE[0, :, first:stop] = new_NKE.transpose(0, 1)
    return tuple(buffers[layer][0, :, :stop].transpose(0, 1) for buffers in (cache.keys_RKTE, cache.values_RKTE))


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
        outputs.append(_causal_tail(q_SHE.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)).transpose(0, 1))
    return torch.cat(outputs)


def _attend_rows(q_NHE: Tensor, keys_RKTE: Tensor, values_RKTE: Tensor, layout: CachedLayout) -> Tensor:
    outputs, start = [], 0
    for row, count, past in zip(layout.rows, layout.counts, layout.past, strict=True):
        end = past + count
        q_HSE = q_NHE[start : start + count].transpose(0, 1)
        outputs.append(_causal_tail(q_HSE, keys_RKTE[row, :, :end], values_RKTE[row, :, :end]).transpose(0, 1))
        start += count
    return torch.cat(outputs)


def _causal_tail(q_HSE: Tensor, k_KTE: Tensor, v_KTE: Tensor) -> Tensor:
    """The last S of T positions attend to everything at or before themselves."""
    num_new, num_keys = q_HSE.shape[1], k_KTE.shape[1]
    if TAIL_ROWS < num_new < num_keys:
        stops = [(start, num_keys - num_new + min(start + TAIL_ROWS, num_new)) for start in range(0, num_new, TAIL_ROWS)]
        return torch.cat([_causal_tail(q_HSE[:, start : start + TAIL_ROWS], k_KTE[:, :stop], v_KTE[:, :stop]) for start, stop in stops], dim=1)
    mask_ST = None
    if 1 < num_new < num_keys:  # is_causal aligns top-left, which is wrong for a tail
        mask_ST = torch.ones(num_new, num_keys, dtype=torch.bool, device=q_HSE.device).tril(num_keys - num_new)
    return F.scaled_dot_product_attention(
        q_HSE[None], k_KTE[None], v_KTE[None], attn_mask=mask_ST, is_causal=num_new == num_keys, enable_gqa=True
    )[0]


def _attend_decode(q_RHE: Tensor, keys_RKTE: Tensor, values_RKTE: Tensor, bias_R11T: Tensor) -> Tensor:
    """One query a row. The H/K heads of a group become the query axis, so no key is repeated for its group."""
    num_kv_heads, width = keys_RKTE.shape[1], bias_R11T.shape[-1]
    q_RKGE, keys_RKTE, values_RKTE = q_RHE.unflatten(1, (num_kv_heads, -1)), keys_RKTE[:, :, :width], values_RKTE[:, :, :width]
    if q_RHE.is_cuda:
        out_RKGE = F.scaled_dot_product_attention(q_RKGE, keys_RKTE, values_RKTE, attn_mask=bias_R11T)
    else:  # two batched products: SDPA's CPU kernel takes 1.2 to 1.9 times as long at 1K positions
        scores_RKGT = torch.bmm(q_RKGE.flatten(0, 1), keys_RKTE.flatten(0, 1).mT).view(*q_RKGE.shape[:3], width)
        probs_RKGT = torch.softmax(scores_RKGT * q_RHE.shape[-1] ** -0.5 + bias_R11T, dim=-1)
        out_RKGE = torch.bmm(probs_RKGT.flatten(0, 1), values_RKTE.flatten(0, 1)).view(q_RKGE.shape)
    return out_RKGE.flatten(1, 2)
