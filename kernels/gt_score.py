"""Attention of packed documents and answer branches, so that the ground truth is scored after every
turn in one forward pass.

A trajectory of N tokens is the trunk; behind it stand T branches of L tokens, one per cut. Three
integers per row say what it sees:

    row r sees key j   iff   doc[r] <= j < pre[r]   or   branch[r] <= j <= r

    trunk     pre = r + 1, branch = none (causal; a second document starts at its own doc)
    branch    pre = cut, branch = where the branch starts (the trunk up to the cut, and itself)

    out_r = sum_j p_rj v_j,   p_r = softmax_j(q_r k_j / sqrt(E))
    lse_r = log sum_j exp(q_r k_j / sqrt(E))

Cost: T separate forwards over the prefixes run about T/2 times the trunk's tokens and T/3 times its
attention; packed, the branches add T L tokens, each of which reads its prefix once. At 32 K tokens,
T = 40, L = 32 that is 4 % on top of the trunk instead of 16 times the trunk.

Memory traffic: a tile holds BLOCK_M rows = BLOCK_M / G tokens times the G query heads that share a
kv head, so keys and values are read once for the whole group: 2 E elements a visible key for every
BLOCK_M rows; q, out and lse move once. Scores stay in registers. Nothing is quadratic in memory.

Why this split: a branch of 32 tokens at G = 4 fills a tile of 128 rows, and no tile mixes spans
whose visible keys differ much. The keys that all rows of a tile see form one run of whole blocks: a
long loop without a mask. What is left, at most the ragged start of the document, the blocks around
the cut or the diagonal, and the branch itself, goes through a second loop, which masks and jumps
over the gaps. (Two loops and no more: each is another copy of the body, and with four the registers
spill.) Every key block is visited once, blocks that no row sees never. Long tiles start first. No
backward: scoring needs none, and training attends through torch.

Shapes: N tokens, M rows (keys of all tokens so far), H query heads, K kv heads, G = H / K,
E head_dim, R tiles.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.language import check_operands, descriptor, dot, tl, triton
from kernels.launch import architecture

NO_BRANCH = 2**31 - 1
LOG2_E = 1.4426950408889634


class Blocks(NamedTuple):
    """Block sizes: rows of a tile (tokens times query heads of a group) and keys of a step; TMA
    loads (sm_90 and later) or pointers.
    """

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    descriptors: bool


# Ahead-of-time compilation shows that these fit and do not spill; which is fastest, kernels/tune.py
# has to measure (not yet done on a GPU).
BLOCKS = {
    "sm_80": Blocks(128, 32, 8, 3, False),
    "sm_90": Blocks(128, 64, 8, 3, True),
    "sm_100": Blocks(128, 64, 8, 3, True),
    "interpreter": Blocks(64, 64, 4, 1, False),
}


class Plan(NamedTuple):
    """What `branch_attention` reads besides q, k and v: the three integers of every row, and the
    tiles. Built once for all layers.
    """

    doc_M: Tensor
    pre_M: Tensor
    branch_M: Tensor
    # row, stop; then key blocks: [ragged, main) masked, [main, main_stop) unmasked, [main_stop,
    # pre_stop) and [own, own_stop) masked
    tiles_R8: Tensor
    first_row: int
    num_rows: int


def visibility(
    spans: Sequence[tuple[int, int, int, int]],
) -> tuple[list[int], list[int], list[int]]:
    """doc, pre and branch of every row. Spans (start, end, doc, pre) cover the rows in order;
    without a prefix (doc == pre) a span is a document.
    """
    doc_M, pre_M, branch_M = [], [], []
    for start, end, doc, pre in spans:
        assert start == len(doc_M) and start < end and doc <= pre <= start, (
            f"span {(start, end, doc, pre)} after {len(doc_M)} rows"
        )
        is_document = doc == pre
        doc_M += [start if is_document else doc] * (end - start)
        pre_M += range(start + 1, end + 1) if is_document else [pre] * (end - start)
        branch_M += [NO_BRANCH if is_document else start] * (end - start)
    return doc_M, pre_M, branch_M


def branch_attention_ref(
    q_NHE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out [N, H, E], lse [N, H]) through one dense mask, in the dtype of q: the reference
    of `branch_attention`.
    """
    doc_M1, pre_M1, branch_M1 = (
        torch.tensor(values, device=q_NHE.device)[:, None] for values in visibility(spans)
    )
    keys = torch.arange(len(k_MKE), device=q_NHE.device)
    rows = slice(first_row, first_row + len(q_NHE))
    seen_NM = (
        ((doc_M1 <= keys) & (keys < pre_M1))
        | ((branch_M1 <= keys) & (keys <= torch.arange(len(doc_M1), device=q_NHE.device)[:, None]))
    )[rows]
    groups = q_NHE.shape[1] // k_MKE.shape[1]
    k_MHE, v_MHE = k_MKE.repeat_interleave(groups, 1), v_MKE.repeat_interleave(groups, 1)
    scores_HNM = torch.einsum("nhe,mhe->hnm", q_NHE, k_MHE) / q_NHE.shape[-1] ** 0.5
    scores_HNM = scores_HNM.masked_fill(~seen_NM, float("-inf"))
    return torch.einsum("hnm,mhe->nhe", scores_HNM.softmax(-1), v_MHE), scores_HNM.logsumexp(-1).T


