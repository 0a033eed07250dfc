"""How new tokens of some rows attend to what a cache holds of those rows.

Shapes: H query heads  K kv heads  E head_dim  N new tokens  R cache rows  T cached positions  W pages of a row.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from kernels.paged_decode import paged_decode
from venus.cache import KVCache, PagedKVCache

BLOCK_ROWS = 8  # neighbours decoded in one product: fewer cost more calls, more read up to the longest of more rows
TAIL_ROWS = 1024  # rows of one mask, when a chunk of a sequence looks back at what came before: more would be quadratic in memory


class Block(NamedTuple):
    """Cache rows [start, end), one query each: bias is 0 where a row sees a cached position, else -inf."""

    start: int
    end: int
    bias_R11T: Tensor


class RowBlocks(NamedTuple):
    """Single new tokens over contiguous rows, attended in blocks of at most BLOCK_ROWS neighbours, each as wide as its longest row.

    tokens_R: the token of every row of the blocks (any, where a row has none); rows_N: where token n's row stands in the blocks.
    """

    blocks: list[Block]
    tokens_R: Tensor
    rows_N: Tensor


class PageTables(NamedTuple):
    """New tokens over pages: the pages of each row (int32), its length with the new tokens (int32), and which kernel attends one new token a row.

    starts: where the tokens of each row begin and the last ones end; only for several tokens a row, through flash attention.
    """

    tables_RW: Tensor
    lengths_R: Tensor
    kernel: str
    starts: Tensor | None = None
    longest: int = 1


@dataclass(frozen=True)
class CachedLayout:
    """New tokens of some cache rows, packed in the order of `rows`: `counts[i]` tokens for row `rows[i]`, placed after its `past[i]` cached ones.

    The leading rows with one token each are attended together as `singles` says, the others by flash attention (`chunks`) or row by row. Tokens
    beyond the sum of the counts are padding: nothing of them is kept.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    past: tuple[int, ...]
    num_singles: int
    positions_N: Tensor
    places: Tensor
    singles: RowBlocks | PageTables | None
    chunks: PageTables | None

    @staticmethod
    def of(
        cache: KVCache, rows: Sequence[int], counts: Sequence[int], device: torch.device | str = "cpu", *, num_tokens: int = 0, kernel: str = "torch"
    ) -> "CachedLayout":
        """Plan `counts[i]` new tokens for each row of `rows`, padded to `num_tokens`; the caller advances the cache afterwards.

        kernel: how single tokens attend to pages, "triton", "varlen" or "torch". ValueError beyond the capacity.
        """
        past = [cache.lengths[row] for row in rows]
        ends = [start + count for start, count in zip(past, counts, strict=True)]
        cache.reserve_rows(rows, ends)
        num_singles = next((i for i, count in enumerate(counts) if count != 1), len(rows))
        chunks_of = [np.arange(start, end) for start, end in zip(past[num_singles:], ends[num_singles:], strict=True)]
        positions = np.concatenate([np.asarray(past[:num_singles], dtype=np.int64), *chunks_of])
        places = torch.from_numpy(cache.places(np.repeat(rows, counts), positions)).to(device)
        positions_N = torch.zeros(max(num_tokens, len(positions)), dtype=torch.int64)
        positions_N[: len(positions)] = torch.from_numpy(positions)
        positions_N = positions_N.to(device)
        singles = chunks = None
        if isinstance(cache, PagedKVCache):
            if num_singles:
                singles = _page_tables(cache, rows[:num_singles], ends[:num_singles], device, kernel)
            if num_singles < len(rows) and chunk_kernel(device, cache.pages.dtype) == "varlen":
                tables = _page_tables(cache, rows[num_singles:], ends[num_singles:], device, "varlen")
                starts = np.cumsum([0, *counts[num_singles:]], dtype=np.int32)
                chunks = tables._replace(starts=torch.from_numpy(starts).to(device), longest=max(counts))
        elif num_singles:
            singles = _row_blocks(cache, rows[:num_singles], ends[:num_singles], device)
        return CachedLayout(tuple(rows), tuple(counts), tuple(past), num_singles, positions_N, places, singles, chunks)


