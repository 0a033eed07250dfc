"""How new tokens of some rows attend to what a cache holds of those rows.

Shapes: H query heads  K kv heads  E head_dim  N new tokens  R cache rows  T cached positions
        W pages of a row.
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

from venus.model.cache import KVCache, PagedKVCache
from venus.model.ragged import RaggedPlan, attend_ragged, plan_ragged

# rows of one mask, when a chunk of a sequence looks back at what came before: more would
# be quadratic in memory
TAIL_ROWS = 1024


class PageTables(NamedTuple):
    """New tokens over pages: the pages of each row (int32), its length with the new tokens (int32),
    and which kernel attends one new token a row.

    starts: where the tokens of each row begin and the last ones end; only for several tokens a row,
    through flash attention.
    """

    tables_RW: Tensor
    lengths_R: Tensor
    kernel: str
    starts: Tensor | None = None
    longest: int = 1


@dataclass(frozen=True)
class CachedLayout:
    """New tokens of some cache rows, packed in the order of `rows`: `counts[i]` tokens for row
    `rows[i]`, placed after its `past[i]` cached ones.

    The leading `num_singles` rows have one token each and are attended together as `singles` says,
    the others by flash attention (`chunks`) or row by row. Tokens beyond the sum of the counts are
    padding: nothing of them is kept. In the last block keys and values are made of all tokens and
    the rest of the `wanted_N` alone, attended as `last` says.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    past: tuple[int, ...]
    num_singles: int
    positions_N: Tensor
    places_NK: Tensor
    singles: RaggedPlan | PageTables | None
    chunks: PageTables | None
    wanted_N: Tensor | None = None
    last: "CachedLayout | None" = None

    @staticmethod
    def of(
        cache: KVCache,
        rows: Sequence[int],
        counts: Sequence[int],
        num_groups: int,
        device: torch.device | str = "cpu",
        *,
        num_tokens: int = 0,
        kernel: str = "torch",
        wanted: Sequence[int] = (),
    ) -> "CachedLayout":
        """Plan `counts[i]` new tokens for each row of `rows`, padded to `num_tokens`; the caller
        advances the cache afterwards. Rows that hold 3 and 5 tokens and get 1 and 2 more: their
        positions_N are 3, 5 and 6, and num_singles is 1.

        num_groups: H/K. kernel: how single tokens attend, "ragged" on the CPU, "triton" or "varlen"
        to pages on CUDA, "torch" anywhere, to contiguous rows one by one. wanted: the tokens whose
        hidden states are read, for "ragged": the last block then makes no others. ValueError beyond
        the capacity.
        """
        past = [cache.lengths[row] for row in rows]
        ends = [start + count for start, count in zip(past, counts, strict=True)]
        cache.reserve_rows(rows, ends)
        row_N = np.repeat(rows, counts)
        position_N = np.arange(len(row_N)) - np.repeat(np.cumsum(counts) - ends, counts)
        padding = (0, max(0, num_tokens - len(row_N)))
        positions_N = F.pad(torch.from_numpy(position_N), padding).to(device)
        places_NK = torch.from_numpy(cache.places(row_N, position_N)).to(device)
        is_paged, num_singles = isinstance(cache, PagedKVCache), 0
        if is_paged or kernel == "ragged":
            num_singles = next((i for i, count in enumerate(counts) if count != 1), len(rows))
        singles = chunks = wanted_N = last = None
        if num_singles and kernel == "ragged":
            singles = plan_ragged(cache, rows[:num_singles], ends[:num_singles], num_groups)
        elif num_singles:
            singles = _page_tables(cache, rows[:num_singles], ends[:num_singles], device, kernel)
        has_chunks = is_paged and num_singles < len(rows)
        if has_chunks and chunk_kernel(device, cache.pages.dtype) == "varlen":
            chunks = _page_tables(cache, rows[num_singles:], ends[num_singles:], device, "varlen")
            starts = torch.from_numpy(np.cumsum([0, *counts[num_singles:]], dtype=np.int32))
            chunks = chunks._replace(starts=starts.to(device), longest=max(counts))
        new = positions_N, places_NK
        if wanted and kernel == "ragged":  # each a single token that sees its row up to itself
            wanted_N = np.asarray(wanted)
            plan = plan_ragged(cache, row_N[wanted_N], position_N[wanted_N] + 1, num_groups)
            last = CachedLayout((), (), (), len(wanted), *new, plan, chunks)
            wanted_N = torch.from_numpy(wanted_N)
        old = tuple(rows), tuple(counts), tuple(past)
        return CachedLayout(*old, num_singles, *new, singles, chunks, wanted_N, last)


