"""Which attention runs where: the torch paths that need no GPU to be right, and the ones for CUDA
through stand-ins. Shapes as in attention.py.
"""

import inspect

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from kernels.gt_score import branch_attention_ref
from venus.model import attention, decode
from venus.model.attention import Documents, Layout, Span, attend, plan_attention
from venus.model.cache import KVCache, PagedKVCache
from venus.model.decode import CachedLayout
from venus.model.ragged import attend_ragged, plan_ragged

SPANS = (
    Span(0, 12, 0, 0),
    Span(12, 16, 0, 5),
    Span(16, 20, 0, 12),
    Span(20, 26, 20, 20),
    Span(26, 29, 20, 22),
)


def inputs(num_tokens=29, num_heads=4, num_kv_heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, num_tokens, heads, head_dim, generator=generator)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def test_the_reference_of_the_kernel_and_sdpa_agree():
    """Two ways to write the same rule: three integers per row, and spans."""
    q, k, v = inputs()
    want, _ = branch_attention_ref(q[0], k[0], v[0], SPANS)
    torch.testing.assert_close(attend(q, k, v, Layout(SPANS))[0], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [1, 5, 13, 28])
def test_rows_in_chunks_over_a_cache_equal_all_at_once(size):
    """A chunk may end inside the trunk, inside a branch, or between documents."""
    q, k, v = inputs()
    whole = attend(q, k, v, Layout(SPANS))
    cache = KVCache(
        num_layers=1,
        num_rows=1,
        capacity=29,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device="cpu",
    )
    parts = []
    for first in range(0, 29, size):
        rows = slice(first, first + size)
        parts.append(attend(q[:, rows], k[:, rows], v[:, rows], Layout(SPANS, first), cache, 0))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=2e-6)


def test_the_mask_of_a_long_tail_is_made_in_pieces(monkeypatch):
    """A chunk of a long trunk against all before it was one mask of chunk x everything:
    quadratic in memory.
    """
    q, k, v = (x[0].transpose(0, 1) for x in inputs())
    whole = decode.causal_tail(q[:, 9:], k, v)
    monkeypatch.setattr(decode, "TAIL_ROWS", 6)
    torch.testing.assert_close(decode.causal_tail(q[:, 9:], k, v), whole, rtol=0, atol=2e-6)


def test_a_chunk_without_what_came_before_is_an_error():
    q, k, v = inputs(4)
    with pytest.raises(AssertionError, match="rows from 12 on need the cache"):
        attend(q, k, v, Layout(SPANS, 12))


def test_on_the_cpu_spans_stay_spans():
    layout = Layout(SPANS)
    assert plan_attention(layout, inputs()[0], 2, "auto") is layout
    assert plan_attention(None, inputs()[0], 2, "auto") is None
    with torch.no_grad(), pytest.raises(ValueError, match="kernel 'triton'"):
        plan_attention(layout, inputs()[0], 2, "triton")


class OnCuda:
    """Looks like a half-precision CUDA tensor to `plan_attention`; its plans lie on the CPU."""

    is_cuda, dtype, device, shape = True, torch.bfloat16, "cpu", (1, 29, 32)


def test_documents_on_cuda_become_one_flash_attention():
    plan = plan_attention(Layout.documents([12, 4, 13]), OnCuda, 2, "auto")
    assert isinstance(plan, Documents)
    assert (plan.starts.tolist(), plan.starts.dtype, plan.longest) == (
        [0, 12, 16, 29],
        torch.int32,
        13,
    )


def test_documents_that_go_into_a_cache_do_not():
    """The first chunk of a long document: flash attention would leave its keys out of the cache
    that the next chunk reads.
    """
    layout = Layout.documents([29])
    assert plan_attention(layout, OnCuda, 2, "torch", cache=object()) is layout


def test_flash_attention_gets_the_documents_and_is_causal(monkeypatch):
    """A stand-in with the signature of `varlen_attn` checks what it is told and attends with
    the dense reference.
    """

    def stand_in(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        window_size=(-1, -1),
        enable_gqa=False,
    ):
        assert (window_size, enable_gqa, max_q, max_k) == ((-1, 0), True, 13, 13)
        assert cu_seq_q is cu_seq_k
        return branch_attention_ref(
            query, key, value, Layout.documents(cu_seq_q.diff().tolist()).spans
        )[0]

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    attention.varlen_keywords.cache_clear()
    q, k, v = inputs()
    plain = Layout(()).to_heads, Layout(()).to_sequence
    got = attend(q, k, v, Documents(torch.tensor([0, 12, 16, 29]), 13, *plain))
    attention.varlen_keywords.cache_clear()
    torch.testing.assert_close(
        got, attend(q, k, v, Layout.documents([12, 4, 13])), rtol=0, atol=2e-6
    )


