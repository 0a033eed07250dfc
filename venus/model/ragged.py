"""Attention of one new token per row over cached rows of any lengths, on the CPU, as
two ragged products.

    scores_hrt = q_hr k_r,t,k(h) / sqrt(E)   for t < length_r
    out_hr     = sum_t p_hrt v_r,t,k(h),     p_hrt = softmax_t(scores_hrt)

The first is a dense product sampled where query and key are of the same row and kv head, the second
a bag of value vectors with weights, as in an embedding layer. Both read every key and value where
it lies, in rows or in pages, and no row is padded to the length of another but in the softmax, or
where that is almost nothing. A matrix product per row and head would be the plain way; with one
query it spends three quarters of its time on other things than its numbers. What a row gets is
summed in the order of its positions: the same bits in any company.

Shapes: R rows  H query heads  K kv heads  E head_dim  V vectors of a cache's layer
        M positions of all rows  J = H*M  T longest row.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from venus.model.cache import KVCache

# times the positions of all rows: up to here, padding every row costs less than moving the scores
# to a padded matrix and back
MOST_PADDING = 1.25
# the softmax's rows end at a multiple of this: the last numbers of an odd width would be
# summed in another order
WIDTH = 16


class RaggedPlan(NamedTuple):
    """Which of a layer's vectors each query sees, query (h, r) being number h*R + r.

    pattern_QV: sparse, an entry for every vector that a query sees, in the order of positions; its
    values are scratch. columns_J and starts_Q are its indices: query n sees
    columns_J[starts_Q[n]:starts_Q[n + 1]]. padded_J: where entry j stands in a [Q, T] matrix of
    scores. Where the rows are about as long as each other there is an entry for every place of that
    matrix instead, and bias_RT is -inf behind the end of a row.
    """

    pattern_QV: Tensor
    columns_J: Tensor
    starts_Q: Tensor
    padded_J: Tensor | None
    bias_RT: Tensor | None
    width: int


@functools.cache
def _silence_beta_warning() -> None:
    """torch says once, at the first one, that compressed sparse tensors are in beta and unchecked;
    the product takes no others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 1], [0], [1.0])


def plan_ragged(
    cache: KVCache, rows: Sequence[int], lengths: Sequence[int], num_groups: int
) -> RaggedPlan:
    """One query for each of `rows`, which sees the first `lengths` positions of its
    row; num_groups: H/K.
    """
    _silence_beta_warning()
    lengths_R, num_rows = np.asarray(lengths), len(rows)
    width = -(-int(lengths_R.max()) // WIDTH) * WIDTH
    seen_R = (
        np.full(num_rows, width)
        if num_rows * width <= MOST_PADDING * lengths_R.sum()
        else lengths_R
    )
    starts_R, entries_M = np.cumsum(seen_R) - seen_R, np.arange(seen_R.sum())
    positions_M = entries_M - np.repeat(starts_R, seen_R)
    # an entry behind the end of its row stands for the row's last position, and is not weighed
    places_MK = cache.places(
        np.repeat(rows, seen_R), np.minimum(positions_M, np.repeat(lengths_R - 1, seen_R))
    )
    keys_VE, _ = cache.vectors(0)
    # half the bytes to read
    num_heads = places_MK.shape[1] * num_groups
    index = np.int32 if len(keys_VE) < 2**31 else np.int64
    columns_J = torch.from_numpy(
        np.repeat(places_MK.T.astype(index), num_groups, axis=0).reshape(-1)
    )
    starts_Q = torch.from_numpy(
        np.concatenate([[0], np.cumsum(np.tile(seen_R, num_heads))]).astype(index)
    )
    padded_J = bias_RT = None
    if seen_R is lengths_R:
        padded_M = positions_M + np.repeat(np.arange(num_rows) * width, seen_R)
        padded_J = torch.from_numpy(
            (np.arange(num_heads)[:, None] * (num_rows * width) + padded_M).reshape(-1)
        )
    else:
        bias_RT = torch.from_numpy(
            np.where(np.arange(width) < lengths_R[:, None], 0.0, -np.inf)
        ).to(keys_VE.dtype)
    values_J, size = keys_VE.new_zeros(len(columns_J)), (num_heads * num_rows, len(keys_VE))
    pattern_QV = torch.sparse_csr_tensor(
        starts_Q, columns_J, values_J, size, check_invariants=False
    )
    return RaggedPlan(pattern_QV, columns_J, starts_Q, padded_J, bias_RT, width)


def attend_ragged(q_RHE: Tensor, keys_VE: Tensor, values_VE: Tensor, plan: RaggedPlan) -> Tensor:
    """Return [R, H, E]. fp32 or fp64, no gradient."""
    num_rows, num_heads, head_dim = q_RHE.shape
    queries_QE = q_RHE.transpose(0, 1).reshape(-1, head_dim)
    scores_J = torch.sparse.sampled_addmm(
        plan.pattern_QV,
        queries_QE,
        keys_VE.t(),
        beta=0.0,
        alpha=head_dim**-0.5,
        out=plan.pattern_QV,
    ).values()
    if plan.padded_J is None:
        weights_J = (
            (scores_J.view(num_heads, num_rows, plan.width) + plan.bias_RT).softmax(-1).view(-1)
        )
    else:
        scores_QT = scores_J.new_full((len(queries_QE), plan.width), -torch.inf)
        scores_QT.view(-1).index_copy_(0, plan.padded_J, scores_J)
        weights_J = scores_QT.softmax(-1).view(-1).index_select(0, plan.padded_J)
    out_QE = F.embedding_bag(
        plan.columns_J, values_VE, plan.starts_Q[:-1], mode="sum", per_sample_weights=weights_J
    )
    return out_QE.view(num_heads, num_rows, head_dim).transpose(0, 1)