def _page_tables(
    cache: PagedKVCache,
    rows: Sequence[int],
    lengths: Sequence[int],
    device: torch.device | str,
    kernel: str,
) -> PageTables:
    width = -(-max(lengths) // cache.page_size)
    return PageTables(
        torch.from_numpy(cache.tables_RW[list(rows), :width]).to(device),
        torch.tensor(lengths, dtype=torch.int32).to(device),
        kernel,
    )


def attend_cached(q_NHE: Tensor, layout: CachedLayout, cache: KVCache, layer: int) -> Tensor:
    """Leading single tokens together, then chunks; 0 for the padding."""
    outputs, start = [], layout.num_singles
    if isinstance(layout.singles, RaggedPlan):
        outputs.append(attend_ragged(q_NHE[:start], *cache.vectors(layer), layout.singles))
    elif layout.singles is not None:
        outputs.append(_attend_pages(q_NHE[:start], cache, layer, layout.singles))
    if layout.chunks is not None:
        stop = sum(layout.counts)
        outputs.append(_attend_pages(q_NHE[start:stop], cache, layer, layout.chunks))
        start = stop
    else:
        per_row = list(zip(layout.rows, layout.counts, layout.past, strict=True))
        for row, count, past in per_row[start:]:
            q_HSE = q_NHE[start : start + count].transpose(0, 1)
            out_HSE = causal_tail(q_HSE, *cache.read(layer, row, past + count))
            outputs.append(out_HSE.transpose(0, 1))
            start += count
    if start < len(q_NHE):
        outputs.append(torch.zeros_like(q_NHE[start:]))
    return torch.cat(outputs)


def _attend_pages(q_NHE: Tensor, cache: PagedKVCache, layer: int, pages: PageTables) -> Tensor:
    """New tokens of each row over its pages: our kernel or its torch form for one a row, flash
    attention for any number.
    """
    keys_PTKE, values_PTKE = cache.keys_PTKE[layer], cache.values_PTKE[layer]
    if pages.kernel != "varlen":
        from kernels.paged_decode import paged_decode  # slow to import, with Triton

        return paged_decode(
            q_NHE, keys_PTKE, values_PTKE, pages.tables_RW, pages.lengths_R, kernel=pages.kernel
        )
    from torch.nn.attention.varlen import varlen_attn  # slow to import

    starts = pages.starts
    if starts is None:
        starts = torch.arange(len(q_NHE) + 1, dtype=torch.int32, device=q_NHE.device)
    return varlen_attn(
        q_NHE,
        keys_PTKE,
        values_PTKE,
        starts,
        None,
        pages.longest,
        pages.tables_RW.shape[1] * keys_PTKE.shape[1],
        seqused_k=pages.lengths_R,
        block_table=pages.tables_RW,
        **varlen_keywords("block_table"),
    )


def chunk_kernel(device: torch.device | str, dtype: torch.dtype) -> str:
    """How several new tokens of a row attend to pages: "varlen", flash attention for all rows at
    once, where there is a GPU, half precision and a torch that takes pages (2.12), else "torch",
    row by row.
    """
    if torch.device(device).type != "cuda" or dtype == torch.float32:
        return "torch"
    return "varlen" if "block_table" in _varlen_parameters() else "torch"


def _varlen_parameters():
    from torch.nn.attention.varlen import varlen_attn  # slow to import

    return inspect.signature(varlen_attn).parameters


@functools.cache
def varlen_keywords(*needed: str) -> dict:
    """The keywords that make `varlen_attn` causal and grouped in this version of torch. ValueError
    when it cannot be, or lacks a `needed` one.
    """
    parameters = _varlen_parameters()
    for keyword, version in {"window_size": "2.11", "block_table": "2.12"}.items():
        if keyword in {"window_size", *needed} - parameters.keys():
            raise ValueError(
                f"torch {torch.__version__}: torch.nn.attention.varlen.varlen_attn has no "
                f"keyword {keyword}; torch {version} or newer is needed"
            )
    # before it had this keyword, it took fewer kv heads without being told
    grouped = {"enable_gqa": True} if "enable_gqa" in parameters else {}
    return {"window_size": (-1, 0)} | grouped


def causal_tail(q_HSE: Tensor, k_KTE: Tensor, v_KTE: Tensor) -> Tensor:
    """The last S of T positions attend to everything at or before themselves."""
    num_new, num_keys = q_HSE.shape[1], k_KTE.shape[1]
    if TAIL_ROWS < num_new < num_keys:
        parts, stop = [], num_keys - num_new
        for part_HSE in q_HSE.split(TAIL_ROWS, dim=1):
            stop += part_HSE.shape[1]
            parts.append(causal_tail(part_HSE, k_KTE[:, :stop], v_KTE[:, :stop]))
        return torch.cat(parts, dim=1)
    bias_ST = None
    if 1 < num_new < num_keys:  # is_causal aligns top-left, which is wrong for a tail
        bias_ST = q_HSE.new_full((num_new, num_keys), -torch.inf).triu_(num_keys - num_new + 1)
    return F.scaled_dot_product_attention(
        q_HSE[None],
        k_KTE[None],
        v_KTE[None],
        attn_mask=bias_ST,
        is_causal=num_new == num_keys,
        enable_gqa=True,
    )[0]