def plan_rows(
    spans: Sequence[tuple[int, int, int, int]],
    num_groups: int,
    device: torch.device,
    *,
    first_row: int = 0,
    num_rows: int | None = None,
) -> Plan:
    """Plan the rows [first_row, first_row + num_rows) (default: all) of the spans for `num_groups`
    query heads per kv head.

    Tiles of consecutive tokens of one document. Short neighbours share a tile when their cuts lie
    within a block of keys: cuts far apart would turn all that stands between them into masked work.
    Documents of 3 and 5 tokens are tiles [0, 3) and [3, 8); branches of 3 and 5 tokens, cut at the
    same token of a trunk, are one.
    """
    blocks = BLOCKS[architecture(device)]
    tokens, size = blocks.block_m // num_groups, blocks.block_k
    if not tokens:
        raise ValueError(
            f"{num_groups} query heads per kv head: more than the {blocks.block_m} rows of a tile"
        )
    doc, pre, branch = visibility(spans)
    stop_row = len(doc) if num_rows is None else first_row + num_rows
    tiles: list[list[int]] = []  # [row, stop]
    for start, end, _, _ in spans:
        for row in range(max(start, first_row), min(end, stop_row), tokens):
            stop = min(row + tokens, end, stop_row)
            before = tiles[-1][0] if tiles else row
            both = pre[before:stop]
            is_near = doc[before] == doc[row] and max(both) - min(both) <= size
            if tiles and stop - before <= tokens and is_near:
                tiles[-1][1] = stop
            else:
                tiles.append([row, stop])
    table = [
        [row, stop, *_key_blocks(doc[row], pre[row:stop], min(branch[row:stop]), stop, size)]
        for row, stop in tiles
    ]
    # most key blocks first: a long tile that starts last would run alone
    table.sort(key=lambda t: t[2] - t[5] + t[6] - t[7])
    tensors = (
        torch.tensor(values, dtype=torch.int32).to(device) for values in (doc, pre, branch, table)
    )
    return Plan(*tensors, first_row, stop_row - first_row)


