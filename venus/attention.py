"""Who may look at whom: packed documents, answer branches, and cached rows, behind one function `attend`.

Shapes: B rows  S sequence  H query heads  K kv heads  E head_dim  N = B*S tokens  R cache rows  T cached positions.
Head h reads kv head h // (H/K) (grouped-query attention). Scale 1/sqrt(E). Softmax in the input dtype's SDPA arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from venus.cache import KVCache


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
    trunk up to the cut and itself, never another branch.
    """

    spans: tuple[Span, ...]

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


def attend(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, layout: Layout | CachedLayout | None, cache: KVCache | None = None, layer: int = 0
) -> Tensor:
    """Return the attention output, [B, S, H, E].

    layout None: each of the B rows is one causal document. Layout: the B*S tokens are packed spans. CachedLayout: B*S new tokens extend `cache`,
    where layer `layer`'s keys and values are written first.
    """
    if layout is None:
        out_BHSE = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE)), is_causal=True, enable_gqa=True)
        return out_BHSE.transpose(1, 2)
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    if isinstance(layout, Layout):
        assert cache is None, "packed spans do not read a cache"
        out_NHE = _attend_spans(q_NHE, k_NKE, v_NKE, layout.spans)
    else:
        assert cache is not None, "a CachedLayout needs its cache"
        cache.write(layer, layout.rows_N, layout.positions_N, k_NKE, v_NKE)
        keys_RKTE, values_RKTE = cache.keys_RKTE[layer], cache.values_RKTE[layer]
        if layout.decode_bias_R11T is not None:
            out_NHE = _attend_decode(q_NHE, keys_RKTE, values_RKTE, layout.decode_bias_R11T)
        else:
            out_NHE = _attend_rows(q_NHE, keys_RKTE, values_RKTE, layout)
    return out_NHE.view(q_BSHE.shape)


def _attend_spans(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, spans: tuple[Span, ...]) -> Tensor:
    outputs = []
    for start, end, doc, pre in spans:
        keys, values = k_NKE[start:end], v_NKE[start:end]
        if pre > doc:
            keys, values = torch.cat([k_NKE[doc:pre], keys]), torch.cat([v_NKE[doc:pre], values])
        outputs.append(_causal_tail(q_NHE[start:end].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)).transpose(0, 1))
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
    mask_ST = None
    if 1 < num_new < num_keys:  # is_causal aligns top-left, which is wrong for a tail
        mask_ST = torch.ones(num_new, num_keys, dtype=torch.bool, device=q_HSE.device).tril(num_keys - num_new)
    return F.scaled_dot_product_attention(
        q_HSE[None], k_KTE[None], v_KTE[None], attn_mask=mask_ST, is_causal=num_new == num_keys, enable_gqa=True
    )[0]


def _attend_decode(q_RHE: Tensor, keys_RKTE: Tensor, values_RKTE: Tensor, bias_R11T: Tensor) -> Tensor:
    """One query a row. The H/K heads of a group become the query axis, so no key is repeated for its group."""
    num_kv_heads, width = keys_RKTE.shape[1], bias_R11T.shape[-1]
    q_RKGE = q_RHE.unflatten(1, (num_kv_heads, -1))
    out_RKGE = F.scaled_dot_product_attention(q_RKGE, keys_RKTE[:, :, :width], values_RKTE[:, :, :width], attn_mask=bias_R11T)
    return out_RKGE.flatten(1, 2)