def _page_tables(cache: PagedKVCache, rows: Sequence[int], lengths: Sequence[int], device: torch.device | str, kernel: str) -> PageTables:
    width = -(-max(lengths) // cache.page_size)
    return PageTables(torch.from_numpy(cache.tables_RW[list(rows), :width]).to(device), torch.tensor(lengths, dtype=torch.int32).to(device), kernel)


def _row_blocks(cache: KVCache, rows: Sequence[int], lengths: Sequence[int], device: torch.device | str) -> RowBlocks:
    num_rows, _, allocated, _ = cache.keys_RKTE[0].shape
    # a row without a new token sees something, too: a softmax over nothing would be NaN
    visible, token_of, place_of = np.ones(num_rows, np.int64), np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    visible[list(rows)], token_of[list(rows)] = lengths, np.arange(len(rows))
    spans = []
    for row in sorted(rows):
        if spans and row < spans[-1][0] + BLOCK_ROWS and row <= spans[-1][1] + 1:  # one idle row between costs less than another call
            spans[-1][1] = row + 1
        else:
            spans.append([row, row + 1])
    # rounded up so that the last bits hardly depend on the batch mates
    widths = [min(-(-int(visible[start:end].max()) // 32) * 32, allocated) for start, end in spans]
    members = np.concatenate([np.arange(start, end) for start, end in spans])
    place_of[members] = np.arange(len(members))
    bias = np.where(np.arange(max(widths)) < visible[:, None, None, None], np.float32(0), -np.float32(np.inf))
    bias_R11T = torch.from_numpy(bias).to(device, cache.keys_RKTE[0].dtype)
    blocks = [Block(start, end, bias_R11T[start:end, :, :, :width]) for (start, end), width in zip(spans, widths, strict=True)]
    return RowBlocks(blocks, torch.from_numpy(token_of[members]).to(device), torch.from_numpy(place_of[list(rows)]).to(device))


def attend_cached(q_NHE: Tensor, layout: CachedLayout, cache: KVCache, layer: int) -> Tensor:
    """Leading single tokens together, then chunks; 0 for the padding."""
    outputs, start = [], layout.num_singles
    if isinstance(layout.singles, RowBlocks):
        outputs.append(_attend_blocks(q_NHE, cache.keys_RKTE[layer], cache.values_RKTE[layer], layout.singles))
    elif layout.singles is not None:
        outputs.append(_attend_pages(q_NHE[:start], cache.keys_PTKE[layer], cache.values_PTKE[layer], layout.singles))
    if layout.chunks is not None:
        stop = sum(layout.counts)
        outputs.append(_attend_pages(q_NHE[start:stop], cache.keys_PTKE[layer], cache.values_PTKE[layer], layout.chunks))
        start = stop
    else:
        for row, count, past in list(zip(layout.rows, layout.counts, layout.past, strict=True))[layout.num_singles :]:
            keys_KTE, values_KTE = cache.read(layer, row, past + count)
            outputs.append(causal_tail(q_NHE[start : start + count].transpose(0, 1), keys_KTE, values_KTE).transpose(0, 1))
            start += count
    if start < len(q_NHE):
        outputs.append(torch.zeros_like(q_NHE[start:]))
    return torch.cat(outputs)


def _attend_pages(q_NHE: Tensor, keys_PTKE: Tensor, values_PTKE: Tensor, pages: PageTables) -> Tensor:
    """New tokens of each row over its pages: our kernel or its torch form for one a row, flash attention for any number."""
    if pages.kernel != "varlen":
        return paged_decode(q_NHE, keys_PTKE, values_PTKE, pages.tables_RW, pages.lengths_R, kernel=pages.kernel)
    starts = pages.starts if pages.starts is not None else torch.arange(len(q_NHE) + 1, dtype=torch.int32, device=q_NHE.device)
    return varlen.varlen_attn(
        q_NHE, keys_PTKE, values_PTKE, starts, None, pages.longest, pages.tables_RW.shape[1] * keys_PTKE.shape[1], seqused_k=pages.lengths_R,
        block_table=pages.tables_RW, **varlen_keywords("block_table"),
    )  # fmt: skip


def _attend_blocks(q_NHE: Tensor, keys_RKTE: Tensor, values_RKTE: Tensor, plan: RowBlocks) -> Tensor:
    q_RKGE, outputs, start = q_NHE.index_select(0, plan.tokens_R).unflatten(1, (keys_RKTE.shape[1], -1)), [], 0
    for first, last, bias_R11T in plan.blocks:  # the H/K heads of a group become the query axis, so no key is repeated for its group
        width = bias_R11T.shape[-1]
        keys, values = keys_RKTE[first:last, :, :width], values_RKTE[first:last, :, :width]
        outputs.append(F.scaled_dot_product_attention(q_RKGE[start : start + last - first], keys, values, attn_mask=bias_R11T))
        start += last - first
    return torch.cat(outputs).flatten(1, 2).index_select(0, plan.rows_N)


def chunk_kernel(device: torch.device | str, dtype: torch.dtype) -> str:
    """How several new tokens of a row attend to pages: "varlen", flash attention for all rows at once, where there is a GPU, half precision and a torch
    that takes pages (2.12), else "torch", row by row."""
    takes_pages = "block_table" in inspect.signature(varlen.varlen_attn).parameters
    return "varlen" if torch.device(device).type == "cuda" and dtype != torch.float32 and takes_pages else "torch"


@functools.cache
def varlen_keywords(*needed: str) -> dict:
    """The keywords that make `varlen_attn` causal and grouped in this version of torch. ValueError when it cannot be, or lacks a `needed` one."""
    parameters = inspect.signature(varlen.varlen_attn).parameters
    for keyword, version in {"window_size": "2.11", "block_table": "2.12"}.items():
        if keyword in {"window_size", *needed} - parameters.keys():
            raise ValueError(f"torch {torch.__version__}: torch.nn.attention.varlen.varlen_attn has no keyword {keyword}; torch {version} or newer is needed")
    grouped = {"enable_gqa": True} if "enable_gqa" in parameters else {}  # before it had this keyword, it took fewer kv heads without being told
    return {"window_size": (-1, 0)} | grouped


def causal_tail(q_HSE: Tensor, k_KTE: Tensor, v_KTE: Tensor) -> Tensor:
    """The last S of T positions attend to everything at or before themselves."""
    num_new, num_keys = q_HSE.shape[1], k_KTE.shape[1]
    if TAIL_ROWS < num_new < num_keys:
        stops = [(start, num_keys - num_new + min(start + TAIL_ROWS, num_new)) for start in range(0, num_new, TAIL_ROWS)]
        return torch.cat([causal_tail(q_HSE[:, start : start + TAIL_ROWS], k_KTE[:, :stop], v_KTE[:, :stop]) for start, stop in stops], dim=1)
    mask_ST = None
    if 1 < num_new < num_keys:  # is_causal aligns top-left, which is wrong for a tail
        mask_ST = torch.ones(num_new, num_keys, dtype=torch.bool, device=q_HSE.device).tril(num_keys - num_new)
    return F.scaled_dot_product_attention(q_HSE[None], k_KTE[None], v_KTE[None], attn_mask=mask_ST, is_causal=num_new == num_keys, enable_gqa=True)[0]
