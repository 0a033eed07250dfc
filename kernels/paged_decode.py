"""Attention of one new token per row over keys and values that lie in pages: a decode step reads
every cached number once, and nothing else counts.

    out_rh = sum_t p_rht v_t,k(h),   p_rh = softmax_t(q_rh k_t,k(h) / sqrt(E))
    for t < length_r, with k(h) = h // (H / K)

Position t of row r is entry t mod T of page table[r, t // T]. Pages are shared, rows differ in
length, and no shape depends on either: one launch, and one CUDA graph, serves a pool for good.

Memory traffic: 2 E numbers a cached token and kv head, once: a program holds the H / K query heads
that share a kv head and reads its keys for all of them. (They are padded to the 16 rows that a
tensor core wants; it has nothing better to do.) Queries and outputs are a ten-thousandth of that.

Why split: 16 rows of 8 kv heads are 128 programs, fewer than an H100 has multiprocessors, and the
longest row would finish alone. Each (row, kv head) is cut into SPLITS equal spans of whole blocks,
by its own length; every span leaves its softmax's output and log-sum-exp in fp32, and a second
kernel merges them: out = sum_s w_s out_s / sum_s w_s, w_s = exp(lse_s - max lse). No atomics: the
same bits every time, whoever comes first.

Shapes: R rows  H query heads  K kv heads  E head_dim  P pages  T tokens of a page
        W pages of a row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gt_score import LOG2_E
from kernels.language import check_operands, dot, tl, triton
from kernels.launch import architecture, choose_kernel


class Blocks(NamedTuple):
    """Keys of a step, and how many programs there should at least be: rows are
    split until there are.
    """

    block_k: int
    programs: int
    num_warps: int
    num_stages: int


# Ahead-of-time compilation shows that these fit and do not spill; which is fastest has to be
# measured (not yet done on a GPU). Six stages keep two blocks on their way: the compiler spends the
# others on looking up the page, and with four it would wait for every block.
BLOCKS = {
    "sm_80": Blocks(64, 432, 4, 6),
    "sm_90": Blocks(64, 528, 4, 6),
    "sm_100": Blocks(64, 592, 4, 6),
    "interpreter": Blocks(32, 16, 4, 1),
}
MAX_SPLITS = 64


def paged_decode_torch(
    q_RHE: Tensor,
    keys_PTKE: Tensor,
    values_PTKE: Tensor,
    block_tables_RW: Tensor,
    lengths_R: Tensor,
) -> Tensor:
    """`paged_decode` in plain torch, which copies the rows' pages side by side. Reads the
    longest length on the host.
    """
    page_size, num_kv_heads = keys_PTKE.shape[1:3]
    pages_RW = block_tables_RW[:, : max(1, -(-int(lengths_R.max()) // page_size))].long()
    seen_RM = torch.arange(pages_RW.shape[1] * page_size, device=q_RHE.device) < lengths_R[:, None]
    # what nobody has written yet may be NaN, and no mask helps against that
    keys_RMKE, values_RMKE = (
        pages[pages_RW].flatten(1, 2).masked_fill_(~seen_RM[:, :, None, None], 0)
        for pages in (keys_PTKE, values_PTKE)
    )
    # the query heads of a group stand as if they were tokens: no key is repeated
    q_RKGE = q_RHE.unflatten(1, (num_kv_heads, -1))
    out_RKGE = F.scaled_dot_product_attention(
        q_RKGE,
        keys_RMKE.transpose(1, 2),
        values_RMKE.transpose(1, 2),
        attn_mask=seen_RM[:, None, None],
    )
    return out_RKGE.flatten(1, 2).masked_fill(lengths_R[:, None, None] == 0, 0)


@triton.jit
def _span(length, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Keys of each split of a row: whole blocks, the last split may have fewer and some none."""
    return tl.cdiv(tl.cdiv(length, BLOCK_K), SPLITS) * BLOCK_K