def _key_blocks(doc: int, pre: list[int], branch: int, stop: int, size: int) -> list[int]:
    """The key blocks of a tile, as `Plan` says, from its rows' visibility."""
    main = -(-doc // size)
    main_stop, pre_stop = max(main, min(pre) // size), -(-max(pre) // size)
    own = max(pre_stop, branch // size)
    own_stop = max(own, -(-stop // size) if branch != NO_BRANCH else 0)
    return [doc // size, main, main_stop, pre_stop, own, own_stop]


@triton.jit
def _step(
    q,
    k,
    v,
    kv_head,
    j,
    M,
    stride_kn,
    stride_kk,
    stride_vn,
    stride_vk,
    scale,
    acc,
    m,
    s,
    seen_from,
    seen_to,
    own_from,
    rows,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One block of keys: fold exp2(score - m), the row sums s and the output acc into what the
    blocks before have left.
    """
    keys = j * BLOCK_K + tl.arange(0, BLOCK_K)
    if DESCRIPTORS:
        k_block = k.load([j * BLOCK_K, kv_head, 0]).reshape(BLOCK_K, HEAD_DIM)
        v_block = v.load([j * BLOCK_K, kv_head, 0]).reshape(BLOCK_K, HEAD_DIM)
    else:
        # int64 up to the block, int32 inside it: pointers of 64 bits for every row of the block
        # cost registers that are then spilled
        first, head = tl.cast(j * BLOCK_K, tl.int64), kv_head.to(tl.int64)
        inside, dims = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, HEAD_DIM)[None, :]
        k_block = tl.load(
            k + (first * stride_kn + head * stride_kk) + (inside * stride_kn + dims),
            mask=keys[:, None] < M,
            other=0.0,
        )
        v_block = tl.load(
            v + (first * stride_vn + head * stride_vk) + (inside * stride_vn + dims),
            mask=keys[:, None] < M,
            other=0.0,
        )
    scores = dot(q, k_block.T, tl.zeros((q.shape[0], BLOCK_K), dtype=tl.float32)) * scale
    if MASKED:
        keys = keys[None, :]
        seen = ((keys >= seen_from[:, None]) & (keys < seen_to[:, None])) | (
            (keys >= own_from[:, None]) & (keys <= rows[:, None])
        )
        # finite: a row that sees nothing of this block yet adds exp2(0) here, and the first key it
        # does see scales that by exp2(-1e30) = 0
        scores = tl.where(seen, scores, -1.0e30)
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    decay = tl.exp2(m - m_new)
    return dot(p.to(v_block.dtype), v_block, acc * decay[:, None]), m_new, s * decay + tl.sum(p, 1)


@triton.jit
def _branch_attention_kernel(
    q_ptr,
    k,
    v,
    out_ptr,
    lse_ptr,
    doc_ptr,
    pre_ptr,
    branch_ptr,
    tiles_ptr,
    first_row,
    M,
    num_heads,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kk,
    stride_vn,
    stride_vk,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One tile of rows and one kv head: the unmasked loop over the key blocks that all rows see,
    then the masked one over the rest.
    """
    kv_head, tile = tl.program_id(1), tiles_ptr + tl.program_id(0) * 8
    row, stop, ragged, main = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    main_stop = tl.load(tile + 4)
    pre_stop = tl.load(tile + 5)
    own = tl.load(tile + 6)
    own_stop = tl.load(tile + 7)
    # row i of the tile is token i // GROUP, query head i % GROUP of the group; the rows past `stop`
    # compute what nobody stores
    place, dims = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    rows, heads = row + place // GROUP, kv_head * GROUP + place % GROUP
    valid = rows < stop
    seen_from = tl.load(doc_ptr + rows, mask=valid, other=0)
    seen_to = tl.load(pre_ptr + rows, mask=valid, other=0)
    own_from = tl.load(branch_ptr + rows, mask=valid, other=0)
    local = (rows - first_row).to(tl.int64)
    q = tl.load(
        q_ptr + (local * stride_qn + heads * stride_qh)[:, None] + dims[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    acc = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    m, s = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32), tl.zeros((BLOCK_M,), dtype=tl.float32)
    for j in range(main, main_stop):
        acc, m, s = _step(
            q,
            k,
            v,
            kv_head,
            j,
            M,
            stride_kn,
            stride_kk,
            stride_vn,
            stride_vk,
            scale,
            acc,
            m,
            s,
            seen_from,
            seen_to,
            own_from,
            rows,
            False,
            HEAD_DIM,
            BLOCK_K,
            DESCRIPTORS,
        )
    for i in range(ragged, ragged + (main - ragged) + (pre_stop - main_stop) + (own_stop - own)):
        j = tl.where(i < main, i, i - main + main_stop)
        j = tl.where(j < pre_stop, j, j - pre_stop + own)
        acc, m, s = _step(
            q,
            k,
            v,
            kv_head,
            j,
            M,
            stride_kn,
            stride_kk,
            stride_vn,
            stride_vk,
            scale,
            acc,
            m,
            s,
            seen_from,
            seen_to,
            own_from,
            rows,
            True,
            HEAD_DIM,
            BLOCK_K,
            DESCRIPTORS,
        )
    at = local * num_heads + heads
    tl.store(
        out_ptr + at[:, None] * HEAD_DIM + dims[None, :],
        (acc / s[:, None]).to(out_ptr.dtype.element_ty),
        mask=valid[:, None],
    )
    tl.store(lse_ptr + at, (m + tl.log2(s)) * 0.6931471805599453, mask=valid)


def branch_attention(
    q_NHE: Tensor, k_MKE: Tensor, v_MKE: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return (out [N, H, E], lse [N, H] fp32 nats) of the N rows that `plan` was made for, over the
    keys and values of all M rows so far.

    bf16 or fp16, E a power of 2 from 16 to 256, last dimension contiguous. No gradient. ValueError
    for what does not fit.
    """
    _check(q_NHE, k_MKE, v_MKE, plan)
    _, num_heads, head_dim = q_NHE.shape
    num_keys, num_kv_heads, _ = k_MKE.shape
    blocks = BLOCKS[architecture(q_NHE.device)]
    if max(k_MKE.stride(0), v_MKE.stride(0)) * blocks.block_k >= 2**31:
        raise ValueError(
            f"strides {k_MKE.stride()}, {v_MKE.stride()}: a block of {blocks.block_k} keys "
            "spans 2^31 elements"
        )
    k, v = (
        descriptor(x, [blocks.block_k, 1, head_dim]) if blocks.descriptors else x
        for x in (k_MKE, v_MKE)
    )
    out_NHE = q_NHE.new_empty(q_NHE.shape)
    lse_NH = q_NHE.new_empty(q_NHE.shape[:2], dtype=torch.float32)
    strides = [stride for x in (q_NHE, k_MKE, v_MKE) for stride in x.stride()[:2]]
    _branch_attention_kernel[(len(plan.tiles_R8), num_kv_heads)](
        q_NHE,
        k,
        v,
        out_NHE,
        lse_NH,
        *plan[:5],  # doc, pre, branch, tiles, first_row: the order of Plan's fields
        num_keys,
        num_heads,
        *strides,
        LOG2_E / head_dim**0.5,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=blocks.block_m,
        BLOCK_K=blocks.block_k,
        DESCRIPTORS=blocks.descriptors,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return out_NHE, lse_NH


def _check(q_NHE: Tensor, k_MKE: Tensor, v_MKE: Tensor, plan: Plan) -> None:
    num_rows, num_heads, head_dim = q_NHE.shape
    shape = (len(k_MKE), k_MKE.shape[1], head_dim)
    if not k_MKE.shape == v_MKE.shape == shape or num_heads % shape[1] or num_rows != plan.num_rows:
        raise ValueError(
            f"shapes do not fit: q {tuple(q_NHE.shape)}, k {tuple(k_MKE.shape)}, v "
            f"{tuple(v_MKE.shape)}, {plan.num_rows} planned rows"
        )
    if len(k_MKE) < plan.first_row + num_rows:
        raise ValueError(f"{len(k_MKE)} keys for rows up to {plan.first_row + num_rows}")
    check_operands(q_NHE, k_MKE, v_MKE)
    if (
        any(x.stride(-1) != 1 for x in (q_NHE, k_MKE, v_MKE))
        or not q_NHE.device == k_MKE.device == v_MKE.device == plan.tiles_R8.device
    ):
        raise ValueError(
            f"strides {q_NHE.stride()}, {k_MKE.stride()}, {v_MKE.stride()} or devices "
            f"{q_NHE.device}, {plan.tiles_R8.device} do not fit"
        )
    assert not (torch.is_grad_enabled() and any(x.requires_grad for x in (q_NHE, k_MKE, v_MKE))), (
        "branch attention has no backward"
    )
