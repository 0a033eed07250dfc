"""Linear + log-softmax + gather, fused: log-probabilities, entropies and gradients of chosen tokens
without an [N, V] tensor.

For hidden rows h_n, head weights W and temperature T:

    z_nv   = <h_n, W_v> / T          logits, fp32
    lse_n  = log sum_v exp(z_nv)
    logp_n = z_n,target - lse_n
    H_n    = lse_n - sum_v p_nv z_nv                      entropy in nats, p = softmax(z)

and for upstream gradients a_n (on logp) and b_n (on H):

    dz_nv = a_n (1[v = target] - p_nv) - b_n p_nv (z_nv - lse_n + H_n)

Two forms, each as Triton kernels and as plain torch over chunks of rows (the CPU path, and what the
kernels are tested against):

    linear_log_probs    recompute, 8 N V D flops: for any loss downstream. The forward is a matrix
                        product whose tiles go through the softmax sums in registers: no logit
                        reaches memory. The backward forms dz tile by tile from lse (the product
                        again), and multiplies it by W and h.
    linear_token_loss   one pass, 6 N V D: for losses of which d loss_n / d logp_n is a function of
                        logp_n alone. A chunk of fp32 logits is written, read for lse, turned into
                        dz, and multiplied at once; nothing is computed twice.

Memory traffic of a chunk of C rows besides h: recompute forward V D (W, once per GROUP_N blocks of
rows) + 12 C V / BLOCK_V bytes; dz is C V elements written once and read twice. One pass: 4 C V
bytes written and read twice (lse, dz), dz as above. Either way dW (V D fp32) is read and written
once per chunk, which is why chunks follow a byte budget and not a row count: small chunks spend
their time on dW.

Precision: logits are never rounded below fp32 (bf16 logits near 16 are .125 apart; measured cost up
to 0.10 nats). dz is rounded to the weight's dtype with the 1 at the target already added. dW is
summed over chunks in fp32, in order: no atomics, no locks, the same bits every time.

Shapes: N selected tokens, V vocab, D hidden, C rows of a chunk, J tiles along V.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.language import descriptor, dot, row_sums, tl, triton
from kernels.launch import architecture, choose_kernel

CHUNK_BYTES_CPU = 80 * 2**20
CHUNK_BYTES_CUDA = 2**30
# the passes over a chunk of logits go block by block: what fits in the cache is
# read from memory once
BLOCK_BYTES_CPU = 2**20


class Tiles(NamedTuple):
    """Block sizes of the tile kernels. group_n row blocks share a block of W in L2; descriptors:
    TMA loads (sm_90 and later) or pointers.
    """

    block_n: int
    block_v: int
    block_d: int
    group_n: int
    num_warps: int
    num_stages: int
    descriptors: bool


# Ahead-of-time compilation shows that these fit and do not spill; which is fastest, kernels/tune.py
# has to measure (not yet done on a GPU).
TILES = {
    "sm_80": Tiles(128, 128, 64, 8, 8, 4, False),
    "sm_90": Tiles(128, 256, 64, 8, 8, 3, True),
    "sm_100": Tiles(128, 256, 64, 8, 8, 3, True),
    # on every GPU: fp32 products run outside the tensor cores, where larger tiles spill
    "fp32": Tiles(128, 128, 32, 8, 8, 4, False),
    "interpreter": Tiles(64, 128, 64, 2, 4, 1, False),
}
ROW_BLOCK = 4096  # logits of a row per step of the row kernels


def linear_log_probs_ref(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same two numbers from one full fp32 logits matrix: the reference that every
    form is tested against.
    """
    log_softmax_NV = torch.log_softmax(
        hidden_ND.float() @ weight_VD.float().T / temperature, dim=-1
    )
    entropies_N = -(log_softmax_NV.exp() * log_softmax_NV).sum(-1)
    return log_softmax_NV.gather(-1, targets_N[:, None])[:, 0], entropies_N


# ---- Triton kernels


