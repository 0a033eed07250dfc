"""Linear + log-softmax + gather in chunks: log-probabilities and entropies of chosen tokens without an [N, V] tensor.

For hidden rows h_n, head weights W and temperature T:

    z_nv   = <h_n, W_v> / T          logits, fp32
    lse_n  = log sum_v exp(z_nv)
    logp_n = z_n,target - lse_n
    H_n    = lse_n - sum_v p_nv z_nv                      entropy in nats, p = softmax(z)

and for upstream gradients a_n (on logp) and b_n (on H):

    dz_nv = a_n (1[v = target] - p_nv) - b_n p_nv (z_nv - lse_n + H_n)

Memory traffic: the forward keeps lse and H (two floats a row); the backward recomputes each chunk's logits, so the peak is one chunk of
`chunk_bytes` instead of N x V x 4 bytes. Matrix products: 2 N V D forward, 6 N V D backward (recompute, dh, dW).

Shapes: N selected tokens, V vocab, D hidden.
"""

import torch
from torch import Tensor

CHUNK_BYTES_CPU = 80 * 2**20
CHUNK_BYTES_CUDA = 2**30


def linear_log_probs_ref(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same two numbers from one full fp32 logits matrix: the reference that the chunked form is tested against."""
    log_softmax_NV = torch.log_softmax(hidden_ND.float() @ weight_VD.float().T / temperature, dim=-1)
    entropies_N = -(log_softmax_NV.exp() * log_softmax_NV).sum(-1)
    return log_softmax_NV.gather(-1, targets_N[:, None])[:, 0], entropies_N


def linear_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, temperature: float = 1.0, chunk_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (log_probs_N, entropies_N) in fp32 nats of `targets_N` (int64) under softmax(hidden @ weight.T / temperature).

    Both results are differentiable in `hidden_ND` and `weight_VD`. N may be 0. `chunk_bytes` bounds the fp32 logits alive at once.
    Raises ValueError on a shape mismatch or a temperature <= 0.
    """
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1] or targets_N.shape != hidden_ND.shape[:1]:
        raise ValueError(f"shapes do not fit: hidden {tuple(hidden_ND.shape)}, weight {tuple(weight_VD.shape)}, targets {tuple(targets_N.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: must be > 0")
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES_CUDA if hidden_ND.is_cuda else CHUNK_BYTES_CPU
    chunk_rows = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    return _LinearLogProbs.apply(hidden_ND, weight_VD, targets_N, temperature, chunk_rows)


def fp32_logits(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """hidden @ weight.T accumulated and returned in fp32: bf16 logits near 16 are spaced .125 nats apart."""
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float32:
        return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
    return hidden_ND.float() @ weight_VD.float().T


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperature, chunk_rows):
        log_probs_N = hidden_ND.new_empty(hidden_ND.shape[0], dtype=torch.float32)
        entropies_N, lse_N = torch.empty_like(log_probs_N), torch.empty_like(log_probs_N)
        for start in range(0, hidden_ND.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = fp32_logits(hidden_ND[rows], weight_VD).div_(temperature)
            lse = torch.logsumexp(logits, dim=-1)
            log_softmax = logits.sub_(lse[:, None])
            log_probs_N[rows] = log_softmax.gather(-1, targets_N[rows, None])[:, 0]
            # not lse - sum p z: the rounding of sum p is then multiplied by z, 0.1 nats off at logits of a thousand
            entropies_N[rows] = -torch.linalg.vecdot(torch.exp(log_softmax), log_softmax)
            lse_N[rows] = lse
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, lse_N, entropies_N)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        return log_probs_N, entropies_N

    @staticmethod
    def backward(ctx, grad_log_probs_N, grad_entropies_N):
        hidden_ND, weight_VD, targets_N, lse_N, entropies_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)  # fp32 across chunks whatever the weight's dtype
        entropy_is_used = bool(grad_entropies_N.any())
        for start in range(0, hidden_ND.shape[0], ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            log_softmax = fp32_logits(hidden_ND[rows], weight_VD).div_(ctx.temperature).sub_(lse_N[rows, None])
            probs = torch.exp(log_softmax)
            if entropy_is_used:
                grad_logits = probs * (-grad_log_probs_N[rows, None] - grad_entropies_N[rows, None] * (log_softmax + entropies_N[rows, None]))
            else:
                grad_logits = probs.mul_(-grad_log_probs_N[rows, None])
            grad_logits.scatter_add_(1, targets_N[rows, None], grad_log_probs_N[rows, None])
            grad_logits = grad_logits.div_(ctx.temperature).to(weight_VD.dtype)
            grad_hidden_ND[rows] = grad_logits @ weight_VD
            grad_weight_VD += (grad_logits.T @ hidden_ND[rows]).float()
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None
