"""Sequence parallelism (Ulysses): each rank has some tokens with all heads, but inside attention
all tokens with some heads. An all-to-all before attention trades one for the other, one behind it
trades back.

Shapes: B rows  S sequence  H query heads  K kv heads  E head_dim  N tokens of a packed sequence.
"""

import dataclasses
import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor

from venus.train.batches import Packed
from venus.train.parallel import World


def split_sequence(packed: Packed, world: World) -> Packed:
    """This rank's part of the tokens, [1, N / sp], with a layout that still spans all of them. N
    must be a multiple of sp.
    """
    if world.sp == 1:
        return packed

    def part(x_1N: Tensor) -> Tensor:
        return x_1N.tensor_split(world.sp, dim=1)[world.sp_rank]

    layout = dataclasses.replace(
        packed.layout,
        to_heads=functools.partial(_to_heads, group=world.sp_group),
        to_sequence=functools.partial(_to_sequence, group=world.sp_group),
    )
    return Packed(
        part(packed.ids_1N),
        part(packed.targets_1N),
        part(packed.positions_1N),
        layout,
        {name: part(values_1N) for name, values_1N in packed.fields.items()},
    )


def _to_heads(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S / sp, heads, E] -> [B, S, heads / sp, E], q, k and v in one exchange. Too few or uneven
    kv heads are repeated; their gradients then add up.
    """
    sp, num_kv_heads = group.size(), k_BSKE.shape[2]
    repeats = math.lcm(num_kv_heads, sp) // num_kv_heads
    repeated = (
        q_BSHE,
        k_BSKE.repeat_interleave(repeats, dim=2),
        v_BSKE.repeat_interleave(repeats, dim=2),
    )
    by_rank = [x.unflatten(2, (sp, -1)).movedim(2, 0) for x in repeated]
    # [sp, B, S / sp, heads of this rank, E]
    mixed = _AllToAll.apply(torch.cat(by_rank, dim=3), group)
    return mixed.movedim(0, 1).flatten(1, 2).split([x.shape[3] for x in by_rank], dim=2)


def _to_sequence(out_BSHE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, H / sp, E] -> [B, S / sp, H, E]."""
    # [sp, B, S / sp, H / sp, E]
    mixed = _AllToAll.apply(out_BSHE.unflatten(1, (group.size(), -1)).movedim(1, 0), group)
    return mixed.movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Part r of dimension 0 goes to rank r, and what comes from rank r becomes part
    r: its own transpose.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # else empty_like keeps the strides, and gloo fills the result in another
    # order, without an error
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