def test_this_torch_has_the_keywords_of_flash_attention():
    attention.varlen_keywords.cache_clear()
    assert (
        attention.varlen_keywords().keys()
        <= inspect.signature(varlen.varlen_attn).parameters.keys()
    )
    assert attention.varlen_keywords()["window_size"] == (-1, 0)


def test_a_torch_without_the_keyword_is_named(monkeypatch):
    monkeypatch.setattr(
        varlen,
        "varlen_attn",
        lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None,
    )
    attention.varlen_keywords.cache_clear()
    with pytest.raises(ValueError, match=f"torch {torch.__version__.split('+')[0]}.*window_size"):
        attention.varlen_keywords()
    attention.varlen_keywords.cache_clear()


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("is_paged", [False, True])
def test_ragged_products_equal_attention_row_by_row(kv_heads, is_paged):
    """Rows of 1 to 70 positions in any order, six query heads, fp64; what no row holds is
    NaN and is not touched.
    """
    rng, generator = np.random.default_rng(kv_heads), torch.Generator().manual_seed(0)
    shape = {
        "num_layers": 2,
        "num_rows": 12,
        "capacity": 80,
        "num_kv_heads": kv_heads,
        "head_dim": 8,
        "dtype": torch.float64,
        "device": "cpu",
    }
    cache = (
        PagedKVCache(**shape, num_tokens=12 * 80, page_size=16) if is_paged else KVCache(**shape)
    )
    for buffer in cache.vectors(1):
        buffer.fill_(torch.nan)
    rows, lengths = rng.permutation(12)[:9].tolist(), rng.integers(1, 71, 9).tolist()
    for row, length in zip(rows, lengths, strict=True):
        cache.reserve(row, length)
        keys, values = torch.randn(2, length, kv_heads, 8, dtype=torch.float64, generator=generator)
        cache.write(1, torch.from_numpy(cache.places([row] * length, range(length))), keys, values)
    q_RHE = torch.randn(9, 6, 8, dtype=torch.float64, generator=generator)
    got = attend_ragged(q_RHE, *cache.vectors(1), plan_ragged(cache, rows, lengths, 6 // kv_heads))
    for query_HE, row, length, out_HE in zip(q_RHE, rows, lengths, got, strict=True):
        wanted = decode.causal_tail(query_HE[:, None], *cache.read(1, row, length))[:, 0]
        torch.testing.assert_close(out_HE, wanted, rtol=0, atol=1e-14)


def test_chunks_over_pages_get_their_tables_and_lengths(monkeypatch):
    """Chunks of 5 and 3 tokens behind 9 and 2 cached ones, pages of 4. A stand-in with the
    signature of `varlen_attn` gathers the pages itself.
    """
    shape = {
        "num_layers": 1,
        "num_rows": 3,
        "capacity": 20,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": torch.float32,
        "device": "cpu",
    }
    generator = torch.Generator().manual_seed(0)
    paged, plain = PagedKVCache(**shape, num_tokens=60, page_size=4), KVCache(**shape)
    for row, count in ((2, 9), (0, 2)):
        k, v = torch.randn(2, 1, count, 2, 8, generator=generator)
        for cache in (paged, plain):
            attend(
                torch.zeros(1, count, 4, 8), k, v, CachedLayout.of(cache, [row], [count], 2), cache
            )
            cache.advance(row, count)

    def stand_in(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        window_size,
        enable_gqa,
        seqused_k,
        block_table,
    ):
        assert (
            window_size,
            enable_gqa,
            cu_seq_k,
            max_q,
            cu_seq_q.tolist(),
            seqused_k.tolist(),
        ) == ((-1, 0), True, None, 5, [0, 5, 8], [14, 5])
        assert (cu_seq_q.dtype, seqused_k.dtype, block_table.dtype) == (torch.int32,) * 3
        assert max_k >= 14
        outputs = []
        for start, stop, length, table in zip(
            cu_seq_q[:-1], cu_seq_q[1:], seqused_k, block_table, strict=True
        ):
            keys, values = (
                pages[table.long()].flatten(0, 1)[:length].transpose(0, 1) for pages in (key, value)
            )
            outputs.append(
                decode.causal_tail(query[start:stop].transpose(0, 1), keys, values).transpose(0, 1)
            )
        return torch.cat(outputs)

    q, k, v = (torch.randn(1, 8, heads, 8, generator=generator) for heads in (4, 2, 2))
    wanted = attend(q, k, v, CachedLayout.of(plain, [2, 0], [5, 3], 2), plain)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(decode, "chunk_kernel", lambda device, dtype: "varlen")
    decode.varlen_keywords.cache_clear()
    got = attend(q, k, v, CachedLayout.of(paged, [2, 0], [5, 3], 2), paged)
    decode.varlen_keywords.cache_clear()
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