@triton.jit
def _split_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    partial_ptr,
    lse_ptr,
    table_width,
    num_heads,
    stride_qr,
    stride_qh,
    stride_key_page,
    stride_value_page,
    stride_token,
    scale,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One split of one row and kv head -> the softmax's output and log2-sum-exp2 over its keys, for
    the query heads of the group.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    span = _span(length, SPLITS, BLOCK_K)
    start, stop = split * span, tl.minimum((split + 1) * span, length)
    if start >= stop:
        return
    place, dims, inside = tl.arange(0, BLOCK_G), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_K)
    heads, valid = kv_head * GROUP + place, place < GROUP
    q = tl.load(
        q_ptr + row * stride_qr + heads[:, None] * stride_qh + dims[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    acc = tl.zeros((BLOCK_G, HEAD_DIM), dtype=tl.float32)
    m, s = tl.full((BLOCK_G,), -1.0e30, dtype=tl.float32), tl.zeros((BLOCK_G,), dtype=tl.float32)
    within = inside[:, None] * stride_token + dims[None, :]
    for first in range(start, stop, BLOCK_K):
        # int64: a pool of 363 K tokens of 8 heads of 128 has 2^28 numbers a layer, and the layers
        # may be views of one tensor
        page = tl.load(tables_ptr + row * table_width + first // PAGE).to(tl.int64)
        offset = (first % PAGE) * stride_token + kv_head * HEAD_DIM
        seen = first + inside < stop  # behind the last key may stand anything, NaN included
        k = tl.load(
            keys_ptr + (page * stride_key_page + offset) + within, mask=seen[:, None], other=0.0
        )
        v = tl.load(
            values_ptr + (page * stride_value_page + offset) + within, mask=seen[:, None], other=0.0
        )
        scores = dot(q, k.T, tl.zeros((BLOCK_G, BLOCK_K), dtype=tl.float32)) * scale
        scores = tl.where(seen[None, :], scores, -1.0e30)
        m_new = tl.maximum(m, tl.max(scores, 1))
        p, decay = tl.exp2(scores - m_new[:, None]), tl.exp2(m - m_new)
        acc = dot(p.to(v.dtype), v, acc * decay[:, None])
        m, s = m_new, s * decay + tl.sum(p, 1)
    at = (row * num_heads + heads) * SPLITS + split
    tl.store(
        partial_ptr + at[:, None].to(tl.int64) * HEAD_DIM + dims[None, :],
        acc / s[:, None],
        mask=valid[:, None],
    )
    tl.store(lse_ptr + at, m + tl.log2(s), mask=valid)


@triton.jit
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    lengths_ptr,
    out_ptr,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One row and query head: the splits' outputs, weighted by their share of the softmax."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    at = (row * num_heads + head).to(tl.int64)
    used = splits * _span(length, SPLITS, BLOCK_K) < length
    lse = tl.load(lse_ptr + at * SPLITS + splits, mask=used, other=-1.0e30)
    weights = tl.where(used, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    partial = tl.load(
        partial_ptr + (at * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=used[:, None],
        other=0.0,
    )
    # the largest weight is 1, so the sum is at least that; in a row without tokens it is 0,
    # and so is the output
    out = tl.sum(weights[:, None] * partial, 0) / tl.maximum(tl.sum(weights, 0), 1.0)
    tl.store(out_ptr + at * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty))


def num_splits(blocks: Blocks, num_rows: int, num_kv_heads: int, capacity: int) -> int:
    """A power of 2, from shapes alone: splits until there are enough programs, as long as a split
    of the longest possible row holds a block.
    """
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_rows * num_kv_heads * splits < blocks.programs
        and 2 * splits * blocks.block_k <= capacity
    ):
        splits *= 2
    return splits


def paged_decode(
    q_RHE: Tensor,
    keys_PTKE: Tensor,
    values_PTKE: Tensor,
    block_tables_RW: Tensor,
    lengths_R: Tensor,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Return out [R, H, E]: each row's query over its first `lengths_R` positions, the new token's
    own key and value among them; 0 for length 0.

    Pages [P, T, K, E], a page's numbers contiguous, T a power of 2 from 16; block_tables_RW and
    lengths_R int32. bf16 or fp16, E a power of 2 from 16 to 256, no gradient. Nothing is read on
    the host, so that a CUDA graph may hold the launch (kernel "torch" reads the longest length).
    kernel: see `launch.choose_kernel`. ValueError for what does not fit.
    """
    _check_shapes(q_RHE, keys_PTKE, values_PTKE, block_tables_RW, lengths_R)
    assert not (
        torch.is_grad_enabled() and any(x.requires_grad for x in (q_RHE, keys_PTKE, values_PTKE))
    ), "paged decode attention has no backward"
    if choose_kernel(kernel, q_RHE.device) == "torch":
        return paged_decode_torch(q_RHE, keys_PTKE, values_PTKE, block_tables_RW, lengths_R)
    _check_layout(q_RHE, keys_PTKE, values_PTKE, block_tables_RW)
    blocks = BLOCKS[architecture(q_RHE.device)]
    num_rows, num_heads, head_dim = q_RHE.shape
    _, page_size, num_kv_heads, _ = keys_PTKE.shape
    splits = num_splits(blocks, num_rows, num_kv_heads, block_tables_RW.shape[1] * page_size)
    group = num_heads // num_kv_heads
    partial_RHSE = q_RHE.new_empty(num_rows, num_heads, splits, head_dim, dtype=torch.float32)
    lse_RHS, out_RHE = partial_RHSE.new_empty(partial_RHSE.shape[:3]), q_RHE.new_empty(q_RHE.shape)
    block_k = min(blocks.block_k, page_size)
    shape = {"HEAD_DIM": head_dim, "BLOCK_K": block_k, "SPLITS": splits}
    _split_kernel[(num_rows, num_kv_heads, splits)](
        *(q_RHE, keys_PTKE, values_PTKE, block_tables_RW, lengths_R, partial_RHSE, lse_RHS),
        block_tables_RW.stride(0),
        num_heads,
        *(*q_RHE.stride()[:2], keys_PTKE.stride(0), *values_PTKE.stride()[:2]),
        LOG2_E / head_dim**0.5,
        PAGE=page_size,
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        **shape,
    )
    grid = (num_rows, num_heads)
    _merge_kernel[grid](partial_RHSE, lse_RHS, lengths_R, out_RHE, num_heads, **shape)
    return out_RHE


def _check_shapes(q_RHE, keys_PTKE, values_PTKE, block_tables_RW, lengths_R) -> None:
    num_rows, num_heads, head_dim = q_RHE.shape
    num_kv_heads = keys_PTKE.shape[2]
    if (
        keys_PTKE.shape != values_PTKE.shape
        or keys_PTKE.shape[3] != head_dim
        or num_heads % num_kv_heads
    ):
        raise ValueError(
            f"shapes do not fit: q {tuple(q_RHE.shape)}, keys {tuple(keys_PTKE.shape)}, "
            f"values {tuple(values_PTKE.shape)}"
        )
    if (
        len(block_tables_RW) != num_rows
        or lengths_R.shape != (num_rows,)
        or not block_tables_RW.dtype == lengths_R.dtype == torch.int32
    ):
        raise ValueError(
            f"tables {tuple(block_tables_RW.shape)} {block_tables_RW.dtype}, lengths "
            f"{tuple(lengths_R.shape)} {lengths_R.dtype}: int32 for {num_rows} rows"
        )


def _check_layout(q_RHE, keys_PTKE, values_PTKE, block_tables_RW) -> None:
    check_operands(q_RHE, keys_PTKE, values_PTKE)
    _, page_size, num_kv_heads, head_dim = keys_PTKE.shape
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(
            f"page size {page_size}: a power of 2 from 16 is needed; use kernel 'torch'"
        )
    within_page = (num_kv_heads * head_dim, head_dim, 1)
    if (
        q_RHE.stride(2) != 1
        or block_tables_RW.stride(1) != 1
        or not keys_PTKE.stride()[1:] == values_PTKE.stride()[1:] == within_page
    ):
        raise ValueError(
            f"strides do not fit: q {q_RHE.stride()}, keys {keys_PTKE.stride()}, values "
            f"{values_PTKE.stride()}, tables {block_tables_RW.stride()}"
        )