@triton.jit
def _tile_logits(
    hidden,
    weight,
    row,
    col,
    N,
    V,
    D,
    stride_n,
    stride_v,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """<h_n, W_v> of the tile that starts at (row, col), fp32 in registers. Rows and columns beyond
    the edge hold finite numbers, not zeros.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    if DESCRIPTORS:
        for d in range(0, D, BLOCK_D):
            acc = dot(hidden.load([row, d]), weight.load([col, d]).T, acc)
    else:
        # int64: row * stride passes 2^31 at 840 K tokens of 2,560; the edge is clamped, which costs
        # less in the loop than a mask
        rows = tl.minimum(row + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
        cols = tl.minimum(col + tl.arange(0, BLOCK_V), V - 1).to(tl.int64)
        offsets = tl.arange(0, BLOCK_D)
        hidden_ptrs = hidden + rows[:, None] * stride_n + offsets[None, :]
        weight_ptrs = weight + cols[None, :] * stride_v + offsets[:, None]
        for d in range(0, D, BLOCK_D):
            inside = offsets < D - d
            acc = dot(
                tl.load(hidden_ptrs + d, mask=inside[None, :], other=0.0),
                tl.load(weight_ptrs + d, mask=inside[:, None], other=0.0),
                acc,
            )
    return acc


@triton.jit
def _tile_origin(N, V, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, GROUP_N: tl.constexpr):
    """First row and column of this program's tile. GROUP_N row blocks walk along V together, so a
    block of W comes from memory once for all of them.
    """
    row_blocks, per_group = tl.cdiv(N, BLOCK_N), GROUP_N * tl.cdiv(V, BLOCK_V)
    group, place = tl.program_id(0) // per_group, tl.program_id(0) % per_group
    height = tl.minimum(row_blocks - group * GROUP_N, GROUP_N)
    return (group * GROUP_N + place % height) * BLOCK_N, (place // height) * BLOCK_V


@triton.jit
def _stats_kernel(
    hidden,
    weight,
    targets_ptr,
    sums_ptr,
    target_logit_ptr,
    N,
    V,
    D,
    stride_n,
    stride_v,
    inv_temperature,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One tile of logits -> its softmax sums, sums[0..2, j, n] with y = z - m: m = max z, s =
    sum e^y, t = sum e^y y.

    With these H = log s - t / s, in which nothing large cancels (lse - sum p z would lose 0.1 nats
    at logits of a thousand). The tile that holds a row's target also writes its logit: one writer,
    hence no atomics.
    """
    row, col = _tile_origin(N, V, BLOCK_N, BLOCK_V, GROUP_N)
    acc = _tile_logits(
        hidden,
        weight,
        row,
        col,
        N,
        V,
        D,
        stride_n,
        stride_v,
        BLOCK_N,
        BLOCK_V,
        BLOCK_D,
        DESCRIPTORS,
    )
    rows, cols = row + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_V)
    targets = tl.load(targets_ptr + rows, mask=rows < N, other=-1).to(tl.int32)
    # finite: -inf times the zero weight would be NaN in t
    z = tl.where(cols[None, :] < V, acc * inv_temperature, -1.0e30)
    m = tl.max(z, 1)
    y = z - m[:, None]
    e = tl.exp(y)
    s, t, target_y = row_sums(e, e * y, tl.where(cols[None, :] == targets[:, None], y, 0.0))
    sums_ptrs = sums_ptr + (col // BLOCK_V).to(tl.int64) * N + rows
    plane = tl.cdiv(V, BLOCK_V).to(tl.int64) * N
    tl.store(sums_ptrs, m, mask=rows < N)
    tl.store(sums_ptrs + plane, s, mask=rows < N)
    tl.store(sums_ptrs + 2 * plane, t, mask=rows < N)
    tl.store(
        target_logit_ptr + rows,
        target_y + m,
        mask=(rows < N) & (targets >= col) & (targets < col + BLOCK_V),
    )


@triton.jit
def _grad_logits_kernel(
    hidden,
    weight,
    targets_ptr,
    lse_ptr,
    entropy_ptr,
    grad_log_prob_ptr,
    grad_entropy_ptr,
    grad_logits_ptr,
    N,
    V,
    D,
    stride_n,
    stride_v,
    inv_temperature,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One tile of logits, computed again -> dz / T = (a (1[v = target] - p) - b p (log p + H)) / T,
    rounded once, with the 1 already in.
    """
    row, col = _tile_origin(N, V, BLOCK_N, BLOCK_V, GROUP_N)
    acc = _tile_logits(
        hidden,
        weight,
        row,
        col,
        N,
        V,
        D,
        stride_n,
        stride_v,
        BLOCK_N,
        BLOCK_V,
        BLOCK_D,
        DESCRIPTORS,
    )
    rows, cols = row + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_V)
    inside = rows < N
    targets = tl.load(targets_ptr + rows, mask=inside, other=-1).to(tl.int32)
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    entropy = tl.load(entropy_ptr + rows, mask=inside, other=0.0)
    a = tl.load(grad_log_prob_ptr + rows, mask=inside, other=0.0)
    b = tl.load(grad_entropy_ptr + rows, mask=inside, other=0.0)
    log_p = acc * inv_temperature - lse[:, None]
    grad = -tl.exp(log_p) * (a[:, None] + b[:, None] * (log_p + entropy[:, None]))
    grad = tl.where(cols[None, :] == targets[:, None], grad + a[:, None], grad)
    ptrs = grad_logits_ptr + rows.to(tl.int64)[:, None] * V + cols[None, :]
    tl.store(
        ptrs,
        (grad * inv_temperature).to(grad_logits_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols[None, :] < V),
    )


@triton.jit
def _row_stats_kernel(
    logits_ptr,
    targets_ptr,
    log_prob_ptr,
    entropy_ptr,
    lse_ptr,
    V,
    inv_temperature,
    BLOCK: tl.constexpr,
):
    """One row of fp32 logits -> log-prob of the target, entropy, lse: the sums of `_stats_kernel`,
    carried along the row.
    """
    row = tl.program_id(0).to(tl.int64)
    m, s, t = -1.0e30, 0.0, 0.0  # a finite start: -inf - -inf is NaN
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.where(
            cols < V,
            tl.load(logits_ptr + row * V + cols, mask=cols < V, other=0.0) * inv_temperature,
            -1.0e30,
        )
        m_new = tl.maximum(m, tl.max(z, 0))
        e = tl.exp(z - m_new)
        scale = tl.exp(m - m_new)
        t = scale * (t + (m - m_new) * s) + tl.sum(e * (z - m_new), 0)
        s = scale * s + tl.sum(e, 0)
        m = m_new
    lse = m + tl.log(s)
    tl.store(
        log_prob_ptr + row,
        tl.load(logits_ptr + row * V + tl.load(targets_ptr + row)) * inv_temperature - lse,
    )
    tl.store(entropy_ptr + row, tl.log(s) - t / s)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _row_grad_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    slope_ptr,
    grad_logits_ptr,
    V,
    inv_temperature,
    BLOCK: tl.constexpr,
):
    """One row of fp32 logits -> slope (1[v = target] - p) / T in the dtype of the
    products that follow.
    """
    row = tl.program_id(0).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    slope = tl.load(slope_ptr + row) * inv_temperature
    target = tl.load(targets_ptr + row)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        p = tl.exp(
            tl.load(logits_ptr + row * V + cols, mask=cols < V, other=0.0) * inv_temperature - lse
        )
        grad = slope * (tl.where(cols == target, 1.0, 0.0) - p)
        tl.store(
            grad_logits_ptr + row * V + cols,
            grad.to(grad_logits_ptr.dtype.element_ty),
            mask=cols < V,
        )


def _tiles(hidden_CD: Tensor) -> Tiles:
    return TILES[
        "fp32"
        if hidden_CD.is_cuda and hidden_CD.dtype == torch.float32
        else architecture(hidden_CD.device)
    ]


def _launch_tiles(kernel, hidden_CD: Tensor, weight_VD: Tensor, *args) -> None:
    """Start a tile kernel on every tile of [C, V]."""
    tiles = _tiles(hidden_CD)
    (num_rows, hidden_size), vocab = hidden_CD.shape, weight_VD.shape[0]
    grid = (triton.cdiv(num_rows, tiles.block_n) * triton.cdiv(vocab, tiles.block_v),)
    hidden, weight = hidden_CD, weight_VD
    if tiles.descriptors:
        hidden = descriptor(hidden_CD, [tiles.block_n, tiles.block_d])
        weight = descriptor(weight_VD, [tiles.block_v, tiles.block_d])
    before, inv_temperature = args[:-1], args[-1]
    kernel[grid](
        hidden,
        weight,
        *before,
        num_rows,
        vocab,
        hidden_size,
        hidden_CD.stride(0),
        weight_VD.stride(0),
        inv_temperature,
        BLOCK_N=tiles.block_n,
        BLOCK_V=tiles.block_v,
        BLOCK_D=tiles.block_d,
        GROUP_N=tiles.group_n,
        DESCRIPTORS=tiles.descriptors,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _stats_triton(hidden_CD, weight_VD, targets_C, temperature) -> tuple[Tensor, Tensor, Tensor]:
    num_tiles = triton.cdiv(weight_VD.shape[0], _tiles(hidden_CD).block_v)
    sums_3JC = hidden_CD.new_empty(3, num_tiles, len(hidden_CD), dtype=torch.float32)
    target_logits_C = hidden_CD.new_empty(len(hidden_CD), dtype=torch.float32)
    _launch_tiles(
        _stats_kernel, hidden_CD, weight_VD, targets_C, sums_3JC, target_logits_C, 1 / temperature
    )
    m_JC, s_JC, t_JC = sums_3JC
    m_C = m_JC.amax(0)
    scale_JC = torch.exp(m_JC - m_C)
    s_C, t_C = (scale_JC * s_JC).sum(0), (scale_JC * (t_JC + (m_JC - m_C) * s_JC)).sum(0)
    lse_C = m_C + s_C.log()
    return target_logits_C - lse_C, s_C.log() - t_C / s_C, lse_C


def _grad_logits_triton(
    hidden_CD,
    weight_VD,
    targets_C,
    lse_C,
    entropies_C,
    grad_log_probs_C,
    grad_entropies_C,
    temperature,
) -> Tensor:
    grad_logits_CV = weight_VD.new_empty(len(hidden_CD), weight_VD.shape[0])
    rows = (targets_C, lse_C, entropies_C, grad_log_probs_C, grad_entropies_C)
    _launch_tiles(_grad_logits_kernel, hidden_CD, weight_VD, *rows, grad_logits_CV, 1 / temperature)
    return grad_logits_CV


def _one_pass_triton(
    logits_CV, targets_C, rows, objective, temperature, dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, vocab = logits_CV.shape
    log_probs_C, entropies_C, lse_C = logits_CV.new_empty(3, num_rows)
    launch = {"BLOCK": ROW_BLOCK, "num_warps": 8}
    _row_stats_kernel[(num_rows,)](
        logits_CV, targets_C, log_probs_C, entropies_C, lse_C, vocab, 1 / temperature, **launch
    )
    losses_C, slopes_C = objective(log_probs_C, rows)
    # two kernels and not one: the loss in between stays plain torch. A row of 600 KB leaves the
    # chip between its two readings anyway
    grad_logits_CV = (
        logits_CV if dtype == torch.float32 else torch.empty_like(logits_CV, dtype=dtype)
    )
    _row_grad_kernel[(num_rows,)](
        logits_CV,
        targets_C,
        lse_C,
        slopes_C.float().contiguous(),
        grad_logits_CV,
        vocab,
        1 / temperature,
        **launch,
    )
    return log_probs_C, entropies_C, losses_C, grad_logits_CV


# ---- the same in plain torch


def fp32_logits(hidden_ND: Tensor, weight_VD: Tensor, buffer_MV: Tensor | None = None) -> Tensor:
    """hidden @ weight.T accumulated and returned in fp32 (bf16 logits near 16 are spaced .125 nats
    apart), in the first rows of a buffer if given.
    """
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float32:
        return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
    return torch.mm(
        hidden_ND.float(),
        weight_VD.float().T,
        out=None if buffer_MV is None else buffer_MV[: len(hidden_ND)],
    )


def _buffer(chunks: list[slice], weight_VD: Tensor) -> Tensor | None:
    """On a CPU, room for the logits of any chunk: fresh pages for each cost a fifth of the
    product's time. CUDA's allocator reuses them anyway.
    """
    if weight_VD.is_cuda or not chunks:
        return None
    return weight_VD.new_empty(chunks[0].stop, len(weight_VD), dtype=torch.float32)


def _blocks(logits_CV: Tensor):
    """Slices of rows whose logits fit in a CPU's cache; one slice on a GPU."""
    num_rows, vocab = logits_CV.shape
    return _slices(num_rows, num_rows if logits_CV.is_cuda else BLOCK_BYTES_CPU // (4 * vocab))


def _slices(num_rows: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _softmax_(
    logits_RV: Tensor, targets_R: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropies, lse, e^y and its sum of a block of rows, y = z - max z. The
    logits are overwritten.
    """
    max_R1 = logits_RV.amax(-1, keepdim=True)
    y_RV = logits_RV.sub_(max_R1)
    if temperature != 1:
        y_RV.div_(temperature)
    target_R = y_RV.gather(-1, targets_R[:, None])[:, 0]
    exp_RV = torch.exp(y_RV)
    sum_R = exp_RV.sum(-1)
    log_sum_R = sum_R.log()
    entropies_R = log_sum_R - y_RV.mul_(exp_RV).sum(-1) / sum_R
    return target_R - log_sum_R, entropies_R, max_R1[:, 0] / temperature + log_sum_R, exp_RV, sum_R


def _stats_torch(
    hidden_CD, weight_VD, targets_C, temperature, buffer_CV=None
) -> tuple[Tensor, Tensor, Tensor]:
    logits_CV = fp32_logits(hidden_CD, weight_VD, buffer_CV)
    stats_3C = logits_CV.new_empty(3, len(logits_CV))
    for rows in _blocks(logits_CV):
        stats_3C[:, rows] = torch.stack(
            _softmax_(logits_CV[rows], targets_C[rows], temperature)[:3]
        )
    return stats_3C.unbind()


def _grad_logits_torch(
    hidden_CD,
    weight_VD,
    targets_C,
    lse_C,
    entropies_C,
    grad_log_probs_C,
    grad_entropies_C,
    temperature,
    buffer_CV=None,
) -> Tensor:
    logits_CV = fp32_logits(hidden_CD, weight_VD, buffer_CV)
    for rows in _blocks(logits_CV):
        log_p_RV = logits_CV[rows].div_(temperature).sub_(lse_C[rows, None])
        a_R1 = grad_log_probs_C[rows, None] / temperature
        b_R1 = grad_entropies_C[rows, None] / temperature
        probs_RV = torch.exp(log_p_RV)
        log_p_RV.add_(entropies_C[rows, None]).mul_(-b_R1).sub_(a_R1).mul_(probs_RV).scatter_add_(
            1, targets_C[rows, None], a_R1
        )
    return logits_CV


def _one_pass_torch(
    logits_CV, targets_C, rows, objective, temperature, _dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats_3C = logits_CV.new_empty(3, len(logits_CV))
    for block in _blocks(logits_CV):
        log_probs_R, entropies_R, _, exp_RV, sum_R = _softmax_(
            logits_CV[block], targets_C[block], temperature
        )
        losses_R, slopes_R = objective(
            log_probs_R, slice(rows.start + block.start, rows.start + block.stop)
        )
        slopes_R1 = (slopes_R / temperature)[:, None]
        torch.mul(exp_RV, -slopes_R1 / sum_R[:, None], out=logits_CV[block]).scatter_add_(
            1, targets_C[block, None], slopes_R1
        )
        stats_3C[:, block] = torch.stack([log_probs_R, entropies_R, losses_R])
    return *stats_3C, logits_CV


# ---- what both share


def _chunks(
    num_rows: int, bytes_per_row: int, chunk_bytes: int | None, device: torch.device
) -> list[slice]:
    """Slices of about equal size, of at most `chunk_bytes` each but of one row at least; above 128
    rows a multiple of a tile's height is the most.
    """
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES_CUDA if device.type == "cuda" else CHUNK_BYTES_CPU
    most = max(1, chunk_bytes // bytes_per_row)
    most -= most % 128 if most > 128 else 0
    return _slices(num_rows, -(-num_rows // max(1, -(-num_rows // most))))


def _multiply_(
    grad_hidden_CD: Tensor,
    grad_weight_VD: Tensor,
    grad_logits_CV: Tensor,
    hidden_CD: Tensor,
    weight_VD: Tensor,
) -> None:
    """grad_hidden = dz W and grad_weight += dz^T h, both in place; grad_weight is fp32
    whatever the weight's dtype.
    """
    if grad_logits_CV.is_cuda and weight_VD.dtype != torch.float32:
        grad_logits_CV = grad_logits_CV.to(weight_VD.dtype)
        torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_CD)
        torch.addmm(
            grad_weight_VD, grad_logits_CV.T, hidden_CD, out_dtype=torch.float32, out=grad_weight_VD
        )
    else:  # a CPU without bf16 units multiplies bf16 five times slower than fp32
        grad_logits_CV = grad_logits_CV.float()
        grad_hidden_CD.copy_(grad_logits_CV @ weight_VD.float())
        grad_weight_VD.addmm_(grad_logits_CV.T, hidden_CD.float())


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperature, kernel, chunk_bytes):
        bytes_per_row = (
            12 * triton.cdiv(len(weight_VD), _tiles(hidden_ND).block_v)
            if kernel == "triton"
            else 4 * len(weight_VD)
        )
        chunks = _chunks(len(hidden_ND), bytes_per_row, chunk_bytes, hidden_ND.device)
        stats = (
            _stats_triton
            if kernel == "triton"
            else functools.partial(_stats_torch, buffer_CV=_buffer(chunks, weight_VD))
        )
        stats_3N = hidden_ND.new_empty(3, len(hidden_ND), dtype=torch.float32)
        for rows in chunks:
            stats_3N[:, rows] = torch.stack(
                stats(hidden_ND[rows], weight_VD, targets_N[rows], temperature)
            )
        log_probs_N, entropies_N, lse_N = (row.clone() for row in stats_3N)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, lse_N, entropies_N)
        ctx.temperature, ctx.kernel, ctx.chunk_bytes = temperature, kernel, chunk_bytes
        return log_probs_N, entropies_N

    @staticmethod
    def backward(ctx, grad_log_probs_N, grad_entropies_N):
        hidden_ND, weight_VD, *per_row = ctx.saved_tensors
        # the gradient of a sum is one number, expanded
        per_row += [grad_log_probs_N.contiguous(), grad_entropies_N.contiguous()]
        bytes_per_row = (weight_VD.element_size() if ctx.kernel == "triton" else 4) * len(weight_VD)
        chunks = _chunks(len(hidden_ND), bytes_per_row, ctx.chunk_bytes, hidden_ND.device)
        grad_logits = (
            _grad_logits_triton
            if ctx.kernel == "triton"
            else functools.partial(_grad_logits_torch, buffer_CV=_buffer(chunks, weight_VD))
        )
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for rows in chunks:
            grad_logits_CV = grad_logits(
                hidden_ND[rows], weight_VD, *(vector[rows] for vector in per_row), ctx.temperature
            )
            _multiply_(
                grad_hidden_ND[rows], grad_weight_VD, grad_logits_CV, hidden_ND[rows], weight_VD
            )
            del grad_logits_CV  # before the next chunk's logits are made
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), *[None] * 4


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, objective, temperature, kernel, chunk_bytes):
        one_pass = _one_pass_triton if kernel == "triton" else _one_pass_torch
        stats_3N = hidden_ND.new_empty(3, len(hidden_ND), dtype=torch.float32)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        chunks = _chunks(len(hidden_ND), 4 * len(weight_VD), chunk_bytes, hidden_ND.device)
        buffer_CV = _buffer(chunks, weight_VD)
        for rows in chunks:
            logits_CV = fp32_logits(hidden_ND[rows], weight_VD, buffer_CV)
            *stats, grad_logits_CV = one_pass(
                logits_CV, targets_N[rows], rows, objective, temperature, weight_VD.dtype
            )
            stats_3N[:, rows] = torch.stack(stats)
            _multiply_(
                grad_hidden_ND[rows], grad_weight_VD, grad_logits_CV, hidden_ND[rows], weight_VD
            )
            del logits_CV, grad_logits_CV  # before the next chunk's are made
        log_probs_N, entropies_N, losses_N = stats_3N
        ctx.gradients = grad_hidden_ND, grad_weight_VD
        ctx.mark_non_differentiable(log_probs_N, entropies_N)
        return losses_N.sum(), log_probs_N, entropies_N

    @staticmethod
    def backward(ctx, grad_loss, *_):
        assert ctx.gradients is not None, (
            "the gradients of a one-pass loss are scaled in place and handed out: backward "
            "runs once"
        )
        (grad_hidden_ND, grad_weight_VD), ctx.gradients = ctx.gradients, None
        grad_weight_VD = grad_weight_VD.mul_(grad_loss).to(grad_hidden_ND.dtype)
        return grad_hidden_ND * grad_loss, grad_weight_VD, *[None] * 5


# ---- the two doors


def _checked(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, kernel: str
) -> str:
    """Return the kernel to use; ValueError names what does not fit."""
    if (
        hidden_ND.ndim != 2
        or weight_VD.ndim != 2
        or hidden_ND.shape[1] != weight_VD.shape[1]
        or targets_N.shape != hidden_ND.shape[:1]
    ):
        raise ValueError(
            f"shapes do not fit: hidden {tuple(hidden_ND.shape)}, weight "
            f"{tuple(weight_VD.shape)}, targets {tuple(targets_N.shape)}"
        )
    if hidden_ND.dtype != weight_VD.dtype or hidden_ND.dtype not in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        raise ValueError(
            f"dtypes do not fit: hidden {hidden_ND.dtype}, weight {weight_VD.dtype}; both "
            "fp32, bf16 or fp16"
        )
    if not hidden_ND.device == weight_VD.device == targets_N.device:
        raise ValueError(
            f"devices do not fit: hidden {hidden_ND.device}, weight {weight_VD.device}, "
            f"targets {targets_N.device}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: must be > 0")
    # no kernel would notice; rows are selected beforehand, so -100 is no mask
    if bool(((targets_N < 0) | (targets_N >= len(weight_VD))).any()):
        raise ValueError(
            f"targets {targets_N.min()}..{targets_N.max()} out of bounds: the vocabulary is "
            f"0..{len(weight_VD) - 1}"
        )
    if hidden_ND.stride(1) != 1 or weight_VD.stride(1) != 1:
        raise ValueError(
            f"rows are not contiguous: hidden strides {hidden_ND.stride()}, weight strides "
            f"{weight_VD.stride()}"
        )
    return choose_kernel(kernel, hidden_ND.device)


def linear_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    kernel: str = "auto",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log_probs_N, entropies_N) in fp32 nats of `targets_N` (int64) under softmax(hidden @
    weight.T / temperature).

    Both results are differentiable in `hidden_ND` and `weight_VD` (of one dtype: fp32, bf16 or
    fp16). N may be 0. `chunk_bytes` bounds the largest buffer: fp32 logits in torch; in Triton the
    tiles' sums forward (12 bytes a tile) and dz backward. kernel: see `launch.choose_kernel`.
    Raises ValueError for shapes, dtypes, devices or strides that do not fit, targets outside 0..V-1
    and a temperature <= 0.
    """
    kernel = _checked(hidden_ND, weight_VD, targets_N, temperature, kernel)
    return _LinearLogProbs.apply(
        hidden_ND, weight_VD, targets_N.contiguous(), temperature, kernel, chunk_bytes
    )


def linear_token_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    objective: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    *,
    temperature: float = 1.0,
    kernel: str = "auto",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum of losses, log_probs_N, entropies_N) in fp32; only the first is differentiable,
    and backward may run once.

    `objective(log_probs_C, rows)` returns the losses and d loss / d log p, both [C] fp32, of the
    tokens targets_N[rows]; a loss may depend on its own token's log-prob alone. The rest is as in
    `linear_log_probs`; `chunk_bytes` bounds the fp32 logits (in bf16, dz beside them is half as
    large).

    Example: -log p of every token is `lambda log_probs_C, rows: (-log_probs_C,
    torch.full_like(log_probs_C, -1.0))`.
    """
    kernel = _checked(hidden_ND, weight_VD, targets_N, temperature, kernel)
    if not (torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)):
        log_probs_N, entropies_N = _LinearLogProbs.apply(
            hidden_ND, weight_VD, targets_N.contiguous(), temperature, kernel, chunk_bytes
        )
        return objective(log_probs_N, slice(0, len(log_probs_N)))[0].sum(), log_probs_N, entropies_N
    return _LinearTokenLoss.apply(
        hidden_ND, weight_VD, targets_N.contiguous(), objective, temperature, kernel, chunk_bytes
    )
